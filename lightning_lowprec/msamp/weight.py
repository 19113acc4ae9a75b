"""Parameters of codes: made from plain parameters, found, moved, and given other values.

:class:`~lightning_lowprec.msamp.weight_tensor.MsampWeight` is the tensor that such a parameter becomes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

from lightning_lowprec.checks import check_choice
from lightning_lowprec.msamp.weight_state import LEVELS, Level, MsampWeightState
from lightning_lowprec.msamp.weight_tensor import again, user_attributes
from lightning_lowprec.msamp.weight_tensor import msamp_state_of as msamp_state_of
from lightning_lowprec.numerics.flat import local
from lightning_lowprec.private import torch as private


@torch.inference_mode(False)  # an optimizer writes to the codes later
def scale_weight_(param: Parameter, level: Level) -> MsampWeightState:
    """Make ``param`` hold codes, in place, and return its state, which is then at ``param.msamp_state``.

    From then on ``param`` shows float32. The object, its shape, its hooks and its place in modules and optimizers stay.

    Args:
        param: (...) float32, bfloat16 or float16; finite.
        level: "O1" and "O2" keep float16 codes, "O3" float8_e4m3fn codes and a float16 master.

    Raises:
        ValueError: an unknown level, or ``param`` holds codes already.
    """
    private.check(private.MSAMP)
    check_choice("level", level, LEVELS)
    held = msamp_state_of(param)
    if held is not None:
        raise ValueError(f"the parameter of shape {tuple(param.shape)} holds {held.codes.dtype} codes already.")
    state = MsampWeightState.of(param.detach().float(), level)
    param.grad = None
    _replace_data(param, state)
    return state


def revert_weight_(param: Parameter, values: Tensor) -> None:
    """Make a parameter of codes hold ``values`` as a plain parameter does, in place: (...) float32."""
    made = Parameter(values.clone(), param.requires_grad)
    made.__dict__.update(user_attributes(param))
    private.swap_data(param, made)


@torch.inference_mode(False)
def move_(param: Tensor, device: torch.device) -> None:
    """Move a weight of codes and its gradient to ``device``; the object stays."""
    gradient, param.grad = param.grad, None
    _replace_data(param, required_state_of(param).copied(device))
    if gradient is not None and device.type != "meta":
        param.grad = gradient.to(device)


def _replace_data(param: Tensor, state: MsampWeightState) -> None:
    private.swap_data(param, again(param, state))


def required_state_of(param: Any) -> MsampWeightState:
    """Return the state of a parameter of codes; raise TypeError if another tensor took its place."""
    state = msamp_state_of(param)
    if state is None:
        raise TypeError(
            f"the weight of a ScaledLinear (MS-AMP) is a plain {tuple(param.shape)} tensor of {param.dtype}; expected"
            " its parameter of codes. Parametrize, prune or normalize weights before the conversion, which then leaves"
            " the layer unconverted; give `torch.func.functional_call` the parameters, not a state dict."
        )
    return state


def coded_weight(model: nn.Module) -> str | None:
    """Return the fqn of the first parameter of ``model`` that is kept as codes; None if there is none."""
    return next((fqn for fqn, p in model.named_parameters() if msamp_state_of(p) is not None), None)


def codes_of(param: Tensor) -> Tensor:
    """Return the codes of a weight, of this rank if it is sharded or gathered; any other tensor unchanged."""
    state = msamp_state_of(param)
    return param if state is None else state.codes


# ---- values and masters of parameters, whole or sharded


@torch.no_grad()
def values_of(param: Tensor) -> Tensor:
    """Return the exact values of a parameter of codes: (...) float32, sharded like the parameter."""
    return sharded_like(required_state_of(param).values(), param)


@torch.no_grad()
def set_values_(param: Tensor, values: Tensor) -> None:
    """Give a parameter of codes other values: (...) any float, for example those of :func:`values_of`.

    A master (or one that :func:`set_master_` left waiting) that rounds to the values stays; else the values become the
    master. For a sharded parameter a collective: every rank calls it.
    """
    required_state_of(param).set_values_(local(values.detach()).float(), keep_master=True)
    record_writes([param])


@torch.no_grad()
def set_master_(param: Tensor, master: Tensor) -> None:
    """Give a parameter that has a master another master, (...) any float, if that rounds to the parameter.

    A master that does not round to the parameter waits until the parameter gets other values, because an optimizer may
    be loaded before its model. For a sharded parameter a collective: every rank calls it.
    """
    state = msamp_state_of(param)
    if state is not None:
        state.set_master_(local(master).to(param.device).float())


def master_of(param: Tensor) -> Tensor | None:
    """Return the values of a parameter's master, (...) float32, sharded like the parameter; None without a master."""
    state = msamp_state_of(param)
    return None if state is None or state.master is None else sharded_like(state.exact_values(), param)


def sharded_like(part: Tensor, param: Tensor) -> Tensor:
    """Return ``part`` as a DTensor if the parameter of codes is one; else ``part`` itself."""
    return private.with_local_tensor(part, param) if isinstance(param, DTensor) else part


def record_writes(params: Sequence[Tensor]) -> None:
    """Let autograd notice that the codes of parameters were written: a graph that saved a weight then raises."""
    torch.autograd.graph.increment_version([p for p in params if not p.is_inference()])
