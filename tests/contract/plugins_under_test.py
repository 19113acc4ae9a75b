"""The plugins that the contract suite runs over. A new plugin enters by one line in ``EXTRA``, a new name by itself."""

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from lightning_lowprec import FP8TE, MSAMP, FP8TorchAO, HalfMixed, LossScale, MasterConfig
from lightning_lowprec.conversion import backends
from lightning_lowprec.names import TABLE, create
from lightning_lowprec.precision.base import LowPrecision
from lightning_lowprec.private.torchao import prototype_refusal
from tests.representatives import representatives
from tests.toy_backend import BACKEND as TOY

HALF_GRADIENTS = ("fp16-master", "FP8TorchAO-fp16-master", "fp16-master-fp32-gradients")
"""Plugins whose micro-batch gradients are fp16."""
FLOAT32_GRADIENTS = {"grad_accumulation_dtype": torch.float32}


def fp8_te(**options: Any) -> FP8TE:
    """By quantizers in plain torch; its norms have no such path."""
    from tests.te.reference import current_scaling

    return FP8TE(current_scaling(), norms=False, **options)


EXTRA: dict[str, Callable[..., LowPrecision]] = {
    "HalfMixed-bf16": partial(HalfMixed, "bf16"),
    "HalfMixed-fp16": partial(HalfMixed, "fp16"),
    "FP8TorchAO": partial(FP8TorchAO),
    "FP8TorchAO-fp16": partial(FP8TorchAO, base="fp16"),
    "FP8TorchAO-fp16-master": partial(FP8TorchAO, base="fp16", master_weights=True),
    "bf16-master-fp32-gradients": partial(HalfMixed, "bf16", master_weights=True, **FLOAT32_GRADIENTS),
    "fp16-master-fp32-gradients": partial(HalfMixed, "fp16", master_weights=True, **FLOAT32_GRADIENTS),
    "bf16-remainder-fp32-gradients": partial(HalfMixed, "bf16", master_weights="remainder", **FLOAT32_GRADIENTS),
    "bf16-sr-fp32-gradients": partial(HalfMixed, "bf16", master_weights="stochastic", **FLOAT32_GRADIENTS),
    "bf16-sr-8bit-moments": partial(HalfMixed, "bf16", master_weights=MasterConfig(form="stochastic", moments="8bit")),
    "MSAMP-fp16": partial(MSAMP, base="fp16"),
    "MSAMP-fp32-gradients": partial(MSAMP, "O3", grad_accumulation_dtype=torch.float32),
    "FP8TorchAO-master-fp32-gradients": partial(FP8TorchAO, master_weights=True, **FLOAT32_GRADIENTS),
}
if find_spec("transformer_engine"):  # else no name says so: nothing is skipped
    EXTRA |= {
        "FP8TE-bf16": partial(fp8_te),
        "FP8TE-fp16": partial(fp8_te, base="fp16"),
        "FP8TE-bf16-master": partial(fp8_te, master_weights=True),
        "FP8TE-fp8-params": partial(fp8_te, fp8_params=True),
    }


def make(name: str, loss_scale: LossScale | None = None) -> LowPrecision:
    """A new plugin; ``loss_scale`` is used by those that scale the loss and ignored by the others."""
    if loss_scale is None and name in HALF_GRADIENTS:
        loss_scale = LossScale(initial=8.0)  # fp16 gradients overflow at the default, as they should
    options: dict[str, Any] = {"loss_scale": loss_scale} if loss_scale is not None and name in SCALED_NAMES else {}
    if name in EXTRA:
        return EXTRA[name](**options)
    row = TABLE[name]
    return row.plugin(**row.options, **options) if options else create(name)


def weight_dtype(name: str) -> torch.dtype:
    """The dtype of a module's weights under this plugin."""
    plugin = make(name)
    return torch.float32 if plugin.masters is None else plugin.autocast_dtype


UNSET = ("precision", "modules", "optimizers", "after_fit")
"""Attributes that a plugin has from its name, or from what it will meet: no options."""


def _identity(name: str) -> str:
    """Two names with the same class and options are one plugin to a test that takes long."""
    plugin = make(name)
    options = {key: value for key, value in vars(plugin).items() if key not in UNSET}
    options["weights"] = type(plugin.weights)
    if (scaler := plugin.scaler) is not None:
        options["scaler"] = scaler.scales_loss, scaler.config
    if (masters := plugin.masters) is not None:
        options["masters"] = masters.config, masters.buffer_dtype, masters.accumulation
    return f"{type(plugin).__name__}{options}"


backends.register(TOY)  # a backend from outside of the package: its names enter as all names do
NAMES = (
    *(
        name
        for name in representatives()
        if TABLE[name].plugin is not FP8TE and not ("mxfp8" in name and prototype_refusal("mxfp8"))
    ),
    *EXTRA,
)
"""Transformer Engine has no kernels for CPU: FP8TE's names are not here, but its reference quantizers run in EXTRA.
MXFP8 by torchao needs a newer torchao than the oldest that is supported, where a test holds the refusal.
"""
SCALED_NAMES = tuple(name for name in NAMES if (EXTRA.get(name) or partial(create, name))().scaler is not None)
DISTINCT = tuple({_identity(name): name for name in reversed(NAMES)}.values())

backends.unregister(TOY.name)

SHOWN_BY_OTHERS = ("HalfMixed-bf16", "fp8-e4m3", "fp8-rowwise", "fp8-rowwise-gw-hp")
"""Plugins of which no contract sees more than of others: on a CPU the first is ``half-auto``, as
test_contract_references.py holds; the others are ``fp8-hybrid`` and ``fp8-hybrid-fp16`` in a format or a recipe that
``fp8-e4m3-8bit``, ``fp8-rowwise-remainder`` and ``fp8-rowwise-gw-hp-sr`` have."""
every_name = pytest.mark.parametrize("name", [name for name in NAMES if name not in SHOWN_BY_OTHERS])
"""For contracts that cost milliseconds."""
UNDER_TEST = tuple(name for name in DISTINCT if name not in SHOWN_BY_OTHERS)
every_plugin = pytest.mark.parametrize("name", UNDER_TEST)
"""For contracts that need a fit: each class and set of options once."""
every_scaled = pytest.mark.parametrize("name", [name for name in UNDER_TEST if name in SCALED_NAMES])
every_unscaled = pytest.mark.parametrize("name", [name for name in UNDER_TEST if name not in SCALED_NAMES])
