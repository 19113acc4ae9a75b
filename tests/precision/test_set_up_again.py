"""Optimizers, weights and layers that change or come after a set-up."""

import copy
import gc
import weakref

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_lowprec import HalfMixed
from tests.toys import ON_CPU, Task


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))


class Folds(Task):
    """Sets its two optimizers up again in the second epoch, by one of the two ways in Lightning's examples."""

    def __init__(self, way: str | None) -> None:
        super().__init__(net())
        self.way, self.automatic_optimization = way, False
        self.earlier: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD(layer.parameters(), 1e-3) for layer in self.net[::2]]

    def training_step(self, batch: torch.Tensor, batch_idx: int = 0) -> None:
        for optimizer in self.optimizers():
            self.manual_backward(super().training_step(batch))
            self.clip_gradients(optimizer, 0.01, "norm")
            optimizer.step()
            self.zero_grad()

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1 and self.way is not None:
            self.earlier.update(self.trainer.optimizers)
            if self.way == "strategy":
                self.trainer.strategy.setup_optimizers(self.trainer)
            else:
                self.trainer.optimizers = self.configure_optimizers()

    def on_train_end(self) -> None:
        gc.collect()
        assert not self.earlier, "masters of earlier optimizers take no memory any more"


@pytest.mark.parametrize("name", ["bf16-master", "bf16-remainder", "fp16-master"])
def test_optimizers_that_are_set_up_again_in_the_run_take_over_the_masters(name: str) -> None:
    data, found = torch.randn(32, 32, generator=torch.Generator().manual_seed(1)), []
    for way in (None, "strategy", "list"):
        trainer = L.Trainer(precision=name, max_epochs=2, **ON_CPU)  # type: ignore[arg-type]
        trainer.fit(model := Folds(way), DataLoader(data, batch_size=8))
        assert [type(optimizer) for optimizer in trainer.optimizers] == [torch.optim.SGD] * 2, "plain again after fit"
        found.append(list(model.parameters()))
        assert all(map(torch.equal, found[-1], found[0]))


@pytest.mark.parametrize("name", ["fp8-hybrid", "int8-mixed", "msamp-o2", "fp8-hybrid-8bit"])
def test_a_layer_that_comes_after_the_set_up_is_named(name: str) -> None:
    model = net()
    fabric = L.Fabric(accelerator="cpu", devices=1, precision=name)  # type: ignore[arg-type]
    wrapped, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), 1e-3))

    def step() -> None:
        fabric.backward(wrapped(torch.ones(4, 32)).float().sum())
        optimizer.step()

    step()
    model.extend([nn.Linear(32, 32), nn.Linear(32, 32)])
    optimizer.add_param_group({"params": list(model[3:].parameters())})
    with pytest.warns(UserWarning, match=r"'3', '4' came into the model after its set-up.* do not run in (FP8|int8)"):
        step()
    step()


def test_an_optimizer_is_not_kept_alive_and_one_at_its_address_is_a_new_one() -> None:
    """Folds free their optimizer before the next one is made, and Python gives its address again."""
    plugin = HalfMixed("fp16", master_weights=True)
    fabric = L.Fabric(accelerator="cpu", devices=1, plugins=plugin)
    model, optimizer = fabric.setup(model := net(), torch.optim.SGD(model.parameters(), lr=0.1))
    for step in (optimizer.step, lambda: None):
        fabric.backward(model(torch.randn(4, 32)).square().mean())
        fabric.clip_gradients(model, optimizer, max_norm=1.0)  # the second time they wait for a step
        step()
    assert len(plugin.modules.groups_seen) == 1
    seen = weakref.ref(optimizer.optimizer)
    del optimizer, step
    gc.collect()
    assert seen() is None
    assert len(plugin.modules.groups_seen) == 0


def test_optimizers_that_come_one_by_one_with_evaluations_between_them_have_masters() -> None:
    fabric = L.Fabric(accelerator="cpu", devices=1, precision="bf16-master")  # type: ignore[arg-type]
    wrapped, optimizers = fabric.setup_module(model := net()), []
    for part in (model[0], model[2]):
        optimizers.append(fabric.setup_optimizers(torch.optim.SGD(part.parameters(), lr=0.1)))
        with torch.no_grad():
            wrapped(torch.ones(2, 32))
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("name", ["bf16-master", "bf16-remainder", "fp16-master"])
def test_a_weight_that_is_pruned_through_data_trains_on_in_a_new_optimizer(name: str) -> None:
    model = net()
    fabric = L.Fabric(accelerator="cpu", devices=1, precision=name)  # type: ignore[arg-type]
    wrapped, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), 1e-3))
    for _ in range(2):
        fabric.backward(wrapped(torch.ones(4, 32)).float().sum())
        optimizer.step()
        optimizer.zero_grad()
        *_, bias = (m.detach().clone() for m in fabric.strategy.precision.main_params(optimizer.optimizer))
        first, last = model[0], model[2]
        for weight, kept in ((first.weight, (slice(50),)), (first.bias, (slice(50),)), (last.weight, (..., slice(50)))):
            weight.data = weight.data[kept].clone()
        optimizer = fabric.setup_optimizers(torch.optim.SGD(model.parameters(), 1e-3))
    *pruned, whole = fabric.strategy.precision.main_params(optimizer.optimizer)
    assert [m.shape for m in pruned] == [(50, 32), (50,), (32, 50)]
    for master, p in zip(pruned, model.parameters(), strict=False):
        assert torch.equal(master.to(p.dtype), p)
        assert (master != p).any() or name == "fp16-master", "the second step, which fp16 skips, has moved the master"
    assert torch.equal(whole, bias)


FORGOTTEN = r"'(net\.)?1\.weight' is trainable and in no optimizer.*`requires_grad_\(False\)`"
STALE = r"'(net\.)?1\.weight' \(and 1 more\) is in no optimizer, but an optimizer holds a parameter of its shape"


def step(net: nn.Module, *groups: list[nn.Parameter], fabric: L.Fabric | None = None) -> list[object]:
    fabric = fabric or L.Fabric(precision="fp8-hybrid", accelerator="cpu")
    net, *optimizers = fabric.setup(net, *(torch.optim.SGD(group, lr=0.1) for group in groups))
    net(torch.ones(4, 16)).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
    return optimizers


def test_a_forgotten_layer_warns_a_replaced_one_raises_and_a_second_stage_over_one_backbone_is_neither() -> None:
    fabric = L.Fabric(precision="fp8-hybrid", accelerator="cpu")
    net, other = (nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16, bias=False)) for _ in range(2))
    _teacher = fabric.setup(nn.Linear(16, 16))  # of which no optimizer has anything
    of_other = step(other, [*other[0].parameters()], [*other[1].parameters()], fabric=fabric)
    for own in ([], [nn.Parameter(torch.zeros(3))]):  # of a loss, for example
        with pytest.warns(UserWarning, match=FORGOTTEN):
            step(net, [*net[0].parameters(), *own], fabric=fabric)
    assert of_other, "whose weights have the shape of the forgotten one, and are no stale ones"
    held = [*net.parameters()]
    net[1] = nn.Linear(16, 16)  # what other packages' conversions do after the optimizer is built
    with pytest.raises(RuntimeError, match=STALE):
        step(net, held)
    backbone = nn.Linear(16, 16)
    for net in [nn.Sequential(backbone, nn.Linear(16, 16)) for _ in range(2)]:
        step(net, [*net.parameters()])


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
@pytest.mark.parametrize("name", ["fp8-hybrid", "msamp-o3", "int8-mixed", "fp8-hybrid-8bit"])
def test_modules_of_torchscript_stay_and_train(name: str) -> None:
    fabric = L.Fabric(accelerator="cpu", devices=1, precision=name)  # type: ignore[arg-type]
    model = nn.Sequential(torch.jit.script(nn.Linear(32, 32)), nn.Linear(32, 32))
    wrapped, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    before = [p.detach().float().clone() for p in model.parameters()]
    fabric.backward(wrapped(torch.randn(16, 32)).square().sum())
    optimizer.step()
    assert type(model[0]) is torch.jit.RecursiveScriptModule
    assert type(model[1]) is not nn.Linear
    model[1].load_state_dict({**model[1].state_dict(), "bias": torch.full((32,), 1.001)})
    assert torch.equal(copy.deepcopy(model[1].bias), torch.full((32,), 1.001)), "no number of bf16"
    assert all((p.detach().float() != b).any() for p, b in zip(model.parameters(), before, strict=True))
