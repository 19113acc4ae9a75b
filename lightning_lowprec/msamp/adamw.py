"""AdamW whose weights, gradients and moments are 8 and 16 bits wide with scales: MS-AMP's O1, O2 and O3.

    scale_weight_(linear.weight, "O2")      # from here on the weight is float16 codes: read it with values_of(weight)
    optimizer = ScaledAdamW(model.parameters(), level="O2")

A step decodes to float32, updates, and encodes with a fresh amax per tensor (arXiv 2310.18313, sec. 2.2): two passes
over the codes of each parameter, which a compiler makes two kernels.

    measure   codes --decode--> float32 --update--> largest absolute values of the new moments and of the new weight
    write     codes --decode--> float32 --update--> encode with the scales of these largest values --> the same memory

Compiled, values in float32 exist in registers only, so both passes compute the update. O2 moves 17 bytes per parameter:
6 to measure, 6 to read again and 5 to write. O3 has a third pass of 3 bytes, which rounds the float16 codes to e4m3
codes. Between the passes shards agree on the largest values. Without a compiler the same functions run one kernel per
operation, with the same bits, and need float32 memory for one parameter at a time. The passes take flat tensors of any
size: one graph for all parameters of equal dtypes. State dicts are those of the plain optimizer, in float32.
"""

import functools
import inspect
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, Literal, final

import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer
from typing_extensions import override

from lightning_lowprec.checks import check_choice
from lightning_lowprec.masters.moments import MASTER_PARAM, MASTER_REMAINDER, decoded_entry, joined, params_by_key
from lightning_lowprec.msamp.gradient import ScaledGradient
from lightning_lowprec.msamp.weight import best_values_of, codes_of
from lightning_lowprec.msamp.weight_state import (
    LEVELS,
    Level,
    MsampWeightState,
    encode,
    maximum,
    msamp_state_of,
    required_state_of,
)
from lightning_lowprec.numerics.formats import (
    E4M3,
    FP16,
    HALF_DTYPES,
    Format,
    amax,
    power_of_two_scale,
    saturating_cast,
)
from lightning_lowprec.numerics.one_pass import compiles, tensor_on
from lightning_lowprec.private.torch import copy_all_, local_tensor, with_local_tensor
from lightning_lowprec.private.torch_inductor import compiled
from lightning_lowprec.private.torch_optimizers import STEPPED, known_to_schedulers

MOMENTS: Final[Mapping[str, Format]] = {"exp_avg": E4M3, "exp_avg_sq": FP16}
_REFUSED: Final = ("amsgrad", "maximize", "capturable", "differentiable")
OPTIONS: Final = ("level", "compile")
_TORCHS_STEP: Final[Any] = inspect.unwrap(AdamW.step)  # without torch's hooks, which run around our step
ALIVE: Final[weakref.WeakSet[Optimizer]] = weakref.WeakSet()
_BACKEND: Final = "inductor"
_IN_REGISTERS: Final = dict.fromkeys(
    ("realize_reads_threshold", "realize_opcount_threshold", "realize_acc_reads_threshold"), 1000
)
"""Options of inductor: compute the update again for every result, instead of writing float32 values to memory."""
Inputs = tuple[Mapping[str, Tensor], Mapping[str, Tensor], Tensor, Tensor | None]
"""What a step reads of one parameter: codes, scales, the gradient, and its inv_scale if it has one."""
Update = tuple[Tensor, bool]


@final
class ScaledAdamW(AdamW):
    """torch's AdamW, also for parameters of codes (see :func:`~lightning_lowprec.msamp.weight.scale_weight_`).

    Plain parameters get torch's AdamW, bit for bit; in half precision with float32 moments and a float32 update. At
    level O2 and O3 the first moment is float8_e4m3fn codes, the second float16 codes. An Adam that was converted adds
    its weight decay to the gradient, as torch's Adam does.

    Args:
        params: parameters or groups, as in any torch optimizer.
        args: as in torch's class, and so are ``options``.
        level: the level of the parameters of codes. Moments are float32 at "O1"; at "O2" and "O3" they are codes, each
            with a scale.
        compile: update each parameter of codes by compiled passes, without memory for float32 values. ``"auto"``: on
            GPUs with FP8; True: on every device. False runs one kernel per operation.
        options: of torch's class.

    Raises:
        ValueError: an argument out of range, an option that is not possible, or a parameter of another level.
    """

    def __init__(
        self,
        params: Iterable[Any],
        *args: Any,
        level: Level = "O2",
        compile: bool | Literal["auto"] = "auto",
        **options: Any,
    ) -> None:
        check_choice("level", level, LEVELS)
        check_choice("compile", compile, ("auto", True, False))
        self.level: Level = level
        self.compile: bool | Literal["auto"] = compile
        super().__init__(params, *args, **options)
        ALIVE.add(self)

    @override
    def add_param_group(self, param_group: dict[str, object]) -> None:
        super().add_param_group(param_group)
        check_options(self)
        for p in self.param_groups[-1]["params"]:
            weight = msamp_state_of(p)
            if weight is not None and (weight.e4m3 is not None) != (self.level == "O3"):
                raise ValueError(
                    f"`level={self.level!r}` is not valid for a parameter of {weight.for_products()[0].dtype} codes."
                )

    # ---- the step

    @override
    @known_to_schedulers
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step once; parameters without a gradient stay unchanged."""
        vars(self)[STEPPED] = True
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        plain: dict[Tensor, Tensor] = {}
        alike: dict[tuple[Any, ...], list[Tensor]] = {}  # parameters of codes that may step together
        for index, group in enumerate(self.param_groups):
            if any(map(group.get, _REFUSED)):  # somebody has written it since
                check_options(self)
            for p in group["params"]:
                weight: MsampWeightState | None = getattr(p, "msamp_state", None)
                if p.grad is None:
                    continue
                if weight is None:
                    plain[p] = p
                elif p.numel():
                    kind = index, p.device, weight.shards, self.state[p].get("step", 0)
                    alike.setdefault(kind, []).append(p)
        if plain:
            self._step_plain(plain)
        for (index, *_), params in alike.items():
            self._step_codes(self.param_groups[index], params)
        return loss

    def _step_plain(self, shown: dict[Tensor, Tensor]) -> None:
        """Let torch step parameters without codes; those in half precision as float32, with float32 state."""
        groups, state = self.param_groups, self.state
        half = [p for p in shown if p.dtype in HALF_DTYPES]
        for p in half:
            shown[p] = p.float()
            shown[p].grad = p.grad.float()  # type: ignore[union-attr]
        self.param_groups = []
        for group in groups:
            if own := [shown[p] for p in group["params"] if p in shown]:
                self.param_groups.append({**group, "params": own})
        self.state = defaultdict(dict, {shown[p]: state[p] for p in shown if p in state})
        try:
            _TORCHS_STEP(self)
        finally:
            state.update((p, self.state[values]) for p, values in shown.items() if values in self.state)
            self.param_groups, self.state = groups, state
        if half:
            copy_all_(half, [shown[p] for p in half])

    def _step_codes(self, group: Mapping[str, Any], params: Sequence[Tensor]) -> None:
        """Update parameters of one device and level in float32, and write all codes anew.

        Sharded parameters step their shards, with scales that all ranks agree on.
        """
        formats: Mapping[str, Format] = {**({} if self.level == "O1" else MOMENTS), "weight": FP16}
        weights: list[MsampWeightState] = []
        inputs: list[Inputs] = []
        step, written = 0, [*params]  # the passes write behind autograd's back
        for p in params:
            state = self._state_of(p, MOMENTS)
            state["step"] = step = state["step"] + 1
            weights.append(required_state_of(p))
            inputs.append(_inputs(p, weights[-1], state, formats))
            written.append(weights[-1].for_products()[0])
        coupled = bool(group["weight_decay"]) and not group["decoupled_weight_decay"]
        update = tensor_on(params[0].device, _numbers(group, step, coupled), torch.float32), coupled
        compile = compiles(params[0].device) if self.compile == "auto" else self.compile
        measure, write = _passes(compile, _measure, _write)
        largest = _over_shards(weights, [measure(tensors, formats, update) for tensors in inputs])
        for tensors, amaxes in zip(inputs, largest, strict=True):
            write(tensors, formats, amaxes, update)
        if weights[0].e4m3 is not None:
            _write_e4m3(compile, weights, [each[-1] for each in largest])
        torch.autograd.graph.increment_version(written)

    # ---- state

    @override
    def __getstate__(self) -> dict[str, object]:
        state = {p: _viewed(entry, E4M3.dtype, torch.uint8) for p, entry in self.state.items()}  # pickle has no float8
        options = {name: getattr(self, name) for name in OPTIONS}
        return {**super().__getstate__(), "state": state, **options}

    @override
    def __setstate__(self, state: dict[str, object]) -> None:
        Optimizer.__setstate__(self, state)  # Adam's would make tensors of the step counts
        ALIVE.add(self)
        self.state = defaultdict(dict, self.state)
        for p, entry in self.state.items():
            self.state[p] = _viewed(entry, torch.uint8, E4M3.dtype)
        for group in self.param_groups:  # as in torch: an AdamW that loads the state of an Adam stays an AdamW
            group.update({**self.defaults, **group})
            group["decoupled_weight_decay"] |= self.defaults["decoupled_weight_decay"]
        check_options(self)

    def _state_of(self, p: Tensor, moments: Iterable[str]) -> dict[str, Any]:
        """Return the state of ``p``; missing moments start at zero."""
        state: dict[str, Any] = self.state[p]
        coded = hasattr(p, "msamp_state")
        scaled = coded and self.level != "O1"
        if coded:
            state.setdefault("step", 0)
        for key in moments:
            if key not in state:
                dtype = MOMENTS[key].dtype if scaled else torch.promote_types(p.dtype, torch.float32)
                state[key] = torch.zeros_like(codes_of(p), dtype=dtype)
                if scaled:
                    state[f"{key}_scale"] = torch.ones((), device=p.device)
        return state

    @override
    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """Return the state dict of the plain optimizer, with the values of codes."""
        state_dict = super().state_dict()
        entries, params = state_dict["state"], params_by_key(self, state_dict)
        state = {key: _with_values(entries[key], p) for key, p in params.items() if key in entries}
        return {**state_dict, "state": state}

    @override
    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of the plain optimizer, or of any level; moments that are kept as codes get fresh scales.

        (Torch's own loading casts every tensor to the dtype of its parameter, which would round values to codes.)
        """
        super().load_state_dict(state_dict)
        for key, p in params_by_key(self, state_dict).items():
            if key in state_dict["state"]:
                self._load(p, decoded_entry(dict(state_dict["state"][key]), p))

    def _load(self, p: Tensor, saved: Mapping[str, Any]) -> None:
        others = sorted(saved.keys() - {"step", MASTER_PARAM, MASTER_REMAINDER, *MOMENTS})
        if others and not MOMENTS.keys() & saved.keys():
            raise ValueError(
                f"the state holds {', '.join(others)}; expected that of an optimizer with {', '.join(MOMENTS)}."
            )
        weight = msamp_state_of(p)
        loaded = [key for key in MOMENTS if saved.get(key) is not None]
        by_torch = self.state.pop(p, {})
        state = self._state_of(p, loaded)
        if "step" in saved:  # torch has put the step of a fused optimizer on the device
            state["step"] = torch.as_tensor(by_torch["step"]) if weight is None else int(saved["step"])
        for key in loaded:
            values = saved[key] if weight is None else local_tensor(saved[key]).to(p.device)
            if weight is not None and f"{key}_scale" in state:
                values, state[f"{key}_scale"] = encode(values.float(), MOMENTS[key], weight.shards)
            state[key].copy_(values)
        master = saved.get(MASTER_PARAM)
        if master is None and MASTER_REMAINDER in saved and weight is not None:
            master = joined(best_values_of(p).bfloat16(), saved[MASTER_REMAINDER])
        if master is not None and weight is not None:
            weight.set_master_(local_tensor(master).to(p.device).float())


def _viewed(entry: Mapping[str, Any], dtype: torch.dtype, other: torch.dtype) -> dict[str, Any]:
    """Return the state of a parameter with tensors of ``dtype`` as tensors of the other, on the same memory."""
    return {key: value.view(other) if getattr(value, "dtype", None) == dtype else value for key, value in entry.items()}


def _with_values(entry: Mapping[str, Any], p: Tensor) -> dict[str, Any]:
    """Return the state of one parameter with float32 values instead of codes and scales."""
    values: dict[str, Any] = {"step": torch.as_tensor(float(entry["step"]))} if "step" in entry else {}
    for key, value in entry.items():
        scale = entry.get(f"{key}_scale")
        if key != "step" and not key.endswith("_scale"):
            values[key] = value if scale is None else with_local_tensor(value.float() / scale, p)
    return values


def check_options(optimizer: Optimizer) -> None:
    """Raise ValueError for an option of an AdamW or Adam that is not possible with parameters of codes."""
    for group in optimizer.param_groups:
        for name in _REFUSED:
            if group.get(name):
                raise ValueError(f"`{name}={group[name]!r}` of {type(optimizer).__name__} is not possible with MS-AMP.")


def _numbers(group: Mapping[str, Any], step: int, coupled: bool) -> list[float]:
    """Return the numbers of a step for :func:`_update`."""
    (beta1, beta2), lr, decay = group["betas"], float(group["lr"]), group["weight_decay"]
    decay = decay if coupled else 1 - lr * decay
    shares = (beta1, beta2, 1 - beta1, 1 - beta2, 1 - beta1**step, 1 - beta2**step)
    return [*map(float, (lr, decay, *shares, group["eps"]))]


def _inputs(p: Tensor, weight: MsampWeightState, state: Mapping[str, Any], formats: Iterable[str]) -> Inputs:
    stepped = weight.codes
    scales: dict[str, Tensor] = {}
    stored = {"exp_avg": state["exp_avg"], "exp_avg_sq": state["exp_avg_sq"], "weight": stepped}
    codes = {name: _flat(values, stepped) for name, values in stored.items()}
    for name in formats:
        scales[name] = weight.scale if name == "weight" else state[f"{name}_scale"]
    grad: Any = p.grad
    if isinstance(grad, ScaledGradient):
        return codes, scales, _flat(grad.codes, stepped), grad.inv_scale
    return codes, scales, _flat(local_tensor(grad), stepped), None


def _flat(tensor: Tensor, like: Tensor) -> Tensor:
    """Return the elements in the order in which ``like`` has them in memory: (N,), sharing memory if it is the same."""
    if tensor.stride() != like.stride():
        tensor = torch.empty_like(like, dtype=tensor.dtype).copy_(tensor)
    # `.data`: no view any more. The compiler would look at the shape of what a view shows.
    return tensor.as_strided((tensor.numel(),), (1,)).data


def _over_shards(weights: Sequence[MsampWeightState], largest: list[Tensor]) -> list[Tensor]:
    shards = weights[0].shards
    return largest if shards is None else list(maximum(torch.stack(largest), shards).unbind())  # one reduction


def _write_e4m3(compile: bool, weights: Sequence[Any], largest: Sequence[Tensor]) -> None:
    """Round the float16 codes to the e4m3 codes. A separate pass, because a compiler joins two casts to one.

    ``largest`` are those of the values before they were rounded.
    """
    (write,) = _passes(compile, _round_codes)
    for weight, amax_ in zip(weights, largest, strict=True):
        codes, e4m3 = _flat(weight.codes, weight.e4m3), _flat(weight.e4m3, weight.e4m3)
        write(codes, weight.scale, e4m3, weight.e4m3_scale, amax_)


# ---- passes over one parameter; all tensors but scales are flat


def _update(flat: Mapping[str, Tensor], numbers: Tensor, coupled: bool) -> None:
    """Update flat (N,) float32 tensors in place: moments, "weight", and "grad", which may be overwritten."""
    grad, exp_avg, exp_avg_sq, weight = flat["grad"], flat["exp_avg"], flat["exp_avg_sq"], flat["weight"]
    lr, decay, beta1, beta2, fresh1, fresh2, correction1, correction2, eps = numbers.unbind()
    if coupled:
        grad.add_(weight * decay)
    else:
        weight.mul_(decay)
    exp_avg.mul_(beta1).add_(grad * fresh1)
    exp_avg_sq.mul_(beta2).add_(grad.mul_(grad).mul_(fresh2))
    denominator = torch.div(exp_avg_sq, correction2, out=grad).sqrt_().add_(eps)
    weight.sub_((exp_avg / correction1).div_(denominator).mul_(lr))


def _updated(inputs: Inputs, update: Update) -> dict[str, Tensor]:
    """Return the moments and the weight after the step, in float32."""
    codes, scales, grad, grad_inv_scale = inputs
    values = {name: codes[name].float() * scale.reciprocal() for name, scale in scales.items()}
    plain = {name: stored.clone() for name, stored in codes.items() if name not in scales}
    gradient = grad.float() if grad_inv_scale is None else grad.float() * grad_inv_scale
    full = {**plain, **values, "grad": gradient.clone()}
    _update(full, *update)
    return full


def _measure(inputs: Inputs, formats: Mapping[str, Format], update: Update) -> Tensor:
    """First pass: return the largest absolute values after the step, (len(formats),), the last one of the weight."""
    full = _updated(inputs, update)
    return torch.stack([amax(full[name]) for name in formats])


def _write(inputs: Inputs, formats: Mapping[str, Format], amaxes: Tensor, update: Update) -> None:
    """Second pass: write codes and scales after the step."""
    (codes, scales, *_), full = inputs, _updated(inputs, update)
    for (name, format), largest in zip(formats.items(), amaxes.unbind(), strict=True):
        scale = power_of_two_scale(largest, format, scales[name])
        codes[name].copy_(saturating_cast(full[name] * scale, format))
        scales[name].copy_(scale)
    for name in codes.keys() - formats.keys():
        codes[name].copy_(full[name])


def _round_codes(codes: Tensor, scale: Tensor, e4m3: Tensor, e4m3_scale: Tensor, largest: Tensor) -> None:
    """Third pass, at O3: float16 codes of the weight -> its e4m3 codes."""
    # rounding to nearest keeps the order, so the largest value becomes the largest code
    rounded = saturating_cast(largest * scale, FP16).float() / scale
    fresh = power_of_two_scale(rounded, E4M3, e4m3_scale)
    e4m3.copy_(saturating_cast(codes.float() / scale * fresh, E4M3))
    e4m3_scale.copy_(fresh)


def _passes(compile: bool, *functions: Callable[..., Any]) -> list[Callable[..., Any]]:
    return [_compiled_by(_BACKEND, function) for function in functions] if compile else [*functions]


@functools.cache
def _compiled_by(backend: str, function: Callable[..., object]) -> Callable[..., Any]:
    options: Any = _IN_REGISTERS if backend == "inductor" else None
    return compiled(function, backend=backend, dynamic=True, options=options)
