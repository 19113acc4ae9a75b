"""A wrapped optimizer trains bit for bit as float32 masters written by hand do: every optimizer, every way to call."""

from functools import partial

import pytest
import torch
from torch import optim

from lightning_lowprec.masters.moments import MASTER_PARAM
from lightning_lowprec.masters.optimizer import add_masters
from tests.masters.master_loops import (
    by_hand,
    equal,
    masters_of,
    through_file,
    train,
    without_masters,
    wrapped,
)

OPTIMIZERS = {
    "sgd": partial(optim.SGD, lr=1e-2),
    "sgd-momentum": partial(optim.SGD, lr=1e-2, momentum=0.9, weight_decay=1e-2),
    "adamw-for": partial(optim.AdamW, lr=1e-3, foreach=False),
    "adamw-foreach": partial(optim.AdamW, lr=1e-3, foreach=True),
    "adamw-fused": partial(optim.AdamW, lr=1e-3, fused=True),
    "adagrad": partial(optim.Adagrad, lr=1e-2),
    "rmsprop": partial(optim.RMSprop, lr=1e-3, momentum=0.5, centered=True),
    "nadam": partial(optim.NAdam, lr=1e-3),
    "radam": partial(optim.RAdam, lr=1e-3),
    "adadelta": partial(optim.Adadelta, lr=1.0),
    "adamax": partial(optim.Adamax, lr=1e-3),
    "asgd": partial(optim.ASGD, lr=1e-2),
    "rprop": partial(optim.Rprop, lr=1e-3),
    "adafactor": partial(optim.Adafactor, lr=1e-2),
    "muon": partial(optim.Muon, lr=1e-3),
}
every_optimizer = pytest.mark.parametrize("name", OPTIMIZERS)
every_exact_form = pytest.mark.parametrize("form", ["fp32", "remainder"])
STEPS = 12


def check_equal(model, optimizer, reference):
    ref_model, ref_optimizer, ref_masters = reference
    assert equal(list(model.parameters()), list(ref_model.parameters()))
    assert equal(masters_of(optimizer), ref_masters)
    assert equal(without_masters(optimizer.state_dict())["state"], ref_optimizer.state_dict()["state"])


@every_exact_form
@every_optimizer
@pytest.mark.parametrize("closure", [False, True], ids=["plain", "closure"])
def test_as_by_hand(name, form, closure):
    make, bias = OPTIMIZERS[name], name != "muon"
    model, optimizer = wrapped(make, form, bias=bias)
    train(model, optimizer, range(STEPS), closure)
    check_equal(model, optimizer, by_hand(make, form, STEPS, bias=bias))


@every_exact_form
@every_optimizer
@pytest.mark.parametrize("model_first", [True, False], ids=["model-first", "optimizer-first"])
def test_resume(name, form, model_first):
    make, bias = OPTIMIZERS[name], name != "muon"
    model, optimizer = wrapped(make, form, bias=bias)
    train(model, optimizer, range(STEPS // 2))
    saved = through_file({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    model, optimizer = wrapped(make, form, bias=bias, seed=9)
    loads = [lambda: model.load_state_dict(saved["model"]), lambda: optimizer.load_state_dict(saved["optimizer"])]
    for load in loads if model_first else reversed(loads):
        load()
    train(model, optimizer, range(STEPS // 2, STEPS))
    check_equal(model, optimizer, by_hand(make, form, STEPS, bias=bias))


@pytest.mark.parametrize("name", ["sgd-momentum", "adamw-foreach"])
def test_fp16(name):
    model, optimizer = wrapped(OPTIMIZERS[name], "fp32", dtype=torch.float16)
    train(model, optimizer, range(STEPS))
    check_equal(model, optimizer, by_hand(OPTIMIZERS[name], "fp32", STEPS, dtype=torch.float16))


@pytest.mark.parametrize("first", ["fp32", "remainder"])
@pytest.mark.parametrize("second", ["fp32", "remainder"])
@pytest.mark.parametrize("model_first", [True, False])
def test_masters_carry_over_between_exact_forms_at_ties_too(first, second, model_first):
    """A master half way between two bf16: the forms round it to different weights, and agree on the master."""
    tie = (
        torch.tensor([0x3F808000, 0x3F818000, -0x407F8000 & 0xFFFFFFFF, 0x3F800001]).to(torch.int32).view(torch.float32)
    )
    p = torch.nn.Parameter(tie.bfloat16())
    optimizer = add_masters(optim.SGD([p], lr=0.0), first, values={id(p): tie})
    p.grad = torch.zeros_like(p)
    optimizer.step()
    weight, state = p.detach().clone(), through_file(optimizer.state_dict())
    q = torch.nn.Parameter(torch.randn(4).bfloat16())
    resumed = add_masters(optim.SGD([q], lr=0.0), second)
    loads = [lambda: resumed.load_state_dict(state), torch.no_grad()(lambda: q.copy_(weight))]
    for load in reversed(loads) if model_first else loads:
        load()
    q.grad = torch.zeros_like(q)
    resumed.step()
    assert torch.equal(resumed.state_dict()["state"][0][MASTER_PARAM], tie)
