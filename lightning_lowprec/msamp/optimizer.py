"""The base of ScaledAdamW: which parameters step together, state, state dicts."""

import inspect
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from itertools import accumulate, chain
from typing import Any, Final, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_lowprec.checks import abstract, check_choice
from lightning_lowprec.masters.moments import MASTER_PARAM, MASTER_REMAINDER, decoded_entry, joined, params_by_key
from lightning_lowprec.msamp.gradient import ScaledGradient
from lightning_lowprec.msamp.step import Flats, step_codes
from lightning_lowprec.msamp.weight import best_values_of, codes_of, msamp_state_of, required_state_of
from lightning_lowprec.msamp.weight_state import LEVELS, Level, encode
from lightning_lowprec.numerics.formats import E4M3, HALF_DTYPES, Format
from lightning_lowprec.numerics.one_pass import compiles, tensor_on
from lightning_lowprec.numerics.parameters import aligned, chunks, grouped, parameters_of
from lightning_lowprec.numerics.rounding import keys_of_bits
from lightning_lowprec.private.torch import copy_all_, local_tensor, with_local_tensor
from lightning_lowprec.private.torch_optimizers import noted_by_schedulers

_CHUNK: Final = 1 << 24  # elements whose random bits are numbered together
_REFUSED: Final = ("amsgrad", "maximize", "capturable", "differentiable")
OPTIONS: Final = ("level", "stochastic_rounding", "seed", "compile")
_alive: Final[weakref.WeakSet[Optimizer]] = weakref.WeakSet()


def scaled_optimizers() -> list[Optimizer]:
    """Return every optimizer of this class that still exists."""
    return [optimizer for optimizer in _alive if isinstance(optimizer, ScaledOptimizer)]


@abstract
class ScaledOptimizer(Optimizer):
    """Abstract: an optimizer of torch that also steps parameters of codes; a subclass derives from torch's class too.

    Args:
        params: parameters or groups, as in any torch optimizer.
        args: as in torch's class, and so are ``options``.
        level: the level of the parameters of codes. Moments are float32 at "O1"; at "O2" and "O3" they are codes, each
            with a scale.
        stochastic_rounding: round the float16 codes of weights stochastically, so that updates below half a step
            move them on average. The random bits are a function of ``seed``, the step and the position.
        seed: of the stochastic rounding.
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
        stochastic_rounding: bool = False,
        seed: int = 0,
        compile: bool | Literal["auto"] = "auto",
        **options: Any,
    ) -> None:
        check_choice("level", level, LEVELS)
        check_choice("compile", compile, ("auto", True, False))
        self.level: Level = level
        self.stochastic_rounding = stochastic_rounding
        self.seed = seed
        self.compile: bool | Literal["auto"] = compile
        super().__init__(params, *args, **options)
        check_options(self)
        _alive.add(self)

    # ---- for subclasses

    def _moments(self) -> Mapping[str, Format]:
        """Return the moments that a step needs, with their formats at O2 and O3."""
        raise NotImplementedError

    def _numbers(self, group: Mapping[str, object], state: Mapping[str, object]) -> Mapping[str, float | bool]:
        """Return the numbers of the next step, for parameters whose state after the last step is like ``state``."""
        raise NotImplementedError

    @staticmethod
    def _update_flat(flat: Flats, numbers: Mapping[str, object]) -> None:
        """Update flat tensors of codes: a :data:`~lightning_lowprec.msamp.step.Rule`."""
        raise NotImplementedError

    # ---- the step

    @override
    def add_param_group(self, param_group: dict[str, object]) -> None:
        super().add_param_group(param_group)
        for p in self.param_groups[-1]["params"]:
            weight = msamp_state_of(p)
            if weight is not None and (weight.e4m3 is not None) != (self.level == "O3"):
                raise ValueError(
                    f"`level={self.level!r}` is not valid for a parameter of {weight.for_products()[0].dtype} codes."
                )

    @override
    @noted_by_schedulers
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step once; parameters without a gradient stay unchanged."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._step_plain(inspect.unwrap(super().step))  # without torch's hooks, which run around this step
        for group in self.param_groups:
            for alike in self._alike(group["params"]):
                self._step_codes(group, alike)
        return loss

    def _step_plain(self, torchs_step: Callable[[Optimizer], object]) -> None:
        """Let torch step the parameters without codes; those in half precision as float32, with float32 state."""
        groups, state = self.param_groups, self.state
        plain = [p for p in parameters_of(self) if msamp_state_of(p) is None and p.grad is not None]
        shown = {p: p.float() if p.dtype in HALF_DTYPES else p for p in plain}
        for p, values in shown.items():
            if values is not p:
                values.grad = p.grad.float()  # type: ignore[union-attr]
        members = [[shown[p] for p in group["params"] if p in shown] for group in groups]
        self.param_groups = [{**g, "params": own} for g, own in zip(groups, members, strict=True) if own]
        self.state = defaultdict(dict, {shown[p]: state[p] for p in plain if p in state})
        try:
            torchs_step(self)
        finally:
            state.update((p, self.state[values]) for p, values in shown.items() if values in self.state)
            self.param_groups, self.state = groups, state
        half = [p for p in plain if p is not shown[p]]
        copy_all_(half, [shown[p] for p in half])

    def _alike(self, params: Iterable[Tensor]) -> list[list[Tensor]]:
        """Return the parameters of codes that have gradients, in lists whose parameters may step together."""

        def kind(p: Tensor) -> tuple[Any, ...]:
            state = self.state[p]
            shards = required_state_of(p).shards
            return p.device, shards, isinstance(p.grad, ScaledGradient), state.get("step", 0), *state

        coded = [p for p in params if msamp_state_of(p) is not None and p.grad is not None and p.numel()]
        return grouped(coded, kind)

    def _step_codes(self, group: dict[str, Any], params: list[Tensor]) -> None:
        moments = self._moments()
        numbers = self._numbers(group, self.state[params[0]])
        states = [self._state_of(p, moments) for p in params]
        for state in states:
            state["step"] += 1
        formats = {name: None if self.level == "O1" else format for name, format in moments.items()}
        rounding = self._random_bits(params, states[0]["step"]) if self.stochastic_rounding else None
        compile = compiles(params[0].device) if self.compile == "auto" else self.compile
        step_codes(params, states, formats, self._update_flat, numbers, rounding, compile=compile)

    def _random_bits(self, params: list[Tensor], step: int) -> tuple[Tensor, list[Tensor]]:
        """Return the keys of the random bits of a step, and the place of each parameter, as ``bits_at`` takes them.

        No two elements of all shards share bits.
        """
        every, shards = parameters_of(self), required_state_of(params[0]).shards
        *starts, total = accumulate((aligned(p.numel()) for p in every), initial=0)
        start_of = dict(zip(every, starts, strict=True))
        of_rank = 0 if shards is None else dist.get_rank(shards) * total
        keys: list[tuple[int, int]] = []
        places: list[tuple[int, int]] = []
        for chunk in chunks(params, _CHUNK):
            sizes = [aligned(codes_of(p).numel()) for p in chunk]
            places += [(offset, len(keys)) for offset in accumulate(sizes[:-1], initial=0)]
            keys += keys_of_bits(sum(sizes), self.seed, step, start_of[chunk[0]] + of_rank)
        device = params[0].device
        flat = tensor_on(device, list(chain(*keys)), torch.int32), tensor_on(device, list(chain(*places)), torch.int64)
        return flat[0].view(-1, 2), list(flat[1].view(-1, 2).unbind())

    # ---- state

    @override
    def __getstate__(self) -> dict[str, object]:
        state = {p: _viewed(entry, E4M3.dtype, torch.uint8) for p, entry in self.state.items()}  # pickle has no float8
        options = {name: getattr(self, name) for name in OPTIONS}
        return {**super().__getstate__(), "state": state, **options}

    @override
    def __setstate__(self, state: dict[str, object]) -> None:
        Optimizer.__setstate__(self, state)  # Adam's would make tensors of the step counts
        _alive.add(self)
        self.state = defaultdict(dict, self.state)
        for p, entry in self.state.items():
            self.state[p] = _viewed(entry, torch.uint8, E4M3.dtype)
        for group in self.param_groups:
            group.update({**self.defaults, **group})

    def _state_of(self, p: Tensor, moments: Mapping[str, Format]) -> dict[str, Any]:
        """Return the state of ``p``; missing moments start at zero."""
        state: dict[str, object] = self.state[p]
        coded = msamp_state_of(p) is not None
        scaled = coded and self.level != "O1"
        if coded:
            state.setdefault("step", 0)
        for key in [key for key in moments if key not in state]:
            dtype = moments[key].dtype if scaled else torch.promote_types(p.dtype, torch.float32)
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

        (torch's own loading casts every tensor to the dtype of its parameter, which would round values to codes.)
        """
        super().load_state_dict(state_dict)
        for key, p in params_by_key(self, state_dict).items():
            if key in state_dict["state"]:
                self._load(p, decoded_entry(dict(state_dict["state"][key]), p))

    def _load(self, p: Tensor, saved: Mapping[str, Any]) -> None:
        moments = self._moments()
        others = sorted(saved.keys() - {"step", MASTER_PARAM, MASTER_REMAINDER, *moments})
        if others and not moments.keys() & saved.keys():
            raise ValueError(
                f"the state holds {', '.join(others)}; expected that of an optimizer with {', '.join(moments)}."
            )
        weight = msamp_state_of(p)
        loaded = {key: format for key, format in moments.items() if saved.get(key) is not None}
        by_torch = self.state.pop(p, {})
        state = self._state_of(p, loaded)
        if "step" in saved:  # torch has put the step of a fused optimizer on the device
            state["step"] = torch.as_tensor(by_torch["step"]) if weight is None else int(saved["step"])
        for key, format in loaded.items():
            values = saved[key] if weight is None else local_tensor(saved[key]).to(p.device)
            if weight is not None and f"{key}_scale" in state:
                values, state[f"{key}_scale"] = encode(values.float(), format, weight.shards)
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
