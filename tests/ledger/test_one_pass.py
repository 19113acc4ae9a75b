"""The step of an optimizer with masters: bytes per parameter, launches, memory, and no wait for the GPU."""

import gc
import subprocess
import sys
from collections import Counter

import pytest
import torch
from torch import nn, optim

from benchmarks.ledger import own_moved
from benchmarks.ledger.recorder import recording
from lightning_lowprec.masters import registry
from lightning_lowprec.masters import step as masters_step
from lightning_lowprec.masters.optimizer import add_masters
from tests.ledger.budgets import OPTIMIZER_CALLS, OPTIMIZER_CALLS_IN_C

FORMS = ("fp32", "remainder", "stochastic")
SHAPES = [(64 * i, 512) for i in range(1, 11)] + [(512,), (1000,)]
COUNT = 200
BYTES = {"fp32": 28, "remainder": 26, "stochastic": 22}
"""AdamW: the weight is read and written (written only beside a float32 master), the gradient read, the rest both."""


def with_tensor_lr(optimizer):
    """AdamW itself compares the rate with 0, and memory has no values here."""
    optimizer.param_groups[0]["lr"] = torch.tensor(1e-3, device="cuda")
    return optimizer


KINDS = {
    "adamw": lambda p: optim.AdamW(p, lr=1e-3),
    "fused": lambda p: optim.AdamW(p, lr=1e-3, fused=True),
    "foreach": lambda p: optim.AdamW(p, lr=1e-3, foreach=True),
    "capturable": lambda p: optim.AdamW(p, lr=1e-3, capturable=True),
    "tensor lr": lambda p: with_tensor_lr(optim.AdamW(p, lr=1e-3, capturable=True)),
    "sgd": lambda p: optim.SGD(p, lr=1e-3, momentum=0.9),
}


def params():
    made = [SHAPES[i % len(SHAPES)] for i in range(COUNT)]
    return [nn.Parameter(torch.zeros(shape, device="cuda", dtype=torch.bfloat16)) for shape in made]


def give_gradients(parameters):
    for p in parameters:
        p.grad = torch.zeros_like(p)


def stepped(make, form, steps=2):
    gc.collect()
    torch.cuda.empty_cache()
    parameters = params()
    optimizer = add_masters(make(parameters), form)
    for _ in range(steps):
        give_gradients(parameters)
        optimizer.step()
    give_gradients(parameters)
    return parameters, optimizer


def recorded_step(optimizer, before=lambda: None):
    moved = []
    stop = own_moved.watch(lambda name, first, last, count: moved.append(count))
    try:
        with recording() as log:
            before()
            optimizer.step()
    finally:
        stop()
    return log, sum(moved)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", FORMS)
def test_few_launches_and_no_wait(form, kind):
    parameters, optimizer = stepped(KINDS[kind], form)
    log, moved = recorded_step(optimizer)
    names = [record.name for record in log.of("kernel")]
    assert names.count("step_parameters") == 1
    assert len(names) <= 40, names
    assert not log.waits()
    assert not [copy for copy in log.of("memcpy") if "pageable" in copy.info]
    assert all(p.grad is None for p in parameters)
    if kind != "sgd":
        total = sum(p.numel() for p in parameters)
        assert moved == BYTES[form] * total


@pytest.mark.parametrize("form", FORMS)
def test_clipping_reads_the_gradients_once(form):
    parameters, optimizer = stepped(KINDS["fused"], form)

    def clip():
        assert masters_step.defers(optimizer)
        masters_step.clip_by_norm(optimizer, 1.0)

    gradients = [p.grad for p in parameters]
    log, _ = recorded_step(optimizer, clip)
    names = [record.name for record in log.of("kernel")]
    assert names.count("step_parameters") == 1
    assert sum("norm" in name.lower() for name in names) >= 1
    assert len(names) <= 60, names
    assert not log.waits()
    assert all(g._version == 0 or g._version == gradients[0]._version for g in gradients), "nothing was written"


@pytest.mark.parametrize("form", OPTIMIZER_CALLS)
def test_the_host_makes_calls_per_group_and_not_per_parameter(form):
    shapes = [(64, 64), (64,)] * 32
    parameters = [nn.Parameter(torch.zeros(shape, device="cuda", dtype=torch.bfloat16)) for shape in shapes]
    optimizer = add_masters(optim.AdamW(parameters, lr=1e-3), form)
    for _ in range(4):
        give_gradients(parameters)
        seen, before = Counter(), sys.getprofile()
        sys.setprofile(lambda frame, event, _, seen=seen: seen.update([event]))
        optimizer.step()
        sys.setprofile(before)
    assert 0 < seen["call"] <= OPTIMIZER_CALLS[form]
    assert 0 < seen["call"] + seen["c_call"] <= OPTIMIZER_CALLS_IN_C[form]


def test_the_first_step_and_other_optimizers_take_memory_for_a_bucket(monkeypatch):
    """The bucket here is a tenth of the model; all masters and gradients at once would be 8 bytes per parameter."""
    for make in (lambda p: optim.AdamW(p, foreach=True), lambda p: optim.Adamax(p, foreach=True)):
        gc.collect()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        parameters = params()
        total = sum(p.numel() for p in parameters)
        monkeypatch.setattr(registry, "BUCKET", total // 10)
        optimizer = add_masters(make(parameters), "remainder")
        give_gradients(parameters)
        torch.cuda.reset_peak_memory_stats()
        optimizer.step()
        # weights, remainders, gradients and moments; of a tenth: master, gradient and torch's own three temporaries
        assert torch.cuda.max_memory_allocated() - before <= (2 + 2 + 2 + 8 + 0.15 * 20) * total


LARGE_WEIGHT = """
import torch
from lightning_lowprec.numerics import fp8_matrices
weight = torch.nn.Parameter(torch.empty(2048, 2048, device="cuda", dtype=torch.bfloat16))
print([str(t.dtype) for t in fp8_matrices.weight_codes(weight.detach(), None, visible=True)])
print(fp8_matrices.is_laid_out(weight))
"""


@pytest.mark.parametrize(("device", "layers"), [("a100", False), ("rtx4090", True)])
def test_a_gpu_whose_triton_has_no_float8_encodes_the_weight_of_a_head_alone(device, layers):
    command = [sys.executable, "-m", "benchmarks.ledger.launch", "--device", device, sys.executable, "-c", LARGE_WEIGHT]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert printed[-2:] == [str(["torch.float8_e4m3fn"] * 2 + ["torch.float32"] * 2), str(layers)]
