"""`python -m benchmarks.accumulation`: what a layer loses to the sums of Hopper, and the table of the docs."""

import math

import pytest
import torch

from benchmarks import accumulation
from tests.site.pages import DOCS


def test_a_sum_of_ones_ends_behind_2_to_the_14():
    """13 places below 2 ** 14 end at 2: all later products of 1 are cut to 0. Promoted sums are exact."""
    x, weight = torch.ones(16, 1 << 15), torch.ones(16, 1 << 15)
    x[:, 0], x[:, 1] = 448, 0  # so both scales are 1, and both of these products 0
    weight[:, 0], weight[:, 1] = 0, 448
    found = accumulation.lost(x, weight)
    last = 30 + 512 * 32  # the first block has 30 ones, and the sum before the last one is below 2 ** 14
    assert found["fast"] == pytest.approx(-20 * math.log10(1 - last / (2**15 - 2)), abs=0.01)
    assert found["rounding"] == found["promoted"] == math.inf


@pytest.mark.parametrize("kind", ["persimmon", "t5", "gpt2"])
def test_every_layer_of_a_block_is_measured(kind):
    sizes = {
        "persimmon": {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4},
        "t5": {"d_model": 64, "d_ff": 128, "num_heads": 4, "d_kv": 16},
        "gpt2": {"n_embd": 64, "n_head": 4},
    }[kind]
    torch.manual_seed(0)
    model = accumulation.block_of(kind, sizes)
    rows = list(accumulation.losses(model))
    assert len(rows) == {"persimmon": 4, "t5": 6, "gpt2": 4}[kind]
    assert all(27 < row["rounding"] < 35 and row["fast"] > 60 for row in rows)
    accumulation.make_uneven(model)
    weights = [rows for module in model.modules() if (rows := accumulation._rows(module)) is not None]
    means = [float((weight.mean(1) / weight.std(1)).abs().mean()) for weight in weights]
    assert all(mean == pytest.approx(accumulation.MEAN, abs=0.1) for mean in means)


def test_the_page_shows_the_committed_layers():
    (folder,) = accumulation.RESULTS.glob(f"*/sums/{accumulation.FILE}")
    assert accumulation.table(folder.parent) in (DOCS / "how-it-works.md").read_text()
