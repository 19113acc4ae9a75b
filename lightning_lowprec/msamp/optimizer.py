"""What the optimizers for parameters of codes share: which parameters step together, gradients, state, resume."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer
from typing_extensions import override

from lightning_lowprec.masters.optimizer import MASTER_PARAM
from lightning_lowprec.msamp.flat_step import FlatStep, Rounding, Rule
from lightning_lowprec.msamp.weight import (
    LEVELS,
    Level,
    Shards,
    codes_of,
    encode,
    master_of,
    msamp_state_of,
    set_master_,
)
from lightning_lowprec.numerics.flat import local
from lightning_lowprec.numerics.formats import Format

_CHUNK: Final = 1 << 24  # elements that step together: 64 MiB for each of the flat float32 buffers
_OPTIONS: Final = ("level", "stochastic_rounding", "seed", "compile")
_NO_MOMENTS: Final = ("step", "master", "master_scale", MASTER_PARAM)
_MAX_FLAT_STEPS: Final = 256  # remembered combinations of parameters that stepped together


class ScaledOptimizer(Optimizer):
    """Abstract: a subclass says what moments there are, and what a step does to plain and to scaled parameters."""

    compile = False

    def __init__(
        self,
        params: Iterable[Any],
        defaults: dict[str, Any],
        level: Level,
        stochastic_rounding: bool,
        seed: int,
        compile: bool,
    ) -> None:
        if level not in LEVELS:
            raise ValueError(f"`level={level!r}` is not valid; expected one of: {', '.join(LEVELS)}.")
        self.level, self.stochastic_rounding, self.seed, self.compile = level, stochastic_rounding, seed, compile
        self._flat_steps: dict[tuple[int, ...], FlatStep] = {}
        super().__init__(params, defaults)

    # ---- what a subclass says

    def _moments(self, group: Mapping[str, Any]) -> Mapping[str, Format]:
        """The moments that a step of ``group`` needs, with the formats of those that have a scale at O2 and O3."""
        raise NotImplementedError

    def _rule(self, group: Mapping[str, Any], state: Mapping[str, Any]) -> Rule:
        """The next step of parameters that all have a ``state`` like this one, which is still that of the last."""
        raise NotImplementedError

    def _step_plain(self, group: dict[str, Any], params: list[Tensor]) -> None:
        """Update plain parameters, at least one, which have gradients."""
        raise NotImplementedError

    # ---- the step

    @override
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        for p in self.param_groups[-1]["params"]:
            scaled = msamp_state_of(p)
            if scaled is not None and (scaled.master is not None) != (self.level == "O3"):
                raise ValueError(f"`level={self.level!r}` is not valid for a parameter of {p.dtype} codes.")

    @override
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step; parameters without a gradient stay as they are."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        starts = self._numbering()[0] if self.stochastic_rounding else {}
        for group in self.param_groups:
            plain = [p for p in group["params"] if msamp_state_of(p) is None and p.grad is not None]
            if plain:
                self._step_plain(group, plain)
            for params in self._together(group["params"]):
                self._step_scaled(group, params, starts.get(id(params[0]), 0))
        return loss

    def _step_scaled(self, group: dict[str, Any], params: list[Tensor], start: int) -> None:
        moments = self._moments(group)
        rule = self._rule(group, self.state[params[0]])
        states = [self._state_of(p, moments) for p in params]
        for state in states:
            state["step"] += 1
        scaled = [p.msamp_state for p in params]  # type: ignore[attr-defined]
        rounded = None
        if self.stochastic_rounding:
            shards = scaled[0].shards
            start += 0 if shards is None else shards.rank * self._numbering()[1]
            rounded = Rounding(seed=self.seed, step=states[0]["step"], start=start)
        self._flat_step(params, moments).update(scaled, states, rule, rounded)

    def _together(self, params: Iterable[Tensor]) -> Iterator[list[Tensor]]:
        """Parameters of codes with a gradient, in lists of one kind and of at most ``_CHUNK`` elements."""
        kinds: dict[Any, list[Tensor]] = {}
        for p in params:
            scaled = msamp_state_of(p)
            if scaled is None or (scaled.grad is None and p.grad is None) or not p.numel():
                continue
            state = self.state[p]
            kind = p.device, scaled.shards, scaled.grad is None, state.get("step", 0), *state
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
            formats = {key: None if self.level == "O1" else format for key, format in moments.items()}
            shards = msamp_state_of(params[0]).shards  # type: ignore[union-attr]
            self._flat_steps[key] = FlatStep(
                params, formats, self.compile, shards
            )  # holds them, so their ids stay theirs
        return self._flat_steps[key]

    def _numbering(self) -> tuple[dict[int, int], int]:
        """Of all elements: where those of each parameter start, by its id; and how many there are."""
        starts, total = {}, 0
        for p in chain.from_iterable(group["params"] for group in self.param_groups):
            starts[id(p)] = total
            total += -(-p.numel() // 8) * 8  # as flat buffers align them
        return starts, total

    # ---- gradients

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale all gradients to a 2-norm of at most ``max_norm``; of scaled ones only the scale changes.

        Returns:
            The norm before, scalar float32; this is ``torch.nn.utils.clip_grad_norm_``, which will do as well.
        """
        return clip_grad_norm_([p for group in self.param_groups for p in group["params"]], max_norm)

    # ---- state

    @override
    def __getstate__(self) -> dict[str, Any]:
        """What deepcopy and pickle keep."""
        own: dict[str, Any] = {name: getattr(self, name) for name in _OPTIONS}
        return {**super().__getstate__(), **own, "_flat_steps": {}}

    def _state_of(self, p: Tensor, moments: Mapping[str, Format]) -> dict[str, Any]:
        """The state of ``p``; what is not there yet starts at zero."""
        state: dict[str, Any] = self.state[p]
        scaled = msamp_state_of(p)
        if scaled is not None:
            state.setdefault("step", 0)
        for key, format in moments.items():
            if key in state:
                continue
            coded = scaled is not None and self.level != "O1"
            state[key] = torch.zeros_like(codes_of(p), dtype=format.dtype if coded else torch.float32)
            if coded:
                state[f"{key}_scale"] = torch.ones((), device=p.device)
        if scaled is not None and scaled.master is not None:
            state["master"], state["master_scale"] = scaled.master, scaled.master_scale
        return state

    @override
    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """As torch's; of sharded parameters the values, sharded float32 tensors, which fit any number of ranks."""
        state_dict = super().state_dict()
        state = dict(state_dict["state"])
        names = [name for group in state_dict["param_groups"] for name in group["params"]]
        params = [p for group in self.param_groups for p in group["params"]]
        for name, p in zip(names, params, strict=True):
            scaled = msamp_state_of(p)
            if name in state and scaled is not None and scaled.shards is not None:
                state[name] = _values(state[name], p, scaled.shards)
        return {**state_dict, "state": state}

    @override
    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Bit-exact; a state of another level, or of torch's optimizer of the kind, is recoded with fresh scales.

        (torch's own casts every tensor to the parameter's dtype, which rounds codes.)
        """
        super().load_state_dict(state_dict)
        saved = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        params = [(group, p) for group in self.param_groups for p in group["params"]]
        for name, (group, p) in zip(saved, params, strict=True):
            if name in state_dict["state"]:
                self._load(p, state_dict["state"][name], self._moments(group))

    def _load(self, p: Tensor, saved: Mapping[str, Any], moments: Mapping[str, Format]) -> None:
        scaled = msamp_state_of(p)
        others = sorted(saved.keys() - {*_NO_MOMENTS, *moments})
        if moments and others and not moments.keys() & saved.keys():
            raise ValueError(
                f"the state holds {', '.join(others)}; expected that of an optimizer with {', '.join(moments)}."
            )
        self.state[p] = {}
        state = self._state_of(p, {key: format for key, format in moments.items() if saved.get(key) is not None})
        if scaled is not None:
            state["step"] = int(saved.get("step", 0))
        elif "step" in saved:
            state["step"] = torch.as_tensor(float(saved["step"]))
        for key, format in moments.items():
            if key not in state:
                continue
            value, scale = local(saved[key]) if scaled is not None else saved[key], saved.get(f"{key}_scale")
            if f"{key}_scale" not in state:
                state[key].copy_(value if scale is None else value.float() / scale)
            elif scale is not None and value.dtype == format.dtype:
                state[key].copy_(value)
                state[f"{key}_scale"].copy_(scale)
            else:
                values = value.float() if scale is None else value.float() / scale
                codes, fresh = encode(values, format, None if scaled is None else scaled.shards)
                state[key].copy_(codes)
                state[f"{key}_scale"].copy_(fresh)
        if scaled is not None and scaled.master is not None and "master" in saved:
            scaled.master.copy_(local(saved["master"]))
            assert scaled.master_scale is not None
            scaled.master_scale.copy_(saved["master_scale"])
        elif MASTER_PARAM in saved:
            set_master_(p, saved[MASTER_PARAM])


def _values(state: Mapping[str, Any], p: Tensor, shards: Shards) -> dict[str, Any]:
    """What the codes of one sharded parameter's state are worth."""
    values: dict[str, Any] = {"step": state["step"]}
    for key, value in state.items():
        if f"{key}_scale" in state and key != "master":
            values[key] = shards.like(value.float() / state[f"{key}_scale"], p)
    master = master_of(p)
    return values if master is None else {**values, MASTER_PARAM: master}


def check_at_least_zero(**values: float) -> None:
    """Raise ValueError for a number that is negative or NaN."""
    for name, value in values.items():
        if not value >= 0:
            raise ValueError(f"`{name}={value!r}` is not valid; expected 0 or more.")


def write_back(params: list[Tensor], weights: list[Tensor]) -> None:
    """Round float32 weights into the parameters that they are copies of; others are the parameters themselves."""
    half = [(p, weight) for p, weight in zip(params, weights, strict=True) if p is not weight]
    if half:
        torch._foreach_copy_([p for p, _ in half], [weight for _, weight in half])
