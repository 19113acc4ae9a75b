"""The options of sharding are shown by `inspect`, `help()` and jsonargparse: in both strategies."""

import inspect
from dataclasses import fields

import pytest

from lightning_lowprec import FabricFSDP2Strategy, FSDP2Strategy
from lightning_lowprec.fsdp2.options import ShardOptions

OPTIONS = {field.name: field.default for field in fields(ShardOptions)}


@pytest.mark.parametrize("shown", [FSDP2Strategy, FabricFSDP2Strategy])
def test_signatures_and_docstrings_have_every_option(shown):
    parameters = inspect.signature(shown).parameters
    assert {name: parameters[name].default for name in OPTIONS} == OPTIONS
    assert not [p for p in parameters.values() if p.kind is p.VAR_KEYWORD]
    text = " ".join(inspect.getdoc(shown).split())
    for name in OPTIONS:
        assert f"{name}: " in text
    assert "cpu_offload: keep shards, gradients and optimizer state in CPU memory." in text


def test_the_two_strategies_agree():
    assert inspect.signature(FSDP2Strategy) == inspect.signature(FabricFSDP2Strategy)
