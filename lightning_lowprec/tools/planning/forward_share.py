"""Count which share of the matrix FLOPs of one forward a plan runs in low precision; nothing is computed."""

from __future__ import annotations

from torch import nn

from lightning_lowprec.conversion.matmuls import STACKED
from lightning_lowprec.conversion.plan import Plan
from lightning_lowprec.precision.float32_products import Float32Products
from lightning_lowprec.precision.layer_calls import LayerCalls
from lightning_lowprec.private.fake_gpu import tensors_of
from lightning_lowprec.tools.planning.simulated_inputs import inputs_of


def forward_share(model: nn.Module, plan: Plan) -> tuple[float | None, str]:
    """Return the share in a forward of ``example_input_array``, None if it is not known, and a line about it.

    The line is empty for a model without ``example_input_array``.

    Args:
        model: on the meta device.
        plan: the plan of the model.
    """
    example = getattr(model, "example_input_array", None)
    if example is None:
        return None, ""
    inputs, parameter = inputs_of(model), next(model.parameters())
    batch = inputs.batch(tensors_of(example)[0].shape[0], None, parameter.device)
    rows = [row for row in plan.rows if row.kept_because is None]
    names = {row.fqn.rpartition(".")[0] if row.kind == STACKED else row.fqn for row in rows}
    layers = {id(model.get_submodule(name)) for name in names}
    calls = LayerCalls([model], lambda module: id(module) in layers)
    of = "a forward of `example_input_array`"
    try:
        with Float32Products([model], calls):
            inputs.loss(model, batch)
    except (NotImplementedError, RuntimeError) as error:  # the forward reads values
        return None, f"matrix FLOPs of {of}: not known ({str(error).splitlines()[0]})"
    return calls.share, calls.text(of, plan.format) or f"matrix FLOPs of {of}: not known"
