"""Codes with a scale per tile under FSDP2: two ranks compute the bits of one, and send a byte per parameter."""

import itertools

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_lowprec import FabricFSDP2Strategy
from lightning_lowprec.fsdp2 import fp8_gather
from lightning_lowprec.fsdp2.strategy import gathered_line
from lightning_lowprec.numerics.tiles import largest, largest_of_rows, spread
from lightning_lowprec.private.torchao import prototype_refusal
from tests.fsdp2.gathers import count_gathers
from tests.fsdp2.ranks import run

STEPS = 3
SIZES = (96, 320, 160, 64)
"""Of the layers: two ranks have 160, 80 and 32 rows, which cut tiles of 128 x 128, and some of 32 x 32."""
EQUAL = (160, 160, 160)
"""Of layers that are compiled once for all; a rank has 80 rows, which cut both tiles too."""
TILES = {
    "fp8-block": 128,
    **({} if prototype_refusal("mxfp8") else {"mxfp8": 32}),
}
"""Rows and columns of a tile."""


class Block(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.linear = nn.Linear(inputs, outputs, bias=False)

    def forward(self, x):
        return F.gelu(self.linear(x))


class Net(nn.Module):
    def __init__(self, sizes):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Block(*pair) for pair in itertools.pairwise(sizes)])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def train(fabric, sizes):
    """The same batch on every rank, whose average of gradients is exact."""
    fabric.launch()
    net = Net(sizes)
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
    gathers = count_gathers(net).values()
    made, losses = torch.Generator().manual_seed(1), []
    for _ in range(STEPS):
        for _ in range(2):
            x = torch.randn(24, sizes[0], generator=made)
            loss = model(x).float().square().mean()
            fabric.backward(loss)
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        losses.append(model(x).float().square().mean().item())
    return net, losses, gathers


CASES = {
    **{name: (name, {}) for name in TILES},
    "copies": ("fp8-block", {"replicate": 2}),
    "compiled": ("fp8-block", {"compile": {"backend": "aot_eager"}}),
}


def sizes_of(case):
    return EQUAL if "compile" in CASES[case][1] else SIZES


def sharded(rank):
    reduced, all_reduce = [], fp8_gather.dist.all_reduce
    fp8_gather.dist.all_reduce = lambda t, *a, **k: (reduced.append(t.numel() * 4), all_reduce(t, *a, **k))[1]
    found = {}
    for case, (precision, options) in CASES.items():
        strategy = FabricFSDP2Strategy(wrap=[Block], **options)
        fabric = L.Fabric(accelerator="cpu", devices=2, precision=precision, strategy=strategy)
        net, losses, gathers = train(fabric, sizes_of(case))
        found[case] = {
            "losses": losses,
            "weights": {name: p.full_tensor() for name, p in net.named_parameters()},
            "sent": sum(gather.sent.total() for gather in gathers),
            "calls": [gather.calls.total() for gather in gathers if gather.calls],
            "reduced": reduced.copy(),
            "said": gathered_line(net, 2),
        }
        reduced.clear()
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run(sharded, 2, tmp_path_factory.mktemp("ranks"))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_two_ranks_compute_the_bits_of_one(ranks, case):
    net, losses, _ = train(L.Fabric(accelerator="cpu", devices=1, precision=CASES[case][0]), sizes_of(case))
    assert len(set(losses)) == STEPS + 1
    for found in ranks:
        assert found[case]["losses"] == losses
        for name, weight in net.named_parameters():
            assert torch.equal(found[case]["weights"][name], weight), name


@pytest.mark.slow
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
        assert found["said"].startswith("all-gather: float8, ")
        assert found["said"].endswith("0.50x of bf16")
        assert found["reduced"] == (STEPS + 1) * [4 * tiles], "once per write to the weights"


@pytest.mark.parametrize("tile", [(128, 128), (32, 32), (1, 32), (16, 16)])
@pytest.mark.parametrize("cut", [0, 1, 16, 130, 255, 300])
def test_parts_of_rows_have_the_largest_values_and_the_scales_of_the_whole(tile, cut):
    whole = torch.randn(300, 200, generator=torch.Generator().manual_seed(0))
    tops, lefts = range(0, 300, tile[0]), range(0, 200, tile[1])
    grid = torch.tensor(
        [[whole[top : top + tile[0], left : left + tile[1]].abs().max() for left in lefts] for top in tops]
    )
    assert torch.equal(largest(whole, tile), grid)
    parts = [part for part in ((whole[:cut], 0), (whole[cut:], cut)) if len(part[0])]
    grids = [largest_of_rows(values, tile, 300, first) for values, first in parts]
    assert torch.equal(torch.stack(grids).amax(0), grid)
    every = spread(grid, tile, whole.shape)
    assert torch.equal(torch.cat([spread(grid, tile, values.shape, first) for values, first in parts]), every)
    assert every[299, 199] == grid[-1, -1]
    assert every[tile[0], tile[1]] == grid[1, 1]
