"""The common part of ScaledAdamW and ScaledSGD: which parameters step together, state, state dicts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypedDict

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_lowprec.checks import check_choice
from lightning_lowprec.masters.optimizer import MASTER_PARAM
from lightning_lowprec.msamp.flat_step import FlatStep, Rounding, Rule
from lightning_lowprec.msamp.gradient import ScaledGradient
from lightning_lowprec.msamp.weight import (
    LEVELS,
    Level,
    codes_of,
    encode,
    master_of,
    msamp_state_of,
    required_state_of,
    set_master_,
    sharded_like,
)
from lightning_lowprec.numerics.flat import local
from lightning_lowprec.numerics.formats import Format
from lightning_lowprec.numerics.parameters import parameters_of
from lightning_lowprec.private.torch import copy_all_, noted_by_schedulers

_CHUNK: Final = 1 << 24  # elements that step together: 64 MiB for each of the flat float32 buffers
_NO_MOMENTS: Final = ("step", "master", "master_scale", MASTER_PARAM)
_MAX_FLAT_STEPS: Final = 256  # remembered combinations of parameters that stepped together


@dataclass(frozen=True, kw_only=True)
class ScaledOptions:
    """The options that ScaledAdamW and ScaledSGD share.

    Args:
        level: the level of the parameters of codes. Moments are float32 at "O1"; at "O2" and "O3" they are codes, each
            with a scale.
        stochastic_rounding: round float16 weights (at O3: masters) stochastically, so that updates below half a step
            move them on average. The random bits are a function of ``seed``, the step and the position: equal on all
            replicas, nothing to save.
        seed: of the stochastic rounding.
        compile: update the parameters of codes by two fused kernels per device and step (``torch.compile``).
    """

    level: Level = "O2"
    stochastic_rounding: bool = False
    seed: int = 0
    compile: bool = False

    def __post_init__(self) -> None:
        """Check the level."""
        check_choice("level", self.level, LEVELS)


class ScaledChoices(TypedDict, total=False):
    """The fields of :class:`ScaledOptions`, for type checkers."""

    level: Level
    stochastic_rounding: bool
    seed: int
    compile: bool


class ScaledOptimizer(Optimizer):
    """Abstract: a subclass says which moments there are and how a step updates plain parameters and those of codes."""

    level: Level
    stochastic_rounding: bool
    seed: int
    compile = False
    _flat_steps: dict[tuple[int, ...], FlatStep]

    def __init__(self, params: Iterable[Any], defaults: dict[str, Any], options: ScaledOptions) -> None:
        vars(self).update(vars(options), _flat_steps={})
        super().__init__(params, defaults)

    # ---- for subclasses

    def _moments(self, group: Mapping[str, Any]) -> Mapping[str, Format]:
        """Return the moments that a step of ``group`` needs, with their formats at O2 and O3."""
        raise NotImplementedError

    def _rule(self, group: Mapping[str, Any], state: Mapping[str, Any]) -> Rule:
        """Return the rule of the next step, for parameters whose state after the last step is like ``state``."""
        raise NotImplementedError

    def _update_plain(
        self, group: dict[str, Any], params: list[Tensor], weights: list[Tensor], grads: list[Tensor]
    ) -> None:
        """Update the float32 ``weights`` of plain parameters (at least one) in place by their float32 gradients."""
        raise NotImplementedError

    # ---- the step

    @override
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        for p in self.param_groups[-1]["params"]:
            weight = msamp_state_of(p)
            if weight is not None and (weight.master is not None) != (self.level == "O3"):
                raise ValueError(f"`level={self.level!r}` is not valid for a parameter of {p.dtype} codes.")

    @override
    @noted_by_schedulers
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step once; parameters without a gradient stay unchanged."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            plain = [p for p in group["params"] if msamp_state_of(p) is None and p.grad is not None]
            if plain:
                weights = [p.float() for p in plain]  # the parameter itself if it is float32
                self._update_plain(group, plain, weights, [p.grad.float() for p in plain])
                half = [(p, weight) for p, weight in zip(plain, weights, strict=True) if p is not weight]
                copy_all_([p for p, _ in half], [weight for _, weight in half])
            for params in self._chunks(group["params"]):
                self._step_codes(group, params)
        return loss

    def _step_codes(self, group: dict[str, Any], params: list[Tensor]) -> None:
        moments = self._moments(group)
        rule = self._rule(group, self.state[params[0]])
        states = [self._state_of(p, moments) for p in params]
        for state in states:
            state["step"] += 1
        rounding = self._rounding(params[0], states[0]["step"]) if self.stochastic_rounding else None
        self._flat_step(params, moments).update(states, rule, rounding)

    def _rounding(self, first: Tensor, step: int) -> Rounding:
        """Return the random bits of ``first`` and the parameters after it: no two elements of all shards share bits."""
        shards = required_state_of(first).shards
        start = total = 0
        for p in parameters_of(self):
            if p is first:
                start = total
            total += -(-p.numel() // 8) * 8  # as flat buffers align them
        return Rounding(seed=self.seed, step=step, start=start + (0 if shards is None else shards.rank * total))

    def _chunks(self, params: Iterable[Tensor]) -> Iterator[list[Tensor]]:
        """Yield the parameters of codes that have gradients, in lists of one kind and at most ``_CHUNK`` elements."""
        kinds: dict[Any, list[Tensor]] = {}
        for p in params:
            weight = msamp_state_of(p)
            if weight is None or p.grad is None or not p.numel():
                continue
            state = self.state[p]
            kind = p.device, weight.shards, isinstance(p.grad, ScaledGradient), state.get("step", 0), *state
            kinds.setdefault(kind, []).append(p)
        for members in kinds.values():
            chunk: list[Tensor] = []
            room = _CHUNK
            for p in members:
                if chunk and p.numel() > room:
                    yield chunk
                    chunk, room = [], _CHUNK
                chunk.append(p)
                room -= p.numel()
            yield chunk

    def _flat_step(self, params: list[Tensor], moments: Mapping[str, Format]) -> FlatStep:
        key = (self.compile, len(moments), *map(id, params))
        if key not in self._flat_steps:
            if len(self._flat_steps) >= _MAX_FLAT_STEPS:
                self._flat_steps.clear()
            formats = {name: None if self.level == "O1" else format for name, format in moments.items()}
            self._flat_steps[key] = FlatStep(params, formats, self.compile)  # keeps the parameters, so ids stay theirs
        return self._flat_steps[key]

    # ---- state

    @override
    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes that deepcopy and pickle keep."""
        options = {name: getattr(self, name) for name in ScaledChoices.__annotations__}
        return {**super().__getstate__(), **options, "_flat_steps": {}}

    def _state_of(self, p: Tensor, moments: Mapping[str, Format]) -> dict[str, Any]:
        """Return the state of ``p``; missing moments start at zero."""
        state: dict[str, Any] = self.state[p]
        weight = msamp_state_of(p)
        if weight is not None:
            state.setdefault("step", 0)
        coded = weight is not None and self.level != "O1"
        for key, format in moments.items():
            if key in state:
                continue
            state[key] = torch.zeros_like(codes_of(p), dtype=format.dtype if coded else torch.float32)
            if coded:
                state[f"{key}_scale"] = torch.ones((), device=p.device)
        if weight is not None and weight.master is not None:
            state["master"], state["master_scale"] = weight.master, weight.master_scale
        return state

    def _saves_values(self, p: Tensor) -> bool:
        """Whether the state dict has the values of the moments of ``p`` in float32, instead of codes and scales."""
        weight = msamp_state_of(p)
        return weight is not None and weight.shards is not None

    @override
    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """Return torch's state dict; sharded parameters have float32 DTensors, which fit any number of ranks."""
        state_dict = super().state_dict()
        state = {}
        for key, p in zip(_keys(state_dict), parameters_of(self), strict=True):
            if key in state_dict["state"]:
                entry = state_dict["state"][key]
                state[key] = _with_values(entry, p) if self._saves_values(p) else entry
        return {**state_dict, "state": state}

    @override
    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict bit for bit. Codes of another level, or torch's float32 moments, get fresh scales.

        (torch's own loading casts every tensor to the dtype of its parameter, which would round codes.)
        """
        super().load_state_dict(state_dict)
        params = [(group, p) for group in self.param_groups for p in group["params"]]
        for key, (group, p) in zip(_keys(state_dict), params, strict=True):
            if key in state_dict["state"]:
                self._load(p, state_dict["state"][key], self._moments(group))

    def _load(self, p: Tensor, saved: Mapping[str, Any], moments: Mapping[str, Format]) -> None:
        others = sorted(saved.keys() - {*_NO_MOMENTS, *moments})
        if moments and others and not moments.keys() & saved.keys():
            raise ValueError(
                f"the state holds {', '.join(others)}; expected that of an optimizer with {', '.join(moments)}."
            )
        weight = msamp_state_of(p)
        loaded = {key: format for key, format in moments.items() if saved.get(key) is not None}
        self.state[p] = {}
        state = self._state_of(p, loaded)
        if weight is not None:
            state["step"] = int(saved.get("step", 0))
        elif "step" in saved:
            state["step"] = torch.as_tensor(float(saved["step"]))
        for key, format in loaded.items():
            codes, scale = saved[key] if weight is None else local(saved[key]), saved.get(f"{key}_scale")
            if f"{key}_scale" not in state:
                state[key].copy_(codes if scale is None else codes.float() / scale)
                continue
            if scale is None or codes.dtype != format.dtype:
                values = codes.float() if scale is None else codes.float() / scale
                codes, scale = encode(values, format, None if weight is None else weight.shards)
            state[key].copy_(codes)
            state[f"{key}_scale"].copy_(scale)
        if "master" in state and "master" in saved:
            state["master"].copy_(local(saved["master"]))
            state["master_scale"].copy_(saved["master_scale"])
        elif MASTER_PARAM in saved:
            set_master_(p, saved[MASTER_PARAM])


def _keys(state_dict: Mapping[str, Any]) -> list[Any]:
    """Return the keys of the parameters in a state dict, in the order of the parameters."""
    return [key for group in state_dict["param_groups"] for key in group["params"]]


def _with_values(entry: Mapping[str, Any], p: Tensor) -> dict[str, Any]:
    """Return the state of one parameter with float32 values instead of codes and scales."""
    values = {"step": entry["step"]} if "step" in entry else {}  # first, as in torch's optimizers
    for key, value in entry.items():
        scale = entry.get(f"{key}_scale")
        if key != "master" and not key.endswith("_scale"):
            values[key] = value if scale is None else sharded_like(value.float() / scale, p)
    master = master_of(p)
    return values if master is None else {**values, MASTER_PARAM: master}


def check_at_least_zero(**values: float) -> None:
    """Raise ValueError for a number that is negative or NaN."""
    for name, value in values.items():
        if not value >= 0:
            raise ValueError(f"`{name}={value!r}` is not valid; expected 0 or more.")
