"""Codes with a scale per tile, and codes of experts, under FSDP2: two ranks compute the bits of one; what they send."""

import itertools

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_lowprec import FabricFSDP2Strategy
from tests.fsdp2.gathers import count_gathers
from tests.fsdp2.ranks import run
from tests.representatives import names_on_cpu

pytestmark = [pytest.mark.slow, pytest.mark.distributed]
STEPS = 3
SIZES = (96, 320, 160, 64)
"""Of the layers: two ranks have 160, 80 and 32 rows, which cut tiles of 128 x 128, and some of 32 x 32."""
EQUAL = (160, 160, 160)
"""Of layers that are compiled once for all; a rank has 80 rows, which cut both tiles too."""
TILES = {"fp8-block": 128, **({"mxfp8": 32} if "mxfp8" in names_on_cpu() else {})}
"""Rows and columns of a tile."""


class Block(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.linear = nn.Linear(inputs, outputs, bias=False)

    def forward(self, x):
        return F.gelu(self.linear(x))


def layers(*sizes):
    return nn.Sequential(*[Block(*pair) for pair in itertools.pairwise(sizes)])


def mixture(width):
    """The experts of a Mixtral, each 2 x ``width`` wide."""
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    class Experts(MixtralSparseMoeBlock):
        def forward(self, x):
            out = super().forward(x[None])
            return out[0] if isinstance(out, tuple) else out

    config = MixtralConfig(hidden_size=width, intermediate_size=2 * width, num_local_experts=4, num_experts_per_tok=2)
    config._experts_implementation = "grouped_mm"
    made = Experts(config)
    for p in made.parameters():
        nn.init.normal_(p, std=0.1)
    return nn.Sequential(nn.Linear(96, width), made)


CASES = {
    **{name: (name, {}, lambda: layers(*SIZES)) for name in TILES},
    "copies": ("fp8-block", {"replicate": 2}, lambda: layers(*SIZES)),
    "compiled": ("fp8-block", {"compile": {"backend": "aot_eager"}}, lambda: layers(*EQUAL)),
    **{
        name: (precision, {"param_dtype": torch.float32}, lambda width=width: mixture(width))
        for name, precision, width in (
            ("experts", "fp8-hybrid", 32),
            ("experts, rowwise", "fp8-rowwise", 32),
            ("experts, block", "fp8-block", 128),
            ("experts, sides that 128 does not divide", "fp8-block", 32),
        )
    },
}


def train(fabric, make):
    """The same batch on every rank, whose average of gradients is exact."""
    fabric.launch()
    torch.manual_seed(0)
    net = make()
    width = next(module.in_features for module in net.modules() if isinstance(module, nn.Linear))
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
    gathers = count_gathers(net).values()
    made, losses = torch.Generator().manual_seed(1), []
    for _ in range(STEPS):
        for _ in range(2):
            x = torch.randn(24, width, generator=made)
            loss = model(x).float().square().mean()
            fabric.backward(loss)
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        losses.append(model(x).float().square().mean().item())
    return net, losses, gathers


def sharded(rank):
    reduced, all_reduce = [], torch.distributed.all_reduce
    torch.distributed.all_reduce = lambda t, *a, **k: (reduced.append(t.numel() * 4), all_reduce(t, *a, **k))[1]
    found = {}
    for case, (precision, options, make) in CASES.items():
        strategy = FabricFSDP2Strategy(wrap=[Block] if "experts" not in case else "auto", **options)
        fabric = L.Fabric(accelerator="cpu", devices=2, precision=precision, strategy=strategy)
        net, losses, gathers = train(fabric, make)
        found[case] = {
            "losses": losses,
            "weights": {name: p.full_tensor() for name, p in net.named_parameters()},
            "sent": sum(gather.sent.total() for gather in gathers),
            "calls": [gather.calls.total() for gather in gathers if gather.calls],
            "reduced": reduced.copy(),
        }
        reduced.clear()
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run(sharded, 2, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_compute_the_bits_of_one(ranks, case):
    precision, _, make = CASES[case]
    net, losses, _ = train(L.Fabric(accelerator="cpu", devices=1, precision=precision), make)
    assert len(set(losses)) == STEPS + 1
    for found in ranks:
        assert found[case]["losses"] == losses
        for name, weight in net.named_parameters():
            assert torch.equal(found[case]["weights"][name], weight), name


@pytest.mark.parametrize("precision", TILES)
def test_a_gather_sends_the_codes_and_a_step_reduces_the_tiles(ranks, precision):
    """A byte per parameter; of two ranks each has half of the parameters."""
    tile = TILES[precision]
    shapes = [(rows, columns) for columns, rows in itertools.pairwise(SIZES)]
    elements = [rows * columns for rows, columns in shapes]
    tiles = sum(-(-rows // tile) * -(-columns // tile) for rows, columns in shapes)
    for found in (by_rank[precision] for by_rank in ranks):
        assert min(found["calls"]) >= 2 * 2 * STEPS, "forward and backward of each micro-batch"
        gathered = sum(n * count for n, count in zip(elements, found["calls"], strict=True))
        assert found["sent"] == gathered / 2
        assert found["reduced"] == (STEPS + 1) * [4 * tiles], "once per write to the weights"


@pytest.mark.parametrize(
    ("case", "bytes_of_experts", "bytes_of_linear"),
    [("experts", 1, 1), ("experts, rowwise", 4, 4), ("experts, sides that 128 does not divide", 4, 1)],
)
def test_the_weights_of_experts_are_gathered_as_codes_where_the_recipe_allows_it(
    ranks, case, bytes_of_experts, bytes_of_linear
):
    experts, linear, float32 = 4 * 3 * 32 * 64, 96 * 32, 32 + 4 * 32  # and a bias and the router
    for found in ranks:
        (calls,) = found[case]["calls"]
        sent = bytes_of_experts * experts + bytes_of_linear * linear + 4 * float32
        assert found[case]["sent"] == calls * sent / 2
