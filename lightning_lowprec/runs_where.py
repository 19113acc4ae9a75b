"""The table of what runs where: a cell for every recipe and architecture, each with its reason and its source.

A recipe is a way to multiply, such as torchao's rowwise scales; several precisions share one. A cell says *yes*, *no*
or *not known*. Not known means that neither a library nor a user has confirmed that the recipe runs. A source is short:
``pytorch#192707`` is that issue or pull request of pytorch/pytorch, ``ao#...`` of pytorch/ao, ``TE#...`` of
NVIDIA/TransformerEngine. A source in words is a function or a file, behind the name of its library.

A reason is a predicate: the device is its subject.

An architecture stands for every device with the same kernels: ``sm_80`` for compute capabilities 8.0 to 8.8, ``sm_120``
for 12.0 and 12.1. A device is described by three facts (its type, its compute capability, its ROCm architecture), so
that an answer for a device needs no such device.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final, Literal, get_args

FP8Format = Literal["e4m3fn", "e4m3fnuz"]


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """Devices with the same kernels."""

    key: str
    """The name in tables and for ``lowprec doctor --device``: ``"sm_90"``."""
    title: str
    """The name in messages: ``"NVIDIA 9.0 (Hopper)"``."""
    fp8: FP8Format | None = None
    """The float8 format of four exponent bits that its matrix kernels multiply; None: it has none."""
    emulates: bool = True
    """Whether tensors of float8 can be there at all, so that FP8 can be emulated."""


def _nvidia(major: int, minor: int, title: str, fp8: FP8Format | None = None) -> tuple[tuple[int, int], Architecture]:
    return (major, minor), Architecture(key=f"sm_{major}{minor}", title=title, fp8=fp8)


_BY_CAPABILITY: Final = (
    _nvidia(6, 0, "NVIDIA 6.x (Pascal) and older"),
    _nvidia(7, 0, "NVIDIA 7.0 (Volta)"),
    _nvidia(7, 5, "NVIDIA 7.5 (Turing)"),
    _nvidia(8, 0, "NVIDIA 8.0 to 8.8 (Ampere)"),
    _nvidia(8, 9, "NVIDIA 8.9 (Ada)", "e4m3fn"),
    _nvidia(9, 0, "NVIDIA 9.0 (Hopper)", "e4m3fn"),
    _nvidia(10, 0, "NVIDIA 10.x (Blackwell, data centre)", "e4m3fn"),
    _nvidia(11, 0, "NVIDIA 11.x (Thor)", "e4m3fn"),
    _nvidia(12, 0, "NVIDIA 12.x (RTX 50, RTX PRO, Spark)", "e4m3fn"),
    _nvidia(13, 0, "NVIDIA 13.0 and newer", "e4m3fn"),
)
"""NVIDIA's architectures, by the compute capability that each one begins with."""
_BY_GCN: Final = (
    (r"gfx90[0-9a-f]", Architecture(key="gfx90a", title="AMD MI200 and older")),
    (r"gfx94[012]", Architecture(key="gfx942", title="AMD MI300", fp8="e4m3fnuz")),
    (r"gfx950", Architecture(key="gfx950", title="AMD MI350", fp8="e4m3fn")),
    (r"gfx1[01]\d\d", Architecture(key="gfx1100", title="AMD RDNA 1 to 3")),
    (r"gfx120[01]", Architecture(key="gfx1200", title="AMD RDNA 4", fp8="e4m3fn")),
)
"""AMD's architectures, by regular expressions of the name that ROCm gives a device."""
_OTHERS: Final = (
    Architecture(key="xpu", title="Intel XPU"),
    Architecture(key="mps", title="Apple MPS", emulates=False),
    Architecture(key="cpu", title="CPU"),
)
OTHER: Final = Architecture(key="other", title="a device that the table does not know")
"""Any device without a column: of a newer ROCm architecture, or of another type."""

ARCHITECTURES: Final[dict[str, Architecture]] = {
    found.key: found
    for found in (*(found for _, found in _BY_CAPABILITY), *(found for _, found in _BY_GCN), *_OTHERS, OTHER)
}


def classify(type: str, capability: tuple[int, int] | None = None, gcn: str | None = None) -> Architecture:
    """Return the architecture of a device of a ``type`` of torch: ROCm's GPUs are ``"cuda"`` too.

    ``gcn`` is ROCm's name of the GPU, such as ``"gfx90a:sramecc+:xnack-"``, and counts before the ``capability``.
    """
    if type != "cuda":
        return next((other for other in _OTHERS if other.key == type), OTHER)
    if gcn is not None:
        return next((amd for pattern, amd in _BY_GCN if re.fullmatch(pattern, gcn.split(":")[0])), OTHER)
    if capability is None:
        return OTHER
    return next((nvidia for first, nvidia in reversed(_BY_CAPABILITY) if capability >= first), _BY_CAPABILITY[0][1])


def named(name: str) -> Architecture:
    """Return the architecture of a name: a key of the table, or another member such as ``sm_86`` and ``gfx1201``."""
    if name in ARCHITECTURES:
        return ARCHITECTURES[name]
    sm = re.fullmatch(r"sm_?(\d+)(\d)[af]?", name)
    member = classify("cuda", gcn=name) if sm is None else classify("cuda", (int(sm[1]), int(sm[2])))
    if member is OTHER:
        raise ValueError(f"`device={name!r}` is no architecture; expected one of: {', '.join(ARCHITECTURES)}.")
    return member


RecipeKey = Literal[
    "half-auto", "bf16", "fp16",
    "tensorwise", "tensorwise-per-gemm", "rowwise", "rowwise-gw-hp", "msamp", "fp8-head",
    "te-delayed", "te-current", "te-block", "te-mxfp8", "te-nvfp4", "te-nvfp4-plain",
    "torchao-block", "torchao-mxfp8", "int8", "experts",
]  # fmt: skip
"""The recipes; the rows of the table."""
RECIPES: Final[tuple[RecipeKey, ...]] = get_args(RecipeKey)


@dataclass(frozen=True)
class Cell:
    """Whether one recipe runs on one architecture."""

    runs: bool | None
    """None: not known."""
    emulated: bool = False
    """The recipe runs on the arithmetic of another format: slow."""
    reason: str = ""
    """A predicate without a subject; every answer but a plain yes has one."""
    source: str = ""
    """The library's function, issue or pull request that says so."""


Row = Mapping[str, Cell]
"""The cells of a recipe by the keys of architectures."""


def _yes(source: str, reason: str = "") -> Cell:
    return Cell(runs=True, reason=reason, source=source)


_no, _unknown, _emulated = partial(Cell, False, False), partial(Cell, None, False), partial(Cell, True, True)
_GATE: Final = "pytorch ScaledBlasDeviceUtils.cpp"
"""The file of torch that says which architectures multiply float8."""
_OLD: Final = ("sm_60", "sm_70", "sm_75")
_NO_FP8: Final = (*_OLD, "sm_80")
_AMD: Final = ("gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1200")
_NVIDIA: Final = tuple(key for key in ARCHITECTURES if key.startswith("sm_"))
_NEWER: Final = _unknown("is newer than this table", "no report")
_OTHER: Final = _unknown("is a device that nobody has reported about", "no report")
_NO_TENSOR_CORES: Final = _no(
    "has no FP8 tensor cores (they start at compute capability 8.9)", f"{_GATE} scaled_mm_arch_allowed"
)
_NO_FLOAT8_ON_AMD: Final = _no(
    "has no FP8 matrix kernels (they start with MI300; its compute capability 9.0 is not Hopper's)",
    f"{_GATE} scaled_mm_arch_allowed",
)
_NO_FLOAT8_ON_RDNA: Final = _no("has no FP8 matrix kernels (they start with RDNA 4)", f"{_GATE} scaled_mm_arch_allowed")
_NO_FLOAT8_ON_MPS: Final = _no("has no float8 tensors", "pytorch#148420")
_XPU: Final = _unknown("multiplies float8, but FP8 training there is in work upstream", "torch-xpu-ops#2325")
_ON_CPU: Final = _emulated(
    "emulates FP8: codes and scales as on a GPU, products in float32", "Float8LinearConfig(emulate=True)"
)


def _cells(cell: Cell, *keys: str) -> dict[str, Cell]:
    return dict.fromkeys(keys, cell)


_HALF_EVERYWHERE: Final = {
    **_cells(_yes("torch.autocast"), *_NVIDIA, *_AMD, "xpu", "cpu"),
    "sm_130": _yes("torch.cuda.is_bf16_supported"),
    "other": _OTHER,
}
_FLOAT16: Final[Row] = {**_HALF_EVERYWHERE, "mps": _yes("accelerate#3373")}
_BFLOAT16: Final[Row] = {
    **_HALF_EVERYWHERE,
    **_cells(
        _emulated(
            "has no bf16 tensor cores (they start at compute capability 8.0), so that bf16 is emulated",
            "torch.cuda.is_bf16_supported",
        ),
        *_OLD,
    ),
    "mps": _yes("pytorch#139390", "needs macOS 14 or later"),
}
_FP8: Final[Row] = {
    **_cells(_NO_TENSOR_CORES, *_NO_FP8),
    "sm_130": _NEWER,
    "gfx90a": _NO_FLOAT8_ON_AMD,
    "gfx1100": _NO_FLOAT8_ON_RDNA,
    "xpu": _XPU,
    "mps": _NO_FLOAT8_ON_MPS,
    "cpu": _ON_CPU,
    "other": _OTHER,
}
"""What all FP8 recipes of torchao and of this package have in common."""
_ROWWISE: Final[Row] = {
    **_FP8,
    "sm_89": _yes("pytorch#144348"),
    "sm_90": _yes("torchao docs/source/workflows/training.md"),
    "sm_100": _yes("pytorch#148274"),
    "sm_110": _yes("pytorch RowwiseScaledMM.cu"),
    "sm_120": _no(
        "fails with CUBLAS_STATUS_NOT_SUPPORTED where there is a scale per row (reported with torch 2.10)",
        "pytorch#192707",
    ),
    "gfx942": _yes("pytorch#144432"),
    "gfx950": _yes("pytorch ScaledBlas.cpp"),
    "gfx1200": _unknown("multiplies float8, but nobody has reported scales per row there", "legacy-rocm-build#6019"),
}
_OWN_KERNELS_ON_ROCM: Final = "multiplies these codes, but the kernels of this package have not run on ROCm"
_OWN_CODES: Final[Row] = {
    **_FP8,
    **_cells(_yes(f"{_GATE} scaled_mm_arch_allowed"), "sm_89", "sm_90", "sm_100", "sm_110"),
    "sm_120": _yes("pytorch#192707", "runs with one scale per tensor"),
    "gfx942": _no(
        "multiplies float8_e4m3fnuz only, and the codes of this package are float8_e4m3fn",
        "hipBLASLt data-type-support, products/scaled.py",
    ),
    "gfx950": _unknown(_OWN_KERNELS_ON_ROCM, "hipBLASLt data-type-support"),
    "gfx1200": _unknown(_OWN_KERNELS_ON_ROCM, "hipBLASLt data-type-support"),
}
"""One scale per tensor, with codes that this package makes and keeps: always float8_e4m3fn."""
_PER_GEMM: Final[Row] = {
    **_OWN_CODES,
    "gfx942": _yes("torchao.float8.config Float8TypeConfig", "multiplies float8_e4m3fnuz, which torchao encodes to"),
    "gfx950": _yes("torchao.float8.config Float8TypeConfig"),
    "gfx1200": _yes("legacy-rocm-build#6019"),
}
_NOT_NVIDIA: Final = _no(
    "is no NVIDIA GPU, and Transformer Engine computes on NVIDIA GPUs only", "Transformer Engine README"
)
_TE: Final[Row] = {
    **_cells(
        _no(
            "has no FP8 tensor cores (Transformer Engine wants compute capability 8.9)",
            "transformer_engine check_fp8_support",
        ),
        *_NO_FP8,
    ),
    "sm_130": _NEWER,
    **_cells(_NOT_NVIDIA, *_AMD, "xpu", "mps", "cpu", "other"),
}
"""What all recipes of Transformer Engine have in common."""


def _te_from(first: str, check: str, reason: str) -> Row:
    known = [key for key in _NVIDIA if key not in (*_NO_FP8, "sm_130")]
    begins = known.index(first)
    return {**_TE, **_cells(_no(reason, check), *known[:begins]), **_cells(_yes(check), *known[begins:])}


_ROCM_FORK: Final = "has a fork of Transformer Engine by AMD, with which this package has not run"
_TE_FP8: Final[Row] = {
    **_te_from("sm_89", "transformer_engine check_fp8_support", ""),
    **_cells(_unknown(_ROCM_FORK, "ROCm/TransformerEngine README"), "gfx942", "gfx950"),
}
_TE_BLOCK: Final[Row] = {
    **_te_from(
        "sm_90",
        "transformer_engine check_fp8_block_scaling_support",
        "has no FP8 products with a scale per block (they start at compute capability 9.0)",
    ),
    "sm_100": _yes("TE#2157", "computes with MXFP8 products"),
    "sm_120": _yes("TE#2668", "computes with MXFP8 products"),
}
_TE_MXFP8: Final[Row] = {
    **_te_from(
        "sm_100",
        "transformer_engine check_mxfp8_support",
        "has no MXFP8 products (they start at compute capability 10.0)",
    ),
    "sm_110": _unknown("passes Transformer Engine's check, but its support matrix names 10.x only", "TE#3195"),
    "sm_120": _no(
        "has no MXFP8 products for all layouts in Transformer Engine", "transformer_engine check_mxfp8_support"
    ),
    "gfx950": _unknown(_ROCM_FORK, "ROCm/TransformerEngine#234"),
}
_NVFP4_PLAIN: Final[Row] = {
    **_te_from(
        "sm_100",
        "transformer_engine check_nvfp4_support",
        "has no NVFP4 products (they start at compute capability 10.0)",
    ),
    "sm_110": _unknown("passes Transformer Engine's check, but nobody has reported NVFP4 there", "TE#3195"),
    "sm_120": _yes("TE#3062"),
}
_ONLY_PLAIN_NVFP4: Final = _no(
    "has neither the random Hadamard transform nor the stochastic rounding of this recipe", "TE#2255, TE#2956, TE#3195"
)
_NVFP4: Final[Row] = {**_NVFP4_PLAIN, **_cells(_ONLY_PLAIN_NVFP4, "sm_110", "sm_120")}
_BLOCK_BY_TRITON: Final = "multiplies by torchao's Triton kernels, and nobody has reported them there"
_TORCHAO_BLOCK: Final[Row] = {
    **_OWN_CODES,
    **_cells(_unknown(_BLOCK_BY_TRITON, "ao#3290"), "sm_89", "sm_100", "sm_110", "sm_120", "gfx950", "gfx1200"),
    "sm_90": _yes("ao#3290", "multiplies by cuBLASLt from CUDA 12.9 on, else by torchao's Triton kernels"),
}
_NO_MX: Final = "has no products with a scale per 32 values"
_TORCHAO_MXFP8: Final[Row] = {
    **_cells(
        _no(f"{_NO_MX} (they start at compute capability 10.0)", "torchao.prototype.mx_formats.kernels"),
        *_NO_FP8, "sm_89", "sm_90",
    ),
    "sm_100": _yes("torchao docs/source/workflows/training.md"),
    "sm_110": _unknown("is not reported with torchao's MXFP8 kernels, made for 10.x", "torchao mxfp8/quant.py"),
    "sm_120": _unknown(
        "multiplies MXFP8 by rows times columns (TN) only before cuBLAS 13.6, and torchao's kernels are made for 10.x",
        "pytorch#198126",
    ),
    "sm_130": _NEWER,
    **_cells(
        _no(f"{_NO_MX} (torch has them on gfx950)", "pytorch ScaledBlas.cpp"),
        "gfx90a", "gfx942", "gfx1100", "gfx1200",
    ),
    "gfx950": _unknown("multiplies MXFP8, but training there is in work upstream", "ao#4275"),
    "xpu": _unknown("is not reported: MXFP8 products are in work upstream", "torch-xpu-ops#2207"),
    "mps": _NO_FLOAT8_ON_MPS,
    "cpu": _emulated("emulates MXFP8: products in float32", "torchao KernelPreference.EMULATED"),
    "other": _OTHER,
}  # fmt: skip
_INT8_UNKNOWN: Final = _unknown("is not reported with torchao's int8 kernel, which is Triton's", "ao#748")
_INT8: Final[Row] = {
    **_cells(_unknown("is older than the GPUs that torchao's int8 kernel was run on", "torchtune#1552"), *_OLD),
    **_cells(_yes("ao#748"), "sm_80", "sm_89", "sm_90"),
    **_cells(_INT8_UNKNOWN, "sm_100", "sm_110", "sm_120", *_AMD, "xpu"),
    "sm_130": _NEWER,
    "mps": _unknown("has no Triton, and nobody has reported torch._int_mm there", "torchao int8_mm.py"),
    "cpu": _yes("torchao int8_mm.py", "multiplies by torch._int_mm"),
    "other": _OTHER,
}
_GROUPED: Final = "pytorch GroupedBlas.cpp _scaled_grouped_mm_cuda"
_EXPERTS: Final[Row] = {
    **_FP8,
    **_cells(_yes(_GROUPED), "sm_90", "sm_100"),
    **_cells(_no("has no FP8 kernel for grouped products", _GROUPED), "sm_89", "sm_110", "sm_120", "gfx1200"),
    **_cells(_no("has FP8 kernels for grouped products of float8_e4m3fnuz alone", _GROUPED), "gfx942", "gfx950"),
    "xpu": _no("has no FP8 kernel for grouped products", "torch-xpu-ops#2325"),
}

TABLE: Final[Mapping[RecipeKey, Row]] = {
    "half-auto": _FLOAT16,
    "bf16": _BFLOAT16,
    "fp16": _FLOAT16,
    "tensorwise": _OWN_CODES,
    "tensorwise-per-gemm": _PER_GEMM,
    "rowwise": _ROWWISE,
    "rowwise-gw-hp": _ROWWISE,
    "msamp": _OWN_CODES,
    "fp8-head": _OWN_CODES,
    "te-delayed": _TE_FP8,
    "te-current": _TE_FP8,
    "te-block": _TE_BLOCK,
    "te-mxfp8": _TE_MXFP8,
    "te-nvfp4": _NVFP4,
    "te-nvfp4-plain": _NVFP4_PLAIN,
    "torchao-block": _TORCHAO_BLOCK,
    "torchao-mxfp8": _TORCHAO_MXFP8,
    "int8": _INT8,
    "experts": _EXPERTS,
}
"""Every cell, by recipe and by the key of the architecture."""
_NAMES: Final[Mapping[RecipeKey, str]] = {
    "te-current": "'fp8-current-te'",
    "te-delayed": "'fp8-hybrid-te'",
    "tensorwise": "'fp8-hybrid'",
    "rowwise": "'fp8-rowwise'",
    "tensorwise-per-gemm": "`plugins=FP8TorchAO(weight_codes='per_gemm')`",
}
"""What to write instead, the best first."""


def cell(recipe: RecipeKey, architecture: Architecture) -> Cell:
    """Return the answer of the table."""
    return TABLE[recipe][architecture.key]


def instead(recipe: RecipeKey, architecture: Architecture) -> str:
    """Return what to use in place of a recipe that does not run: names that run there, such as ``"'fp8-hybrid'"``.

    A name whose kernels run there comes first; else half precision, and the name that is emulated there.
    """
    if recipe == "te-nvfp4" and cell("te-nvfp4-plain", architecture).runs:
        options = "{'recipe': 'nvfp4', 'disable_rht': True, 'disable_stochastic_rounding': True}"
        return f"`plugins=FP8TE({options})`, or 'fp8-current-te'"
    of_te = recipe.startswith("te-")
    candidates = [key for key in _NAMES if key != recipe and (of_te or not key.startswith("te-"))]
    runs = [key for key in candidates if cell(key, architecture).runs]
    kernels = [key for key in runs if not cell(key, architecture).emulated]
    if kernels:
        return _NAMES[kernels[0]]
    half = "'16-mixed'" if cell("bf16", architecture).emulated else "'bf16-mixed'"
    return f"{half}; 'fp8-hybrid' emulates FP8 on {architecture.title}" if runs else half
