"""What happens to a plugin and its module between runs: conversion twice, pickling, where layers are made."""

import copy
import gc
import pickle

import pytest
import torch
from contract_models import (
    Batches,
    EvaluatedNet,
    Net,
    Probe,
    X,
    assert_same_tensors,
    fabric_with,
    net,
    random_batches,
    same,
    scale_of,
    train_in_fabric,
    trainer_with,
    value,
)
from plugins_under_test import every_plugin, make
from torch import nn

from lightning_lowprec import LossScale
from tests.precision.weights_left import as_trained
from tests.quality import sqnr

GROWS_EVERY_STEP = LossScale(initial=8.0, growth_interval=1)


def structure(module: nn.Module) -> list[tuple[str, type]]:
    return [(fqn, type(child)) for fqn, child in module.named_modules()]


def values(module: nn.Module) -> dict[str, torch.Tensor]:
    return {fqn: value(p) for fqn, p in module.named_parameters()}


@every_plugin
def test_fit_validate_test_predict_convert_once(name: str) -> None:
    trainer, module, batches = trainer_with(make(name)), net(EvaluatedNet), random_batches(2)
    identities = [id(p) for p in module.parameters()]
    trainer.fit(module, batches, batches)
    fitted, weights = structure(module), values(module)
    trainer.validate(module, batches, verbose=False)
    trainer.test(module, batches, verbose=False)
    trainer.predict(module, batches)
    assert structure(module) == fitted
    assert [id(p) for p in module.parameters()] == identities
    assert_same_tensors(values(module), weights)


@every_plugin
def test_evaluation_gives_the_same_loss_alone_and_inside_fit(name: str) -> None:
    trainer, module, batches = trainer_with(make(name)), net(EvaluatedNet), random_batches(2)
    trainer.fit(module, batches, batches)
    inside = trainer.callback_metrics["loss"].item()
    alone = trainer.validate(module, batches, verbose=False)[0]["loss"]
    assert alone == inside


class NetAfterAnother(EvaluatedNet):
    """Set up when the model before it is gone: the optimizer still holds parameters that no module has any more."""

    def setup(self, stage: str) -> None:
        gc.collect()


@every_plugin
@pytest.mark.parametrize("how", ["validate", "test", "predict"])
def test_another_model_is_evaluated_by_the_trainer_that_fitted_one(name: str, how: str) -> None:
    """`trainer.fit(model)`, then `best = M.load_from_checkpoint(...)` and `trainer.test(best)`."""
    trainer, fitted, batches = trainer_with(as_trained(make(name))), net(EvaluatedNet), random_batches(2)
    trainer.fit(fitted, batches, batches)
    best = NetAfterAnother()
    best.load_state_dict(fitted.state_dict())
    words = {} if how == "predict" else {"verbose": False}
    of_fitted = getattr(trainer_with(as_trained(make(name))), how)(fitted, batches, **words)
    del fitted
    of_best = getattr(trainer, how)(best, batches, **words)
    rounds_otherwise = make(name).masters is not None  # half weights against float32 weights that are rounded at use
    if not rounds_otherwise or (how == "predict" and not name.startswith("FP8TE")):
        assert_same_tensors(of_best, of_fitted)
    elif how == "predict":  # the fitted model has half weights; the other one keeps float32 weights, rounded at use
        assert (
            sqnr(torch.cat(of_fitted).float(), torch.cat(of_best).float()) > 25.5
        )  # two roundings to e4m3, of 28.5 dB each, that have nothing in common
    else:
        assert of_best[0]["loss"] == pytest.approx(of_fitted[0]["loss"], rel=2**-8)


@every_plugin
def test_another_model_is_fitted_by_the_trainer_that_fitted_one(name: str) -> None:
    """Cross-validation: the second model trains as it does under a Trainer of its own."""
    trainer, batches = trainer_with(make(name)), random_batches(2)
    trainer.fit(net(EvaluatedNet), batches, batches)
    second, alone = net(NetAfterAnother), net(EvaluatedNet)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(second, batches, batches)
    trainer_with(make(name)).fit(alone, batches, batches)
    if make(name).scaler is None:  # a dynamic loss scale goes on, by design
        assert_same_tensors(values(second), values(alone))
    assert any(
        not torch.equal(a, value(b))
        for a, b in zip(values(second).values(), net(EvaluatedNet).parameters(), strict=True)
    )


@every_plugin
def test_fit_again_goes_on_as_one_optimizer_state_anew(name: str) -> None:
    """Two fits of one epoch with one Trainer each are two fits with one plugin: nothing stale stays in the plugin."""
    plugin, module, batches = make(name), net(), random_batches(2)
    for _ in range(2):
        trainer_with(plugin).fit(module, batches)
    fresh_plugin, fresh = make(name), net()
    trainer_with(fresh_plugin).fit(fresh, batches)
    trainer_with(copy.deepcopy(fresh_plugin)).fit(fresh, batches)
    assert_same_tensors(values(module), values(fresh))


@every_plugin
@pytest.mark.parametrize("clone", [copy.deepcopy, lambda p: pickle.loads(pickle.dumps(p))], ids=["deepcopy", "pickle"])
def test_connected_plugin_survives_copying_and_trains_alike(name: str, clone: object) -> None:
    """ddp_spawn pickles the plugin; its copy must do in the new process what it would have done here."""
    plugin, module, batches = make(name, GROWS_EVERY_STEP), net(), random_batches(2)
    trainer_with(plugin).fit(module, batches)
    copied = clone(plugin)
    module, twin = copy.deepcopy(module), copy.deepcopy(module)  # neither finds the masters of the first fit
    module._trainer = twin._trainer = None
    assert scale_of(copied) == scale_of(plugin) == (8.0 * 2**2 if plugin.scaler else 1.0)
    trainer_with(plugin).fit(module, batches)
    assert scale_of(copied) != scale_of(plugin) or plugin.scaler is None  # it shares nothing
    trainer_with(copied).fit(twin, batches)
    assert_same_tensors(values(twin), values(module))
    assert scale_of(copied) == scale_of(plugin)


class ConfiguredNet(Net):
    """Makes its layers in ``configure_model``."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = None

    def configure_model(self) -> None:
        if self.layers is None:
            self.layers = net().layers


@every_plugin
def test_layers_made_in_configure_model_are_converted_and_trained(name: str) -> None:
    eager, late = net(), ConfiguredNet()
    for module in (eager, late):
        trainer_with(make(name), max_epochs=2).fit(module, random_batches(2))
    assert structure(late)[1:] == structure(eager)[1:]  # the roots differ
    assert_same_tensors(values(late), values(eager))


@every_plugin
def test_module_made_in_fabric_init_module_trains_alike(name: str) -> None:
    results = []
    for early in (False, True):
        fabric = fabric_with(make(name))
        if early:
            with fabric.init_module():
                module = net()
        else:
            module = net()
        assert {p.dtype for p in module.parameters()} == {torch.float32}
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
        train_in_fabric(fabric, *fabric.setup(module, optimizer), random_batches(2))
        results.append(values(module))
    assert_same_tensors(*results)


@every_plugin
@pytest.mark.parametrize("order", ["joint", "module first", "optimizer first"])
def test_fabric_setup_order_does_not_matter(name: str, order: str) -> None:
    """Also: the optimizer still holds the parameters after conversion."""
    module = net()
    before, optimizer, fabric = values(module), torch.optim.AdamW(module.parameters(), lr=0.3), fabric_with(make(name))
    if order == "joint":
        wrapped, opt = fabric.setup(module, optimizer)
    elif order == "module first":
        wrapped = fabric.setup_module(module)
        opt = fabric.setup_optimizers(optimizer)
    else:
        opt = fabric.setup_optimizers(optimizer)
        wrapped = fabric.setup_module(module)
    train_in_fabric(fabric, wrapped, opt, random_batches(2))
    assert all(not same(p, before[fqn]) for fqn, p in module.named_parameters())


@every_plugin
def test_frozen_parameters_stay_frozen(name: str) -> None:
    module = net()
    module.layers[0].requires_grad_(False)
    frozen = module.layers[0].weight.detach().clone()
    trainer_with(as_trained(make(name))).fit(module, random_batches(2))
    assert not module.layers[0].weight.requires_grad
    assert same(module.layers[0].weight, frozen)
    assert module.layers[3].weight.requires_grad


@every_plugin
def test_module_that_left_a_trainer_belongs_to_fabric(name: str) -> None:
    """Fabric after Trainer: inputs are cast again, and the loss is scaled once."""
    module, plugin = Probe(), make(name)
    trainer_with(make(name)).fit(module, Batches(X))
    with torch.no_grad():
        module.w.zero_()
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    fabric = fabric_with(plugin)
    wrapped, opt = fabric.setup(module, optimizer)
    opt.zero_grad()
    fabric.backward(wrapped(X))
    assert same(module.w.grad, X * scale_of(plugin))
    opt.step()
    assert same(module.w, -X)
    assert plugin.convert_input(X).dtype == plugin.autocast_dtype


@every_plugin
@pytest.mark.parametrize("clone", [copy.deepcopy, lambda p: pickle.loads(pickle.dumps(p))], ids=["deepcopy", "pickle"])
def test_copied_plugin_works_in_fabric(name: str, clone: type) -> None:
    plugin, module, batches = make(name), net(), random_batches(2)
    unused, fabric = clone(plugin), fabric_with(plugin)
    train_in_fabric(fabric, *fabric.setup(module, torch.optim.AdamW(module.parameters(), lr=0.1)), batches)
    for copied in (unused, clone(plugin)):
        twin, fabric = net(), fabric_with(copied)
        train_in_fabric(fabric, *fabric.setup(twin, torch.optim.AdamW(twin.parameters(), lr=0.1)), batches)
        assert_same_tensors(values(twin), values(module))
