"""Two ranks under FSDP2 compute the bits of one process, and send what the recipe says."""

import itertools
import operator
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
from transformers.pytorch_utils import Conv1D

from lightning_lowprec import MSAMP, FabricFSDP2Strategy, FP8TorchAO, HalfMixed
from tests.fsdp2 import toy
from tests.fsdp2.gathers import count_gathers
from tests.fsdp2.ranks import launch
from tests.representatives import names_on_cpu

pytestmark = [pytest.mark.slow, pytest.mark.distributed]
STEPS = 3
SIZES = (96, 320, 160, 64)
"""Of the layers: two ranks have 160, 80 and 32 rows, which cut tiles of 128 x 128, and some of 32 x 32."""
EQUAL = (160, 160, 160)
"""Of layers that are compiled once for all; a rank has 80 rows, which cut both tiles too."""
TILES = {"fp8-block": 128, **({"mxfp8": 32} if "mxfp8" in names_on_cpu() else {})}


class Block(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.linear = nn.Linear(inputs, outputs, bias=False)

    def forward(self, x):
        return F.gelu(self.linear(x))


def layers(*sizes):
    return nn.Sequential(*[Block(*pair) for pair in itertools.pairwise(sizes)])


def conv1ds():
    return nn.Sequential(*[Conv1D(outputs, inputs) for inputs, outputs in itertools.pairwise(SIZES)])


class Mixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)
        self.A_log = nn.Parameter(torch.linspace(0.1, 2.0, 64))
        self.dt_bias = nn.Parameter(torch.linspace(-1.0, 1.0, 64))

    def forward(self, x):
        seen.append((self.A_log.dtype, self.dt_bias.dtype, self.up.weight.dtype))
        h = self.up(self.norm(x))
        h = h * torch.exp(-torch.exp(self.A_log.float()) * torch.sigmoid(h + self.dt_bias)).to(h.dtype)
        return x + self.down(h)


seen: list = []


class Mixers(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Mixer() for _ in range(2)])
        self.final = nn.LayerNorm(32)
        self.head = nn.Linear(32, 16)
        self.scale = nn.Parameter(torch.full((16,), 1.001))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(self.final(x)) * self.scale


FLOAT32_KEPT = {
    **{name: name for name in ("bf16-master", "bf16-remainder", "bf16-sr", "bf16-8bit", "fp8-hybrid-remainder")},
    "named": lambda: HalfMixed("bf16", master_weights="remainder", keep_fp32=["final", "scale", "*.norm"]),
}


def mixture():
    class Experts(MixtralSparseMoeBlock):
        def forward(self, x):
            out = super().forward(x[None])
            return out[0] if isinstance(out, tuple) else out

    config = MixtralConfig(hidden_size=32, intermediate_size=64, num_local_experts=4, num_experts_per_tok=2)
    config._experts_implementation = "grouped_mm"
    made = Experts(config)
    for p in made.parameters():
        nn.init.normal_(p, std=0.1)
    return nn.Sequential(nn.Linear(96, 32), made)


EQUAL_LAYERS = partial(layers, *EQUAL)
O3 = partial(MSAMP, "O3", grad_accumulation_dtype=torch.float32)
GRAPHS, RECOMPUTED = {"backend": "aot_eager"}, {"activation_checkpointing": [Block]}
CASES = {
    **{name: (name, {}, lambda: layers(*SIZES)) for name in TILES},
    "one scale": ("fp8-hybrid", {}, lambda: layers(*SIZES)),
    "copies": ("fp8-block", {"replicate": 2}, lambda: layers(*SIZES)),
    "compiled": ("fp8-block", {"compile": GRAPHS, **RECOMPUTED}, EQUAL_LAYERS),
    "compiled by the plugin": (
        partial(FP8TorchAO, compile=GRAPHS),
        {"activation_checkpointing": [Block]},
        EQUAL_LAYERS,
    ),
    **{
        name: (precision, {"param_dtype": torch.float32}, mixture)
        for name, precision in (
            ("experts", "fp8-hybrid"),
            ("experts, rowwise", "fp8-rowwise"),
            ("experts, rowwise beside block", partial(FP8TorchAO, {"*.experts.*": "rowwise", "*": "block"})),
        )
    },
    "conv1d": ("fp8-hybrid", {}, conv1ds),
    **{
        f"msamp{kind}": (partial(O3, **options), {"param_dtype": torch.float32}, make)
        for kind, options, make in (
            ("", {}, lambda: layers(*SIZES)),
            (" of conv1d", {}, conv1ds),
            (" compiled", {"compile": GRAPHS}, EQUAL_LAYERS),
        )
    },
    **{
        f"{gemm} in bf16{kind}": (lambda gemm=gemm: FP8TorchAO({"*": {gemm: "bf16"}}), {}, make)
        for gemm in ("forward", "grad_weight")
        for kind, make in (("", lambda: layers(*SIZES)), (" of conv1d", conv1ds))
    },
    **{
        f"float32 kept: {name}": (precision, {"fp8_all_gather": False, "wrap": "auto"}, Mixers)
        for name, precision in FLOAT32_KEPT.items()
        if torch.__version__ >= "2.12"  # torch 2.11 gathers all parameters of a module in one dtype
    },
}


def fabric_for(case, devices, **options):
    precision = CASES[case][0]
    return toy.fabric_for(precision if isinstance(precision, str) else precision(), devices, **options)


def train(fabric, case):
    """The same batch on every rank, whose average of gradients is exact."""
    torch.manual_seed(0)
    net = (make := CASES[case][2])()
    micro_batches = 1 if "bf16" in case or "kept" in case else 2  # one process sums gradients of bf16 products as bf16
    width = 32 if make is Mixers else 96 if make is not EQUAL_LAYERS else EQUAL[0]
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
    gathers = [] if make is Mixers else count_gathers(net).values()  # a module of theirs is gathered in two groups
    made, losses = torch.Generator().manual_seed(1), []
    for _ in range(STEPS):
        for _ in range(micro_batches):
            x = torch.randn(24, width, generator=made)
            loss = model(x).float().square().mean()
            fabric.backward(loss)
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        losses.append(model(x).float().square().mean().item())
    return net, losses, gathers


def compute_the_bits_of_one_and_send_what_the_recipe_says(rank, ranks, case):
    seen.clear()
    alone, expected, _ = train(fabric_for(case, 1), case)
    computed_in = set(seen)
    seen.clear()
    reduced, all_reduce = [], torch.distributed.all_reduce
    torch.distributed.all_reduce = lambda t, *a, **k: (reduced.append(t.numel() * 4), all_reduce(t, *a, **k))[1]
    wrap = "auto" if "experts" in case else [Conv1D] if "conv1d" in case else [Block]
    strategy = FabricFSDP2Strategy(**{"wrap": wrap, **CASES[case][1]})
    net, losses, gathers = train(fabric_for(case, 2, strategy=strategy), case)
    if "forward in bf16" not in case:  # FP8 of bf16 weights
        assert len(set(losses)) == STEPS + 1
        assert losses == expected
        kept = {(torch.float32, torch.float32, torch.bfloat16)} if "float32 kept" in case else set()
        assert computed_in == set(seen) == kept
        for (name, weight), shard in zip(alone.named_parameters(), net.parameters(), strict=True):
            assert torch.equal(shard.full_tensor().to(weight.dtype), weight), name  # shards may be masters
    calls = [gather.calls.total() for gather in gathers if gather.calls]
    if bytes_per_call := sent(case):
        assert sum(gather.sent.total() for gather in gathers) == sum(map(operator.mul, bytes_per_call, calls)) / 2
        assert len(calls) == len(bytes_per_call)
    if case in TILES:
        assert min(calls) >= 2 * 2 * STEPS, "forward and backward of each micro-batch"
        tiles = sum(-(-columns // TILES[case]) * -(-rows // TILES[case]) for columns, rows in itertools.pairwise(SIZES))
        assert reduced == (STEPS + 1) * [4 * tiles], "once per write to the weights"


def sent(case):
    """Bytes of each group; of two ranks each has half of it. A forward in bf16 reads a weight that came in bf16."""
    elements = [rows * columns for columns, rows in itertools.pairwise(SIZES)]
    if case in TILES:
        return elements
    if " in bf16" in case:
        size = 2 if case.startswith("forward") else 1
        biases = SIZES[1:] if "conv1d" in case else (0, 0, 0)
        return [size * n + 2 * bias for n, bias in zip(elements, biases, strict=True)]
    if case in BYTES_OF_EXPERTS:
        of_experts, of_linear = BYTES_OF_EXPERTS[case]
        return [of_experts * 4 * 3 * 32 * 64 + of_linear * 96 * 32 + 4 * (32 + 4 * 32)]  # and a bias and the router
    return None


BYTES_OF_EXPERTS = {"experts": (1, 1), "experts, rowwise": (4, 4), "experts, rowwise beside block": (4, 1)}
"""And of the Linear beside them, per number: as codes where the recipe allows it."""


@pytest.mark.parametrize("case", CASES)
def test_two_ranks(case, tmp_path):
    launch(compute_the_bits_of_one_and_send_what_the_recipe_says, 2, tmp_path, case)
