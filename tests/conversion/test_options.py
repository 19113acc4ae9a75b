"""Options that plugins share: one definition, shown in every constructor, its docstring, `--help` and type checkers."""

import inspect
from typing import get_type_hints

import jsonargparse
import pytest

from lightning_lowprec import FP8TE, MSAMP, FP8TorchAO, HalfMixed
from lightning_lowprec.conversion.options import LayerOptions
from lightning_lowprec.fsdp2.options import ShardOptions
from lightning_lowprec.precision.fp8 import BlockOptions
from lightning_lowprec.precision.options import (
    EmulationOptions,
    FP8Options,
    MasterOptions,
    RunOptions,
    TrainingOptions,
)

EVERYWHERE = (LayerOptions, FP8Options, RunOptions)
GROUPS = (*EVERYWHERE, TrainingOptions, MasterOptions, EmulationOptions, BlockOptions)
PLUGINS = {
    FP8TorchAO: GROUPS,
    FP8TE: (*EVERYWHERE, TrainingOptions, MasterOptions),
    MSAMP: (*EVERYWHERE, EmulationOptions, BlockOptions),
    HalfMixed: (RunOptions, TrainingOptions, MasterOptions),
}
every_plugin = pytest.mark.parametrize("plugin", PLUGINS)


def described(cls):
    """The text of every entry under `Args:` of a class, by name, in one line each."""
    entries, name = {}, None
    for line in inspect.getdoc(cls).partition("Args:\n")[2].partition("\n\nRaises:")[0].splitlines():
        if line[:4] == "    " and line[4:5] not in (" ", ""):
            name, _, text = line.strip().partition(": ")
            entries[name] = text
        else:
            entries[name] += " " + line.strip()
    return {name: text.strip() for name, text in entries.items()}


@pytest.mark.parametrize("group", [*GROUPS, ShardOptions])
def test_every_field_is_described(group):
    assert list(described(group)) == list(inspect.get_annotations(group))


@every_plugin
def test_the_plugins_agree_on_name_type_default_and_words(plugin):
    parameters, words = inspect.signature(plugin).parameters, described(plugin)
    for group in GROUPS:
        own = inspect.get_annotations(group)
        if group not in PLUGINS[plugin]:
            others = parameters.keys() - {"grad_accumulation_dtype"}  # MSAMP has an option of this name too
            assert not own.keys() & others
            continue
        for name in own:
            assert parameters[name].kind is inspect.Parameter.KEYWORD_ONLY
            assert parameters[name].default == getattr(group, name)
            assert parameters[name].annotation == get_type_hints(group)[name]
            assert words[name] == described(group)[name]
    assert described(plugin).keys() == parameters.keys()


@every_plugin
def test_the_command_line_shows_every_option_with_its_words(plugin):
    parser = jsonargparse.ArgumentParser()
    parser.add_class_arguments(plugin, "plugin")
    words = " ".join(parser.format_help().split())
    for name, text in described(plugin).items():
        assert f"--plugin.{name}" in words, name
        first_words = " ".join(text.replace("``", "").split()[:4])
        assert first_words in words.replace("``", ""), name


def test_a_wrong_option_is_answered_with_the_right_one():
    with pytest.raises(
        TypeError, match=r"keyword argument 'opt_level'\. Write `level=` of `MSAMP`, e\.g\. `MSAMP\('O2'\)`"
    ):
        MSAMP(opt_level="O2")
    with pytest.raises(
        ValueError, match=r"`level='o2'` is not valid; expected one of: O1, O2, O3\. Did you mean 'O2'\?"
    ):
        MSAMP("o2")
    with pytest.raises(TypeError, match=r"keyword argument 'kep'\. Did you mean 'keep'\?"):
        FP8TorchAO(kep=["lm_head"])


def test_an_option_that_a_plugin_does_not_take_raises():
    with pytest.raises(TypeError, match="unexpected keyword argument 'emulate'"):
        FP8TE(emulate=True)
