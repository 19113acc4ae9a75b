"""Options of plugins, strategies and configs: checked when they are made, and described alike everywhere."""

import math
import re
from inspect import Parameter, getdoc, signature
from itertools import combinations

import jsonargparse
import pytest
import torch

from lightning_lowprec import (
    FP8TE,
    MSAMP,
    FabricFSDP2Strategy,
    FP8TorchAO,
    FSDP2Strategy,
    HalfMixed,
    Int8TorchAO,
    LossScale,
    MasterConfig,
)

TRUE_OR_FALSE = "True or False"
LAYERS = [
    ("first_last_layers_bf16", "False", TRUE_OR_FALSE),
    ("num_layers_at_start_in_bf16", True, "a number of layers, 0 or more"),
    ("num_layers_at_end_in_bf16", 1.0, "a number of layers, 0 or more"),
    ("keep", [1], "a list of fqns"),
    ("only", 0, "None or a list of fqns"),
    ("frozen", True, "one of: convert, keep"),
]
HEAD = [("head", "fp4", "one of: bf16, chunked, fp8, fp32")]
RUNNING = [("fp8_eval", 0, TRUE_OR_FALSE), ("base", None, "one of: bf16, fp16")]
GPUS = "None, True, False, 'hopper', 'ada', 'blackwell' or 'mi300'"
EMULATION = [("emulate", "no", GPUS), ("emulate", 1, GPUS)]
SCALE = [
    ("loss_scale", math.nan, "None, 'auto', 'dynamic', a number above 0"),
    ("skip_nonfinite", "False", TRUE_OR_FALSE),
]
MASTERS = [
    ("master_weights", "True", "True, False, 'remainder', '8bit', 'stochastic' or a MasterConfig"),
    ("buffer_dtype", torch.int8, "None or a floating-point torch.dtype"),
    ("grad_accumulation_dtype", "fp32", "one of: None, torch.float32"),
    ("cast_inputs", "yes", TRUE_OR_FALSE),
]
WEIGHTS = [("weights", "bf16", "one of: float32, keep"), ("plain_after_fit", 1, TRUE_OR_FALSE)]
KEPT = [("keep_fp32", "lm_head", "a list of fqns")]
SHARDS = [
    ("wrap", torch.nn.Linear, "'auto', a collection of nn.Module classes or a function"),
    ("replicate", True, "an integer of at least 1 or 'nodes'"),
    ("shards", 2.0, "None or an integer of at least 1"),
    ("tensor_parallel", 3, "None, a function or a mapping"),
    ("tensor_parallel_size", "2", "an integer of at least 1"),
    ("activation_checkpointing", 1, "True, False, a collection"),
    ("compile", "yes", "True, False or a mapping of torch.compile options"),
    ("cpu_offload", "False", TRUE_OR_FALSE),
    ("reshard_after_forward", "abc", "None, True, False or an integer of at least 1"),
    ("fp8_all_gather", 1, "'auto', True or False"),
    ("param_dtype", "bf16", "None or a floating-point torch.dtype"),
    ("reduce_dtype", torch.int8, "None or a floating-point torch.dtype"),
    ("sync_module_states", "no", TRUE_OR_FALSE),
    ("buffer_dtype", 16, "None or a floating-point torch.dtype"),
    ("output_dtype", torch.int32, "None or a floating-point torch.dtype"),
]
STRATEGY = [
    *SHARDS,
    ("state_dict_type", None, "one of: sharded, full"),
    ("process_group_backend", 3, "None or a string"),
    ("timeout", 5, "None or a timedelta"),
    ("cluster_environment", "slurm", "None or a ClusterEnvironment"),
    ("checkpoint_io", "x", "None or a CheckpointIO"),
    ("verify_checkpoints", 1, TRUE_OR_FALSE),
]
SCALING = [
    ("initial", "65536", "finite and above 0"),
    ("growth_factor", math.nan, "finite and at least 1.0"),
    ("backoff_factor", True, "in (0, 1]"),
    ("growth_interval", True, "an integer of at least 1"),
    ("hysteresis", 0.5, "an integer of at least 1"),
    ("floor", math.nan, "finite and above 0"),
    ("patience_at_floor", "50", "an integer of at least 1"),
]
TORCHAO = [
    ("recipe", "tensorwize", "'tensorwise', 'rowwise', 'rowwise_with_gw_hp', 'block', 'mxfp8' or a mapping"),
    ("fp8_format", "e5m2", "one of: None, hybrid, e4m3"),
    ("compile", 1, "'auto', True, False or a mapping"),
    ("round_scales_to_power_of_2", "abc", "None, True or False"),
    ("fast_accum", "backward", "one of: forward, all, none"),
    ("weight_codes", "per_epoch", "one of: auto, per_forward, per_gemm"),
    ("experts", "on", "one of: auto, fp8, bf16"),
    ("pad_inner_dim", "yes", TRUE_OR_FALSE),
]
TE = [
    ("fp8_format", "e5m2", "one of: None, hybrid, e4m3"),
    ("margin", True, "None or an integer"),
    ("amax_history_len", 0, "None or an integer of at least 1"),
    ("amax_history_len", 16.0, "None or an integer of at least 1"),
    ("amax_compute_algo", "mean", "one of: None, max, most_recent"),
    ("reduce_amax", "False", "None, True or False"),
    *((name, "False", TRUE_OR_FALSE) for name in ("fp8_params", "fp8_dpa", "fp8_mha", "norms")),
]
MSAMP_LEVEL = [
    ("level", "O4", "one of: O1, O2, O3"),
    ("stochastic_rounding", "False", TRUE_OR_FALSE),
    ("seed", "abc", "an integer"),
    ("grad_accumulation_dtype", "fp32", "None or a dtype"),
    ("compile", 1, "'auto', True, False or a mapping"),
]
CONFIG = [
    ("form", "fp23", "one of: fp32, remainder, stochastic"),
    ("moments", None, "one of: fp32, 8bit"),
    ("seed", True, "an integer"),
]
CASES = {
    FP8TorchAO: [*LAYERS, *RUNNING, *EMULATION, *SCALE, *MASTERS, *WEIGHTS, *KEPT, *HEAD, *TORCHAO],
    FP8TE: [*LAYERS, *RUNNING, *SCALE, *MASTERS, *WEIGHTS, *KEPT, *HEAD, *TE],
    MSAMP: [*LAYERS, *RUNNING, *EMULATION, *SCALE, *WEIGHTS, *HEAD, *MSAMP_LEVEL],
    HalfMixed: [*SCALE, *MASTERS, *WEIGHTS, *KEPT, *HEAD, ("dtype", "bf16-mixed", "one of: bf16, fp16, auto")],
    FSDP2Strategy: STRATEGY,
    FabricFSDP2Strategy: STRATEGY,
    LossScale: SCALING,
    MasterConfig: CONFIG,
}


@pytest.mark.parametrize(
    ("make", "field", "value", "allowed"),
    [(make, *case) for make, cases in CASES.items() for case in cases],
    ids=lambda value: getattr(value, "__name__", repr(value)),
)
def test_a_wrong_value_raises_and_is_named(make, field, value, allowed):
    with pytest.raises(
        ValueError, match=rf"^`{field}={re.escape(repr(value))}` is not valid; expected {re.escape(allowed)}"
    ):
        make(**{field: value})


@pytest.mark.parametrize("make", CASES)
def test_every_option_has_a_case(make):
    """An option that is added later is in the table above too."""
    without_hint = {"recipe"} if make is FP8TE else set()  # FP8TE takes any recipe object there
    assert {field for field, *_ in CASES[make]} == set(signature(make).parameters) - without_hint


@pytest.mark.parametrize("name", ["num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"])
def test_a_number_of_blocks_without_the_option_that_reads_it_raises(name):
    with pytest.raises(ValueError, match=f"`{name}=2` keeps no block without `first_last_layers_bf16=True`"):
        FP8TorchAO(**{name: 2})
    FP8TorchAO(**{name: 0})
    FP8TorchAO(first_last_layers_bf16=True, **{name: 2})


# ---- the words of an option

PLUGINS = (FP8TorchAO, FP8TE, Int8TorchAO, MSAMP, HalfMixed)
every_plugin = pytest.mark.parametrize("plugin", PLUGINS)
OF_EACH = {"recipe", "fp8_format", "grad_accumulation_dtype", "stochastic_rounding"}
"""Options that mean something else in each plugin."""


def described(cls):
    """The text of every entry under `Args:` of a class, by name, in one line each."""
    entries, name = {}, None
    for line in getdoc(cls).partition("Args:\n")[2].partition("\n\nRaises:")[0].splitlines():
        if line[:4] == "    " and line[4:5] not in (" ", ""):
            name, _, text = line.strip().partition(": ")
            entries[name] = text
        else:
            entries[name] += " " + line.strip()
    return {name: text.strip() for name, text in entries.items()}


@pytest.mark.parametrize(("one", "other"), [*combinations(PLUGINS, 2)])
def test_the_plugins_agree_on_name_type_default_and_words(one, other):
    ours, theirs = signature(one).parameters, signature(other).parameters
    words, same = described(one), described(other)
    shared = (ours.keys() & theirs.keys()) - OF_EACH
    assert shared
    for name in shared:
        assert ours[name].kind is Parameter.KEYWORD_ONLY
        assert ours[name] == theirs[name]
        assert words[name] == same[name]


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
