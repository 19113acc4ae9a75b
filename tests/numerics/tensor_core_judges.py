"""Two models of tensor cores by other people, as judges of `numerics/tensor_cores.py`.

`python -m tests.numerics.tensor_core_judges` compares 10^6 sums per GPU and pair of formats with MMA-Sim, and 200
products with mmaemu's H100 PCIe, about 20 minutes on one core; `test_tensor_cores.py` compares fewer.
"""

import itertools
import sys

import torch

from lightning_lowprec.numerics.tensor_cores import UNITS, accumulate, scaled_product

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
NAMES = {E4M3: "e4m3", E5M2: "e5m2"}
PAIRS = [(on, *pair) for on in UNITS for pair in itertools.product(NAMES, repeat=2)]
ROWS, COLUMNS = 32, 48
SPLIT = [(16, 64, 5760, True), (16, 64, 8192, False)]
"""Small products whose K mmaemu's H100 PCIe splits: M, N, K, and whether accumulation is fast."""
KINDS = ["all codes", "finite codes", "normal", "one sign", "subnormal", "cancelling"]


def codes(rows, k, dtype, kind, generator):
    """Return [rows, k] codes: any bits, or values of one kind; "all codes" has few that are not finite."""
    bits = torch.randint(0, 256, (rows, k), dtype=torch.uint8, generator=generator)
    random = torch.randn(rows, k, generator=generator)
    if kind in ("all codes", "finite codes"):
        rare = torch.rand(rows, k, generator=generator) < (0.03 if kind == "all codes" else 0)
        return torch.where(bits.view(dtype).float().isfinite() | rare, bits, 0).view(dtype)
    if kind == "subnormal":  # and zeros of both signs
        low = torch.where(torch.rand(rows, k, generator=generator) < 0.8, bits & 0x81, bits & 0x87)
        return torch.where(low.view(dtype).float().isfinite(), low, 0).view(dtype)
    values = random * torch.exp2(torch.randint(-4, 5, (rows, 1), generator=generator).float())
    if kind == "one sign":
        values = values.abs()
    if kind == "cancelling":
        values[:, 1::2] = -values[:, ::2]
    return values.clamp(-200, 200).to(dtype)


def mma_sim(on, a, b, scale_a=None, scale_b=None, *, promoted=0):
    """Return MMA-Sim's sums of codes [M, K] and [N, K]: [M, N] float32, a new sum every `promoted` products."""
    from mmasim import nv_ptx

    if promoted:
        parts = (mma_sim(on, *pair) for pair in zip(a.split(promoted, 1), b.split(promoted, 1), strict=True))
        return sum(parts, torch.zeros(len(a), len(b)))

    of_a, of_b = NAMES[a.dtype], NAMES[b.dtype]
    if scale_a is not None:
        unit = nv_ptx.TCGen05MMABlockScale("Blackwell", f"m128n8k32.kind::mxf8f6f4.block32.f32.{of_a}.{of_b}.ue8m0")
    elif on == "hopper":
        unit = nv_ptx.WGMMA("Hopper", f"m64n8k32.f32.{of_a}.{of_b}")
    elif on == "ada":
        unit = nv_ptx.MMA("Ada Lovelace", f"m16n8k32.f32.{of_a}.{of_b}.f32")
    else:
        unit = nv_ptx.TCGen05MMA("Blackwell", f"m64n8k32.kind::f8f6f4.f32.{of_a}.{of_b}")
    m, n = len(a), len(b)
    sums = torch.zeros(m, n)
    for start in range(0, a.shape[1], 32):
        part, at = slice(start, start + 32), slice(start // 32, start // 32 + 1)
        operands = a[:, None, part].expand(-1, n, -1), b[None, :, part].expand(m, -1, -1), sums
        scales = (
            () if scale_a is None else (scale_a[:, None, at].expand(-1, n, -1), scale_b[None, :, at].expand(m, -1, -1))
        )
        sums = unit.dpa(*operands, *scales)
    return sums


def differing(on, of_a, of_b, count, seed=0):
    """Return how many of `count` sums, at least, differ from MMA-Sim's in any bit, and how many were compared."""
    generator = torch.Generator().manual_seed(seed)
    compared = different = 0
    for kind, k in itertools.cycle(itertools.product(KINDS, (32, 96, 256))):
        a, b = codes(ROWS, k, of_a, kind, generator), codes(COLUMNS, k, of_b, kind, generator)
        different += unequal(accumulate(a, b, on, True), mma_sim(on, a, b))
        compared += ROWS * COLUMNS
        if compared >= count and (kind, k) == (KINDS[-1], 256):
            return different, compared


def differing_mx(count, seed=0):
    """Return the same for MXFP8 on Blackwell: e4m3 codes with every scale of 8 bits, NaN included."""
    generator = torch.Generator().manual_seed(seed)
    compared = different = 0
    bounds = [(120, 134), (0, 256), (0, 70), (180, 255)]
    for kind, (low, high) in itertools.cycle(itertools.product(KINDS, bounds)):
        a, b = (codes(rows, 96, E4M3, kind, generator) for rows in (ROWS, COLUMNS))
        scales = [
            torch.randint(low, high, (rows, 3), dtype=torch.uint8, generator=generator).view(torch.float8_e8m0fnu)
            for rows in (ROWS, COLUMNS)
        ]
        different += unequal(accumulate(a, b, "blackwell", False, *scales), mma_sim("blackwell", a, b, *scales))
        compared += ROWS * COLUMNS
        if compared >= count and (kind, low) == (KINDS[-1], 180):
            return different, compared


def unequal(ours, theirs):
    return int((ours.view(torch.int32) != theirs.view(torch.int32)).sum())


def shapes(count, largest, seed=0):
    """Yield M, N, K, whether accumulation is fast, and in how many parts mmaemu says that its H100 PCIe splits K."""
    import mmaemu
    from mmaemu.platform.splitk_table import resolve_splitk

    generator, given = torch.Generator().manual_seed(seed), [*SPLIT]
    while count:
        (m, n), fast = (16 * torch.randint(1, 65, (2,), generator=generator)).tolist(), bool(count % 2)
        k = [1024, 1920, 2048, 4096, 5760][int(torch.randint(5, (), generator=generator))]
        if given:
            m, n, k, fast = given.pop()
        options = {"a_dtype": E4M3, "b_dtype": E4M3, "out_dtype": torch.bfloat16, "use_fast_accum": fast}
        try:
            parts = resolve_splitk(m, n, k, **options, profile="hopper").S
        except mmaemu.SplitKUnknownError:  # nobody has seen what cuBLASLt does
            continue
        if m * n * k <= largest or (m, n, k, fast) in SPLIT:
            count -= 1
            yield m, n, k, fast, parts


def in_parts(a, b, scale_a, scale_b, dtype, *, fast, parts):
    """Return a product on Hopper whose K is split: parts of whole runs of 128, added up in float32."""
    if parts == 1:
        return scaled_product(a, b, scale_a, scale_b, dtype, fast=fast, on="hopper")
    each = 128 * -(-a.shape[1] // (128 * parts))
    pairs = zip(a.split(each, 1), b.t().split(each, 1), strict=True)
    sums = sum(accumulate(x.contiguous(), y.contiguous(), "hopper", fast) for x, y in pairs)
    return (sums * (scale_a * scale_b)).to(dtype)


def differing_products(count, largest, seed=0):
    """Return how many products with scales, in bf16, differ from mmaemu's H100 PCIe, and how many it splits."""
    import mmaemu

    generator, different, split = torch.Generator().manual_seed(seed), 0, 0
    scales = torch.tensor(0.0137), torch.tensor(2.71)
    for number, (m, n, k, fast, parts) in enumerate(shapes(count, largest, seed)):
        kind = KINDS[1:][number % 5]
        a, b = codes(m, k, E4M3, kind, generator), codes(n, k, E4M3, kind, generator).t()
        theirs = mmaemu.scaled_mm(a, b, *scales, out_dtype=torch.bfloat16, use_fast_accum=fast, profile="hopper")
        ours = in_parts(a, b, *scales, torch.bfloat16, fast=fast, parts=parts)
        different += not torch.equal(ours, theirs)
        split += parts > 1
    return different, split


def main(count, products):
    for on, of_a, of_b in PAIRS:
        print(on, NAMES[of_a], NAMES[of_b], *differing(on, of_a, of_b, count), flush=True)
    print("blackwell MXFP8", *differing_mx(count), flush=True)
    different, split = differing_products(products, largest=1 << 26)
    print("products unlike mmaemu's", different, "of", products, "of which its H100 splits", split)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:] or (1_000_000, 200)))
