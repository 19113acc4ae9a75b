"""One step of parameters of codes: two passes over the codes of each, which a compiler makes two kernels.

    measure   codes --decode--> float32 --update--> largest absolute values of the new moments and of the new weight
    write     codes --decode--> float32 --update--> encode with the scales of these largest values --> the same memory

Compiled, values in float32 exist in registers only, so both passes compute the update. AdamW at O2 moves 17 bytes per
parameter: 6 to measure, 6 to read again and 5 to write. O3 has a third pass of 3 bytes, which rounds the float16 codes
to e4m3 codes. Between the passes shards agree on the largest values. Without a compiler the same functions run one
kernel per operation, with the same bits, and need float32 memory for one parameter at a time.

The passes take flat tensors of any size: one graph for all parameters of equal dtypes.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, cast

import torch
from torch import Tensor

from lightning_lowprec.msamp.gradient import ScaledGradient
from lightning_lowprec.msamp.weight import required_state_of
from lightning_lowprec.msamp.weight_state import MsampWeightState, maximum
from lightning_lowprec.numerics.formats import E4M3, FP16, Format, amax, power_of_two_scale, saturating_cast
from lightning_lowprec.numerics.one_pass import tensor_on
from lightning_lowprec.numerics.rounding import bits_at, round_fp16
from lightning_lowprec.private.torch import increment_versions, local_tensor
from lightning_lowprec.private.torch_modules import compiled

_BACKEND: Final = "inductor"
_IN_REGISTERS: Final = dict.fromkeys(
    ("realize_reads_threshold", "realize_opcount_threshold", "realize_acc_reads_threshold"), 1000
)
"""Options of inductor: compute the update again for every result, instead of writing float32 values to memory."""
Flats = Mapping[str, Tensor]
Rule = Callable[[Flats, Mapping[str, Any]], None]
"""The update of an optimizer, in place, of flat (N,) float32 tensors: "grad" (may be overwritten), moments, "weight".

Numbers are scalar float32 tensors. Bools choose the code that is compiled."""
Run = Callable[[Callable[..., Any]], Callable[..., Any]]
Inputs = tuple[Flats, Flats, Tensor, Tensor | None]
"""What a step of one parameter reads: codes, scales, the gradient, and its inv_scale if it has one."""
Update = tuple[Tensor, tuple[str, ...], Mapping[str, bool], Rule]
"""The numbers of a step, their names, the bools, and the rule."""


@torch.no_grad()
def step_codes(
    params: Sequence[Tensor],
    states: Sequence[Mapping[str, object]],
    moments: Mapping[str, Format | None],
    rule: Rule,
    numbers: Mapping[str, float | bool],
    rounding: tuple[Tensor, Sequence[Tensor]] | None,
    *,
    compile: bool,
) -> None:
    """Apply ``rule`` in float32, with ``numbers``, and write all codes anew.

    ``params`` are of one device and level; sharded ones step their shards, with scales that all ranks agree on.
    ``moments``: with their formats, or None for float32 without a scale. ``rounding``, of the float16 codes: the keys
    of random bits, and the place of every parameter among these bits, as
    :func:`~lightning_lowprec.numerics.rounding.bits_at` takes them; None: to nearest.
    """
    run: Run = functools.partial(_compiled_by, _BACKEND) if compile else lambda function: function
    formats = {name: format for name, format in {**moments, "weight": FP16}.items() if format is not None}
    weights = [required_state_of(p) for p in params]
    floats = {key: float(value) for key, value in numbers.items() if not isinstance(value, bool)}
    flags = {key: value for key, value in numbers.items() if isinstance(value, bool)}
    update = (tensor_on(params[0].device, list(floats.values()), torch.float32), tuple(floats), flags, rule)
    inputs = [
        _inputs(p, weight, state, moments, formats) for p, weight, state in zip(params, weights, states, strict=True)
    ]
    amaxes = _over_shards(weights, [run(_measure)(tensors, formats, update) for tensors in inputs])
    for i, tensors in enumerate(inputs):
        bits = None if rounding is None else (rounding[0], rounding[1][i])
        run(_write)(tensors, formats, amaxes[i], bits, update)
    if weights[0].e4m3 is not None:
        _write_e4m3(run, weights, None if rounding is not None else [measured[-1] for measured in amaxes])
    increment_versions([*params, *(weight.for_products()[0] for weight in weights)])


def _inputs(
    p: Tensor,
    weight: MsampWeightState,
    state: Mapping[str, Any],
    moments: Mapping[str, Format | None],
    formats: Mapping[str, Format],
) -> Inputs:
    stepped = weight.codes
    codes = {**{name: state[name] for name in moments}, "weight": stepped}
    scales = {name: weight.scale if name == "weight" else state[f"{name}_scale"] for name in formats}
    grad = cast(Tensor, p.grad)
    inv_scale = grad.inv_scale if isinstance(grad, ScaledGradient) else None
    values = grad.codes if isinstance(grad, ScaledGradient) else local_tensor(grad)
    return {name: _flat(t, stepped) for name, t in codes.items()}, scales, _flat(values, stepped), inv_scale


def _over_shards(weights: Sequence[MsampWeightState], amaxes: list[Tensor]) -> list[Tensor]:
    shards = weights[0].shards
    return amaxes if shards is None else list(maximum(torch.stack(amaxes), shards).unbind())  # one reduction


def _write_e4m3(run: Run, weights: Sequence[MsampWeightState], amaxes: list[Tensor] | None) -> None:
    """Round the float16 codes to the e4m3 codes. A separate pass, because a compiler joins two casts to one.

    ``amaxes`` are those of the values before they were rounded to nearest; None: they are measured.
    """
    kept = [cast(Tensor, weight.e4m3) for weight in weights]
    pairs = [(_flat(weight.codes, e4m3), weight.scale) for weight, e4m3 in zip(weights, kept, strict=True)]
    if amaxes is None:  # after stochastic rounding a value may be larger than the largest one was
        amaxes = _over_shards(weights, [run(_measure_codes)(*pair) for pair in pairs])
    for weight, e4m3, pair, largest in zip(weights, kept, pairs, amaxes, strict=True):
        run(_round_codes)(*pair, _flat(e4m3, e4m3), weight.e4m3_scale, largest)


def _flat(tensor: Tensor, like: Tensor) -> Tensor:
    """Return the elements in the order in which ``like`` has them in memory: (N,), sharing memory if it is the same."""
    if tensor.stride() != like.stride():
        tensor = torch.empty_like(like, dtype=tensor.dtype).copy_(tensor)
    # `.data`: no view any more. The compiler would look at the shape of what a view shows.
    return tensor.as_strided((tensor.numel(),), (1,)).data


# ---- passes over one parameter; all tensors but scales are flat


def _updated(inputs: Inputs, update: Update) -> dict[str, Tensor]:
    """Return the moments and the weight after the step, in float32."""
    codes, scales, grad, grad_inv_scale = inputs
    numbers, names, flags, rule = update
    values = {name: codes[name].float() * scale.reciprocal() for name, scale in scales.items()}
    plain = {name: stored.clone() for name, stored in codes.items() if name not in scales}
    gradient = grad.float() if grad_inv_scale is None else grad.float() * grad_inv_scale
    full = {**plain, **values, "grad": gradient.clone()}
    rule(full, {**flags, **dict(zip(names, numbers.unbind(), strict=True))})
    return full


def _measure(inputs: Inputs, formats: Mapping[str, Format], update: Update) -> Tensor:
    """First pass: return the largest absolute values after the step, (len(formats),), the last one of the weight."""
    full = _updated(inputs, update)
    return torch.stack([amax(full[name]) for name in formats])


def _write(
    inputs: Inputs,
    formats: Mapping[str, Format],
    amaxes: Tensor,
    bits: tuple[Tensor, Tensor] | None,
    update: Update,
) -> None:
    """Second pass: write codes and scales after the step."""
    (codes, scales, *_), full = inputs, _updated(inputs, update)
    for (name, format), largest in zip(formats.items(), amaxes.unbind(), strict=True):
        scale = power_of_two_scale(largest, format, scales[name])
        values = full[name] * scale
        if name == "weight" and bits is not None:
            values = round_fp16(values, bits_at(len(values), *bits)) / scale * scale
        codes[name].copy_(saturating_cast(values, format))
        scales[name].copy_(scale)
    for name in codes.keys() - formats.keys():
        codes[name].copy_(full[name])


def _measure_codes(codes: Tensor, scale: Tensor) -> Tensor:
    return amax(codes.float()) / scale


def _round_codes(codes: Tensor, scale: Tensor, e4m3: Tensor, e4m3_scale: Tensor, largest: Tensor) -> None:
    """Third pass, at O3: float16 codes of the weight -> its e4m3 codes."""
    # rounding to nearest keeps the order, so the largest value becomes the largest code
    rounded = saturating_cast(largest * scale, FP16).float() / scale
    fresh = power_of_two_scale(rounded, E4M3, e4m3_scale)
    e4m3.copy_(saturating_cast(codes.float() / scale * fresh, E4M3))
    e4m3_scale.copy_(fresh)


@functools.cache
def _compiled_by(backend: str, function: Callable[..., object]) -> Callable[..., object]:
    options: Any = _IN_REGISTERS if backend == "inductor" else None
    return compiled(function, backend=backend, dynamic=True, options=options)
