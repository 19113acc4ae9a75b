"""The options of sharding are shown by `inspect`, `help()` and jsonargparse: in both strategies."""

import inspect
from dataclasses import fields

import pytest
from jsonargparse import ArgumentParser

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


@pytest.mark.parametrize("strategy", [FSDP2Strategy, FabricFSDP2Strategy])
def test_the_help_of_a_command_line_has_every_option_with_its_docs(strategy):
    parser = ArgumentParser()
    parser.add_class_arguments(strategy, "strategy")
    text = " ".join(parser.format_help().split())
    for name in ("state_dict_type", *OPTIONS):
        assert f"--strategy.{name}" in text
    assert "keep shards, gradients and optimizer state in CPU memory." in text
    assert "the modules that are gathered and freed as one" in text
    parsed = parser.parse_args(["--strategy.cpu_offload=true", "--strategy.replicate=nodes"])
    assert (parsed.strategy.cpu_offload, parsed.strategy.replicate) == (True, "nodes")


@pytest.mark.parametrize("strategy", [FSDP2Strategy, FabricFSDP2Strategy])
def test_a_kind_of_checkpoint_that_does_not_exist_is_refused(strategy):
    with pytest.raises(ValueError, match=r"`state_dict_type='Full'` is not valid; expected one of: sharded, full\."):
        strategy(state_dict_type="Full")
