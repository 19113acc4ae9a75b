"""The text of a plan, as a notebook shows it: one line per kind of block."""

import torch
from torch import nn

from lightning_lowprec import plan


def test_a_thousand_layers_are_three_rows():
    with torch.device("meta"):
        layers = [nn.ModuleDict({"up": nn.Linear(64, 128), "down": nn.Linear(128, 64)}) for _ in range(500)]
        planned = plan(nn.ModuleDict({"blocks": nn.ModuleList(layers), "lm_head": nn.Linear(64, 256)}))
    assert len(planned.rows) == 1001
    summary, *lines = repr(planned).splitlines()
    assert summary == planned.summary()
    assert [line.split("  ")[0] for line in lines] == ["500 x blocks.*.up", "500 x blocks.*.down", "lm_head"]
    assert ["64 -> 128" in lines[0], "128 -> 64" in lines[1], "64 -> 256" in lines[2]] == [True] * 3
    assert [line.split("  ")[-1] for line in lines] == ["FP8", "FP8", "kept: output head (by name), bf16"]
