"""Options of plugins, strategies and configs are checked when they are made."""

import math
import re
from inspect import signature

import numpy as np
import pytest
import torch

from lightning_lowprec import (
    FP8TE,
    MSAMP,
    FabricFSDP2Strategy,
    FP8TorchAO,
    FSDP2Strategy,
    HalfEval,
    HalfMixed,
    Int8TorchAO,
    LossScale,
    MasterConfig,
    recipes,
)

PLUGINS = (FP8TorchAO, FP8TE, Int8TorchAO, MSAMP, HalfMixed, HalfEval)
CLASSES = (*PLUGINS, FSDP2Strategy, FabricFSDP2Strategy, LossScale, MasterConfig)
OPTIONS = [(make, name) for make in CLASSES for name in signature(make).parameters if (make, name) != (FP8TE, "recipe")]
"""All but the one that takes any recipe object."""


@pytest.mark.parametrize(("make", "field"), OPTIONS, ids=lambda value: getattr(value, "__name__", value))
def test_every_option_refuses_what_it_cannot_be(make, field):
    given = signature(make).bind_partial(**{field: object()})  # by position where the option may be
    with pytest.raises(ValueError, match=rf"^`{field}=<object object at \w+>` is not valid; expected ."):
        make(*given.args, **given.kwargs)


NEARLY = [
    (FP8TorchAO, "first_last_layers_bf16", "False", "True or False"),
    (FP8TorchAO, "num_layers_at_start_in_bf16", True, "a number of layers, 0 or more"),
    (FP8TorchAO, "num_layers_at_end_in_bf16", 1.0, "a number of layers, 0 or more"),
    (FP8TorchAO, "keep", ["lm_head", 1], "a list of fqns"),
    (FP8TorchAO, "keep_fp32", "lm_head", "a list of fqns"),
    (FP8TorchAO, "only", 0, "None or a list of fqns"),
    (FP8TorchAO, "frozen", True, "one of: convert, keep"),
    (FP8TorchAO, "emulate", 1, "None, True, False, 'hopper', 'ada' or 'blackwell'"),
    (FP8TorchAO, "loss_scale", math.nan, "None, 'auto', 'dynamic', a number above 0"),
    (FP8TorchAO, "master_weights", "True", "True, False, 'remainder', '8bit', 'stochastic' or a MasterConfig"),
    (FP8TorchAO, "buffer_dtype", torch.int8, "None or a floating-point torch.dtype"),
    (FP8TorchAO, "grad_accumulation_dtype", "fp32", "one of: None, torch.float32"),
    (FP8TorchAO, "recipe", "tensorwize", "'tensorwise', 'rowwise', 'rowwise_with_gw_hp', 'block', 'mxfp8'"),
    (FP8TorchAO, "compile", 1, "'auto', True, False or a mapping"),
    (FP8TorchAO, "round_scales_to_power_of_2", 1, "None, True or False"),
    (FP8TE, "margin", True, "None or an integer"),
    (FP8TE, "amax_compute_algo", "mean", "one of: None, max, most_recent"),
    *((FP8TE, "amax_history_len", length, "None or an integer of at least 1") for length in (0, 16.0)),
    (MSAMP, "grad_accumulation_dtype", torch.bfloat16, "one of: None, torch.float32"),
    (MasterConfig, "seed", True, "an integer"),
    *(
        (FSDP2Strategy, "wrap", w, "'auto', a collection of nn.Module classes or a fu")
        for w in (torch.nn.Linear, [torch.nn.Linear, int], [], ["Block"])
    ),
    (FSDP2Strategy, "replicate", True, "an integer of at least 1 or 'nodes'"),
    (FSDP2Strategy, "shards", 2.0, "None or an integer of at least 1"),
    (FSDP2Strategy, "tensor_parallel", 3, "None, a function or a mapping"),
    (FSDP2Strategy, "tensor_parallel_size", "2", "an integer of at least 1"),
    (FSDP2Strategy, "activation_checkpointing", 1, "True, False, a collection"),
    (FSDP2Strategy, "compile", "yes", "True, False or a mapping of torch.compile options"),
    (FSDP2Strategy, "reshard_after_forward", "abc", "None, True, False or an integer of at least 1"),
    (FSDP2Strategy, "fp8_all_gather", 1, "'auto', True or False"),
    (FSDP2Strategy, "timeout", 5, "None or a timedelta"),
    *((LossScale, "initial", value, "finite and above 0") for value in ("65536", math.inf)),
    (LossScale, "initial", 0.5, "at least floor=1.0"),
    (LossScale, "floor", 0.0, "finite and above 0"),
    *((LossScale, "growth_factor", factor, "finite and at least 1.0") for factor in (math.nan, 0.99)),
    *((LossScale, "backoff_factor", factor, "in (0, 1]") for factor in (True, 0.0, 1.01)),
    *((LossScale, "growth_interval", steps, "an integer of at least 1") for steps in (True, 0)),
    *((LossScale, name, n, "an integer of at least 1") for name, n in (("hysteresis", 0.5), ("patience_at_floor", 0))),
]
"""For each rule a value that nearly fits."""


@pytest.mark.parametrize(("make", "field", "value", "allowed"), NEARLY)
def test_a_wrong_value_raises_and_is_named(make, field, value, allowed):
    message = rf"^`{field}={re.escape(repr(value))}` is not valid; expected {re.escape(allowed)}"
    with pytest.raises(ValueError, match=message):
        make(**{field: value})


@pytest.mark.parametrize("name", ["num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"])
def test_a_number_of_blocks_without_the_option_that_reads_it_raises(name):
    with pytest.raises(ValueError, match=f"`{name}=2` keeps no block without `first_last_layers_bf16=True`"):
        FP8TorchAO(**{name: 2})
    FP8TorchAO(**{name: 0})
    FP8TorchAO(first_last_layers_bf16=True, **{name: np.int64(2)})


REFUSED = [
    (MSAMP, {"opt_level": "O2"}, r"'opt_level'\. Write `level=` of `MSAMP`, e\.g\. `MSAMP\('O2'\)`"),
    (MSAMP, {"level": "o2"}, r"`level='o2'` is not valid; expected one of: O1, O2, O3\. Did you mean 'O2'\?"),
    (FP8TorchAO, {"kep": ["lm_head"]}, r"keyword argument 'kep'\. Did you mean 'keep'\?"),
    *((plugin, {"emulate": "hopper"}, "keyword argument 'emulate'") for plugin in (FP8TE, HalfMixed, Int8TorchAO)),
    (FP8TorchAO, {"emulate": "hoper"}, r"`emulate='hoper'` is not valid; expected None, True, .* 'hopper'\?"),
    (FP8TorchAO, {"emulate": "mi300"}, r"'mi300' has left the package\. Write `FP8TorchAO\(emulate=True\)`"),
    (FP8TorchAO, {"cast_inputs": True}, "`cast_inputs=True` goes with `master_weights`"),
    (FP8TorchAO, {"recipe": "int8"}, "`recipe='int8'` is not valid; expected"),
    (Int8TorchAO, {"recipe": "mxfp8"}, "`recipe='mxfp8'` is not valid; expected"),
    (Int8TorchAO, {"recipe": {"*": "tensorwise"}}, "expected one of: 'int8', 'bf16', 'fp32', or a mapping"),
    (HalfEval, {"dtype": "bf16-true"}, "`dtype='bf16-true'` is not valid; expected one of: bf16, fp16"),
    (HalfMixed, {"dtype": "fp16", "master_weights": MasterConfig(form="remainder")}, "master_weights=Mast.* with fp16"),
    (HalfMixed, {"dtype": "bf16", "master_weights": True, "weights": "keep"}, "`weights='keep'` is not valid with `ma"),
    (HalfMixed, {"dtype": "bf16", "buffer_dtype": torch.float32}, "`buffer_dtype=torch.float32` goes with `master_w"),
    (HalfMixed, {"dtype": "bf16", "loss_scale": 128.0}, "`loss_scale=128.0` is not valid with bf16, .* or use fp16"),
    (HalfMixed, {"dtype": "fp16", "loss_scale": None}, "`loss_scale=None` is not valid with fp16, .*; expected 'auto'"),
    (HalfMixed, {"dtype": "auto", "loss_scale": None}, "`loss_scale=None` is not valid with fp16, .*; expected 'auto'"),
    *(
        (HalfMixed, {"dtype": "fp16", "loss_scale": scale}, "`loss_scale=.*; expected None, .* or a LossScale")
        for scale in ("static", 0, -2.0, math.nan, True, {"initial": 8.0})
    ),
    (recipes.bf16_mixed, {"autocast_enabled": False}, "`autocast_enabled=False` is not .* Leave it out: autocast"),
    (recipes.bf16_mixed, {"params_dtype": torch.half}, "`params_dtype=torch.float16` is not possible in this recipe"),
    (recipes.bf16_mixed, {"pipeline_dtype": torch.float32}, "There is no pipeline parallelism here"),
    (recipes.bf16_mixed, {"precision": "16-mixed"}, "`precision='16-mixed'` is not possible"),
    (recipes.bf16_mixed, {"fp8_margin": 2}, "`fp8_margin=2` goes with the FP8 recipes, such as `bf16_with_fp8_mixed`"),
    (recipes.bf16_mixed, {"grad_reduce_in_fp32": "yes"}, "`grad_reduce_in_fp32='yes'` is not valid; expected True or"),
]


@pytest.mark.parametrize(("make", "options", "message"), REFUSED)
def test_a_wrong_option_is_answered_with_the_right_one(make, options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        make(**options)
