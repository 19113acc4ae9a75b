"""AdamW whose weights, gradients and moments are 8 and 16 bits wide with scales: MS-AMP's O1, O2 and O3.

    scale_weight_(linear.weight, "O2")      # the weight is float16 codes from here on: read it with values_of(weight)
    optimizer = ScaledAdamW(model.parameters(), level="O2")

A step decodes to float32, updates, and encodes with a fresh amax per tensor (arXiv 2310.18313, sec. 2.2). Bytes per
scaled parameter at rest, with a scaled gradient (1 byte): O1 11, O2 6, O3 7; AdamW in float32: 16.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any, Final, final

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer
from torch.optim.adamw import adamw
from typing_extensions import override

from lightning_lowprec.formats import E4M3, FP16, Format
from lightning_lowprec.optim.scaled_shelf import Shelf, Step
from lightning_lowprec.optim.scaled_weight import LEVELS, Level, encode, scaled_of

_CHUNK: Final = 1 << 24  # elements that step together: 64 MiB for each of the flat float32 buffers
_SHELVES: Final = 256  # remembered combinations of parameters that stepped together
_MOMENTS: Final[dict[str, Format]] = {"exp_avg": E4M3, "exp_avg_sq": FP16}


@final
class ScaledAdamW(Optimizer):
    """AdamW for parameters of codes (see :func:`~lightning_lowprec.optim.scaled_weight.scale_weight_`) and plain ones.

    Plain parameters get torch's AdamW, bit for bit; in half precision with float32 moments and a float32 update.
    The gradient of a parameter of codes is scaled too, or any float32 tensor.

    Args:
        params: parameters or groups, as in any torch optimizer.
        lr: learning rate.
        betas: decay of the two moments.
        eps: added to the root of the second moment.
        weight_decay: decoupled.
        level: "O1" keeps float32 moments; "O2" and "O3" keep float8_e4m3fn and float16 ones, each with a scale.
        stochastic_rounding: of the float16 master, so that updates below half a step move it on average. The random
            bits are a function of ``seed``, the step and the position: equal on every replica, nothing to save.
        seed: of the stochastic rounding.

    Raises:
        ValueError: an argument out of range, or a parameter scaled for another level.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        level: Level = "O2",
        stochastic_rounding: bool = False,
        seed: int = 0,
    ) -> None:
        if level not in LEVELS:
            raise ValueError(f"`level={level!r}` is not valid; expected one of: {', '.join(LEVELS)}.")
        for name, value in {"lr": lr, "eps": eps, "weight_decay": weight_decay}.items():
            if not value >= 0:
                raise ValueError(f"`{name}={value!r}` is not valid; expected 0 or more.")
        if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"`betas={betas!r}` is not valid; expected two numbers in [0, 1).")
        self.level, self.stochastic_rounding, self.seed = level, stochastic_rounding, seed
        self._shelves: dict[tuple[int, ...], Shelf] = {}
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @override
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        for p in self.param_groups[-1]["params"]:
            scaled = scaled_of(p)
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
        starts = self._starts() if self.stochastic_rounding else {}
        for group in self.param_groups:
            self._step_plain(group, [p for p in group["params"] if scaled_of(p) is None and p.grad is not None])
            for params in self._together(group["params"]):
                self._step_scaled(group, params, starts.get(id(params[0]), 0))
        return loss

    def _step_scaled(self, group: dict[str, Any], params: list[Tensor], start: int) -> None:
        states = [self.state[p] for p in params]
        for state in states:
            state["step"] += 1
        step = Step(
            number=states[0]["step"],
            lr=float(group["lr"]),
            betas=group["betas"],
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            seed=self.seed if self.stochastic_rounding else None,
            start=start,
        )
        self._shelf(params).update([p.scaled for p in params], states, step)  # type: ignore[attr-defined]

    def _step_plain(self, group: dict[str, Any], params: list[Tensor]) -> None:
        if not params:
            return
        states = [self._state_of(p) for p in params]
        weights = [p.float() for p in params]  # the parameter itself if it is float32
        adamw(
            weights,
            [g.float() for g in (p.grad for p in params) if g is not None],
            [s["exp_avg"] for s in states],
            [s["exp_avg_sq"] for s in states],
            [],
            [s["step"] for s in states],
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
        half = [(p, weight) for p, weight in zip(params, weights, strict=True) if p is not weight]
        if half:
            torch._foreach_copy_([p for p, _ in half], [weight for _, weight in half])

    def _together(self, params: Iterable[Tensor]) -> Iterator[list[Tensor]]:
        """Parameters of codes with a gradient, in lists of one kind and of at most ``_CHUNK`` elements."""
        kinds: dict[Any, list[Tensor]] = {}
        for p in params:
            scaled = scaled_of(p)
            if scaled is None or (scaled.grad is None and p.grad is None) or not p.numel():
                continue
            kind = p.device, self._state_of(p)["step"], scaled.grad is None
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

    def _shelf(self, params: list[Tensor]) -> Shelf:
        key = tuple(map(id, params))
        if key not in self._shelves:
            if len(self._shelves) >= _SHELVES:
                self._shelves.clear()
            self._shelves[key] = Shelf(params)  # holds the parameters, so their ids stay theirs
        return self._shelves[key]

    def _starts(self) -> dict[int, int]:
        starts, total = {}, 0
        for p in chain.from_iterable(group["params"] for group in self.param_groups):
            starts[id(p)] = total
            total += -(-p.numel() // 8) * 8  # as flat buffers align them
        return starts

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
        own: dict[str, Any] = {name: getattr(self, name) for name in ("level", "stochastic_rounding", "seed")}
        return {**super().__getstate__(), **own, "_shelves": {}}

    def _state_of(self, p: Tensor) -> dict[str, Any]:
        state: dict[str, Any] = self.state[p]
        if state:
            return state
        scaled = scaled_of(p)
        # a number where we step, a tensor where torch's function does
        state["step"] = torch.zeros((), dtype=torch.float32) if scaled is None else 0
        for key, format in _MOMENTS.items():
            coded = scaled is not None and self.level != "O1"
            state[key] = torch.zeros_like(p, dtype=format.dtype if coded else torch.float32)
            if coded:
                state[f"{key}_scale"] = torch.ones((), device=p.device)
        if scaled is not None and scaled.master is not None:
            state["master"], state["master_scale"] = scaled.master, scaled.master_scale
        return state

    @override
    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Bit-exact; a state of another level, or of ``torch.optim.AdamW``, is recoded with fresh scales.

        (torch's own casts every tensor to the parameter's dtype, which rounds codes.)
        """
        super().load_state_dict(state_dict)
        saved = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        params = chain.from_iterable(group["params"] for group in self.param_groups)
        for name, p in zip(saved, params, strict=True):
            if name in state_dict["state"]:
                self._load(p, state_dict["state"][name])

    def _load(self, p: Tensor, saved: dict[str, Any]) -> None:
        scaled = scaled_of(p)
        self.state[p] = {}
        state = self._state_of(p)
        state["step"] = torch.as_tensor(float(saved["step"])) if scaled is None else int(saved["step"])
        for key, format in _MOMENTS.items():
            value, scale = saved[key], saved.get(f"{key}_scale")
            if f"{key}_scale" not in state:
                state[key].copy_(value if scale is None else value.float() / scale)
            elif scale is not None and value.dtype == format.dtype:
                state[key].copy_(value)
                state[f"{key}_scale"].copy_(scale)
            else:
                codes, fresh = encode(value.float() if scale is None else value.float() / scale, format)
                state[key].copy_(codes)
                state[f"{key}_scale"].copy_(fresh)
        if scaled is not None and scaled.master is not None and "master" in saved:
            scaled.master.copy_(saved["master"])
            assert scaled.master_scale is not None
            scaled.master_scale.copy_(saved["master_scale"])
