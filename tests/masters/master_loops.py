"""Training loops with float32 masters written by hand: what wrapped optimizers are compared with, bit for bit."""

import io
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn, optim

from lightning_lowprec.masters.optimizer import add_masters
from lightning_lowprec.masters.weights import cast_parameters

EXACT = ["fp32", "remainder"]
FORMS = [*EXACT, "stochastic"]
every_form = pytest.mark.parametrize("form", FORMS)
every_exact_form = pytest.mark.parametrize("form", EXACT)
ADAMW = partial(optim.AdamW, lr=1e-3)
SGD = partial(optim.SGD, lr=1e-2, momentum=0.9)
X = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))
Y = torch.randn(64, 96, generator=torch.Generator().manual_seed(2))
WIDE = (64, 64, 96)  # weights of 4,096 numbers and more, whose moments are coded


def net(seed: int = 0, bias: bool = True, sizes: tuple[int, int, int] = (12, 16, 6)) -> nn.Module:
    torch.manual_seed(seed)
    width, hidden, out = sizes
    return nn.Sequential(nn.Linear(width, hidden, bias=bias), nn.Tanh(), nn.Linear(hidden, out, bias=bias))


def two_groups(params):
    *first, last = params
    return optim.AdamW([{"params": first}, {"params": [last], "weight_decay": 0.0}], lr=1e-2)


def half(*values: float) -> nn.Parameter:
    return nn.Parameter(torch.tensor(values).bfloat16())


def step(optimizer: Any, *params: nn.Parameter, grad: float = 0.0) -> None:
    for p in params:
        p.grad = torch.full_like(p, grad)
    optimizer.step()


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    rows = slice(16 * (step % 4), 16 * (step % 4) + 16)
    first, _, last = model
    x, y = (data[rows, :size].to(first.weight.dtype) for data, size in ((X, first.in_features), (Y, last.out_features)))
    return (model(x) - y).float().pow(2).mean()


ROUNDING = {  # the second one to bf16, ties away from zero
    "fp32": torch.Tensor.to,
    "remainder": lambda master, dtype: ((master.view(torch.int32) + 0x8000) >> 16).to(torch.int16).view(dtype),
}


def by_hand(make: Any, form: str, steps: int, dtype: torch.dtype = torch.bfloat16, bias: bool = True):
    """float32 copies, trained by the stock optimizer on the half gradients; the weights are their casts."""
    model = net(bias=bias)
    masters = [p.detach().clone() for p in model.parameters()]
    model.to(dtype)
    optimizer = make(masters)
    for step in range(steps):
        model.zero_grad()
        loss_of(model, step).backward()
        for master, p in zip(masters, model.parameters(), strict=True):
            master.grad = p.grad.float()
        optimizer.step()
        with torch.no_grad():
            for master, p in zip(masters, model.parameters(), strict=True):
                p.copy_(ROUNDING[form](master, dtype))
    return model, optimizer, masters


def wrapped(make: Any, form: Any, dtype: torch.dtype = torch.bfloat16, **of_net: Any):
    model = net(**of_net)
    originals = cast_parameters(model, dtype, keep=True)
    return model, add_masters(make(model.parameters()), form, values=originals)


def train(model: nn.Module, optimizer: Any, steps: range, closure: bool = False) -> None:
    for step in steps:

        def evaluate(step=step):
            optimizer.zero_grad()
            loss = loss_of(model, step)
            loss.backward()
            return loss

        if closure:
            with torch.no_grad():  # which the step lifts for its closure, as torch's does
                optimizer.step(evaluate)
        else:
            evaluate()
            optimizer.step()


def masters_of(optimizer: Any) -> list[torch.Tensor]:
    state = optimizer.state_dict()["state"]
    return [state[i]["master_param"].clone() for i in sorted(state)]


def without_masters(state_dict: dict[str, Any]) -> dict[str, Any]:
    state = {key: {k: v for k, v in entry.items() if k != "master_param"} for key, entry in state_dict["state"].items()}
    return {**state_dict, "state": {key: entry for key, entry in state.items() if entry}}


def buffers_of(optimizer: Any) -> list[torch.Tensor]:
    """The flat tensors that hold masters, of which some have no memory between steps."""
    if not hasattr(optimizer, "_masters"):
        return []
    stores = optimizer._masters.stores
    return [*(store.remainder for store in stores if hasattr(store, "remainder")), *(s.flat for s in stores)]


def through_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def equal(left: Any, right: Any) -> bool:
    """Whether two nests of dicts, lists and tensors are equal, tensors bit for bit and in dtype."""
    if isinstance(left, torch.Tensor):
        return isinstance(right, torch.Tensor) and left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(equal(left[k], right[k]) for k in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(equal, left, right))
    return bool(left == right)
