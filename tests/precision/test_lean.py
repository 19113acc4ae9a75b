"""`bf16-lean` and its options as users meet them: Trainer, Fabric, refusals, checkpoints, callbacks."""

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    Callback,
    GradientAccumulationScheduler,
    LearningRateFinder,
    StochasticWeightAveraging,
)
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils.checkpoint import checkpoint

from lightning_lowprec import HalfMixed, MasterConfig
from lightning_lowprec.masters.config import LEAN
from lightning_lowprec.names import TABLE
from tests.contract.contract_models import trainer_with
from tests.masters.master_loops import equal
from tests.precision.lean_models import LEAN_NAMES, WIDTH, Net, batches, codes, fit, in_fabric, plugin, step, weights

every_name = pytest.mark.parametrize("name", LEAN_NAMES)


class Watcher(Callback):
    """Notes what the hooks of the Trainer see."""

    def __init__(self):
        self.calls = []

    def on_after_backward(self, trainer, model):
        self.calls.append(("after_backward", all(p.grad is None for p in model.parameters())))

    def on_before_optimizer_step(self, trainer, model, optimizer):
        self.calls.append(("before_step", all(p.grad is None for p in model.parameters())))

    def on_before_zero_grad(self, trainer, model, optimizer):
        self.calls.append(("zero_grad", trainer.global_step))


class Scheduled(Net):
    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


@pytest.mark.filterwarnings("ignore:.*run when gradients are used and freed")  # so the watcher says too
@every_name
def test_the_trainer_counts_schedules_and_calls_hooks(name):
    model, watcher = Scheduled(), Watcher()
    before = weights(model)
    trainer = fit(model, name, callbacks=[watcher])
    assert trainer.global_step == 3
    assert trainer.optimizers[0].param_groups[0]["lr"] == 3e-3 / 8
    hooks = [("zero_grad", None), ("after_backward", True), ("before_step", True)]
    assert [call if call[0] != "zero_grad" else hooks[0] for call in watcher.calls] == hooks * 3
    assert not any(torch.equal(p, old.bfloat16()) for p, old in zip(model.parameters(), before, strict=True))
    assert [int(entry["step"]) for entry in trainer.optimizers[0].state.values()] == [3] * 6
    assert model.losses[-1] < model.losses[0]


@pytest.mark.parametrize(("form", "moments"), [("fp32", "fp32"), ("remainder", "fp32")])
def test_the_update_in_the_backward_is_the_update_in_the_step(form, moments):
    """Without random rounding both are the same bit for bit, in the Trainer and in Fabric, with a scheduler."""
    found = []
    for update in ("step", "backward"):
        model = Scheduled()
        trainer = fit(model, plugin(form, moments, update), steps=4)
        found.append((model.state_dict(), trainer.optimizers[0].state_dict()))
        made = Scheduled()
        parts = made.configure_optimizers()
        fabric = L.Fabric(accelerator="cpu", devices=1, plugins=[plugin(form, moments, update)])
        module, optimizer = fabric.setup(made, parts["optimizer"])
        for batch in batches(4):
            step(fabric, module, optimizer, batch)
            parts["lr_scheduler"]["scheduler"].step()
        found.append((made.state_dict(), parts["optimizer"].state_dict()))
    assert equal(found[0], found[2]), "Trainer"
    assert equal(found[1], found[3]), "Fabric"


class Gan(Net):
    """Every loss reaches the weights of both optimizers, of which one steps."""

    automatic_optimization = False

    def training_step(self, batch, batch_idx=0):
        for optimizer in self.optimizers():
            self.manual_backward(super().training_step(batch))
            optimizer.step()
            for each in self.optimizers():
                each.zero_grad()

    def configure_optimizers(self):
        return [torch.optim.AdamW(self.layers[i].parameters(), lr=1e-2) for i in (0, 2)]


def test_the_weights_of_two_optimizers_are_updated_in_their_steps(caplog):
    runs = []
    for update in ("step", "backward"):
        model = Gan()
        fit(model, plugin("remainder", "fp32", update))
        runs.append(model.state_dict())
    assert equal(*runs)
    assert caplog.text.count("Several optimizers: weights are updated in the step") == 1


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (Net, {"accumulate_grad_batches": 2}, "`accumulate_grad_batches=2` adds up gradients"),
        (
            Net,
            {"callbacks": [GradientAccumulationScheduler({3: 4})]},
            r"`accumulate_grad_batches=4` adds up gradients.*Use larger batches",
        ),
        (Net, {"gradient_clip_val": 1.0, "gradient_clip_algorithm": "value"}, "`gradient_clip_val=1.0` clips"),
    ],
    ids=["accumulation", "scheduled accumulation", "clipping"],
)
def test_the_trainer_refuses_what_needs_gradients_and_names_precisions_that_do_it(model, options, message):
    with pytest.raises(MisconfigurationException, match=f"`precision='bf16-lean'`: {message}") as refused:
        fit(model(), "bf16-lean", **options)
    told = codes("precision=", refused.value)[1:]
    assert told == ["bf16-8bit", "fp8-hybrid-8bit"]
    for instead in (*told, HalfMixed("bf16", master_weights=codes("master_weights=", refused.value)[0])):
        trained = model()
        fit(trained, instead, **options)
        assert not equal(weights(trained), [p.bfloat16() for p in weights(model())])


def test_options_that_exclude_each_other_say_so():
    lean = MasterConfig(update="backward")
    for make, message in (
        (lambda: HalfMixed("fp16", master_weights=lean), "does not go with fp16.*Use `update='step'`"),
        (lambda: HalfMixed("fp16", master_weights=LEAN), "not valid with fp16"),
        (
            lambda: HalfMixed("bf16", master_weights=lean, grad_accumulation_dtype=torch.float32),
            "`grad_accumulation_dtype=torch.float32`: no gradient is kept",
        ),
        (lambda: MasterConfig(clip_tensor=1.0), "`clip_tensor` goes with `update='backward'` only"),
        (lambda: MasterConfig(update="later"), "update='later'.*step, backward"),
        (lambda: MasterConfig(moments="4bit"), "moments='4bit'.*fp32, 8bit"),
    ):
        with pytest.raises(ValueError, match=message):
            make()


def test_plugins_made_by_hand_have_the_names():
    for name in ("bf16-8bit", "bf16-lean", "bf16-lean-sr"):
        assert HalfMixed(**TABLE[name].options).precision == name
    assert plugin("remainder", "fp32").precision == "bf16-remainder"


# ---- Fabric


def test_fabric_refuses_clipping_and_a_second_backward():
    model = Net()
    fabric, module, optimizer = in_fabric("bf16-lean", model, model.configure_optimizers())
    batch = next(iter(batches(1)))
    fabric.backward(module(batch).square().mean())
    for clip in ({"max_norm": 1.0, "norm_type": 1.0}, {"clip_val": 1.0}):
        with pytest.raises(RuntimeError, match=r"gradients were to be clipped.*clip_tensor=1.0"):
            fabric.clip_gradients(module, optimizer, **clip)
    with pytest.raises(RuntimeError, match=r"a second backward pass reached a parameter.*Add the losses"):
        fabric.backward(module(batch).square().mean())
    optimizer.step()
    fabric.backward(module(batch).square().mean())


def test_fabric_updates_two_optimizers_in_their_steps():
    found = []
    for update in ("step", "backward"):
        generator, critic = Net(0), Net(1)
        fabric = L.Fabric(accelerator="cpu", devices=1, plugins=[plugin("remainder", "fp32", update)])
        made, first = fabric.setup(generator, generator.configure_optimizers())
        judge, second = fabric.setup(critic, critic.configure_optimizers())
        for batch in batches(2):
            fabric.backward(judge(made(batch)).square().mean())
            first.step()
            first.zero_grad()
            second.zero_grad()
            fabric.backward(judge(batch).square().mean())
            second.step()
            second.zero_grad()
        found.append((generator.state_dict(), critic.state_dict()))
    assert equal(*found)
    assert not equal(found[0][1], Net(1).bfloat16().state_dict())


def test_a_refit_with_a_new_optimizer_leaves_the_old_one_without_effect():
    model = Net()
    fabric, module, old = in_fabric("bf16-lean", model, torch.optim.AdamW(model.parameters(), lr=1.0))
    new = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-3))
    before = weights(model)
    for batch in batches(2):
        step(fabric, module, new, batch)
    assert not old.optimizer.state
    assert [int(entry["step"]) for entry in new.optimizer.state.values()] == [2] * 6
    moved = [(p - b).abs().max() for p, b in zip(model.parameters(), before, strict=True)]
    assert 0 < max(moved) < 0.02
    other = Net(1)  # another model, after the first has trained
    module, optimizer = fabric.setup(other, other.configure_optimizers())
    step(fabric, module, optimizer, next(iter(batches(1))))


@pytest.mark.parametrize("after", ["32-true", "half-auto", None])
def test_a_model_that_trains_elsewhere_afterwards_is_not_updated_by_the_old_optimizer(after):
    model = Net()
    trainer = fit(model, "bf16-lean")
    model.float()
    before, optimizer = weights(model), torch.optim.SGD(model.parameters(), lr=0.1)
    if after is None:  # a loop without Lightning
        model(next(iter(batches(1)))).square().mean().backward()
    else:
        fabric, module, optimizer = in_fabric(after, model, optimizer)
        fabric.backward(module(next(iter(batches(1)))).square().mean())
    assert all(p.grad is not None for p in model.parameters())
    assert equal(weights(model), before)
    assert trainer.optimizers[0].state, "the old optimizer still exists"


def test_a_fabric_model_under_another_precision_has_no_hooks():
    model = Net()
    fabric, module, old = in_fabric("bf16-lean", model, model.configure_optimizers())
    step(fabric, module, old, next(iter(batches(1))))
    for precision in ("bf16-remainder", "32-true"):
        model.float() if precision == "32-true" else model
        fabric, module, new = in_fabric(precision, model, torch.optim.SGD(model.parameters(), lr=0.1))
        fabric.backward(module(next(iter(batches(1)))).float().square().mean())
        assert all(p.grad is not None for p in model.parameters())
        new.zero_grad()


@pytest.mark.filterwarnings("ignore:.*run when gradients are used and freed")  # so the watcher says too
def test_a_second_fit_with_the_same_optimizer_updates_in_the_backward_again():
    class Keeps(Net):
        def configure_optimizers(self):
            if "made" not in vars(self):
                vars(self)["made"] = super().configure_optimizers()
            return vars(self)["made"]

    model, watcher = Keeps(), Watcher()
    fit(model, "bf16-lean")
    trainer = fit(model, "bf16-lean", callbacks=[watcher])
    assert ("after_backward", True) in watcher.calls
    assert ("after_backward", False) not in watcher.calls
    assert int(trainer.optimizers[0].state[model.layers[0].weight]["step"]) == 6


def test_manual_optimization_with_one_optimizer():
    class Manual(Net):
        automatic_optimization = False

        def training_step(self, batch, batch_idx=0):
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch))
            optimizer.step()

    manual, automatic = Manual(), Net()
    trainer = fit(manual, "bf16-lean")
    fit(automatic, "bf16-lean")
    assert trainer.global_step == 3
    assert equal(manual.state_dict(), automatic.state_dict())


# ---- models


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_changes_nothing(reentrant):
    class Checkpointed(Net):
        def forward(self, x):
            return checkpoint(self.layers, x.requires_grad_(), use_reentrant=reentrant)

    plain, saving = Net(), Checkpointed()
    fit(plain, "bf16-lean")
    fit(saving, "bf16-lean")
    assert equal(saving.state_dict(), plain.state_dict())


def test_a_block_in_two_reentrant_checkpoints_is_refused_with_the_way_out():
    class Twice(Net):
        def forward(self, x):
            for _ in range(2):
                x = checkpoint(self.layers[0], x.requires_grad_(), use_reentrant=self.reentrant)
            return x

    model = Twice()
    model.reentrant = True
    with pytest.raises(RuntimeError, match=r"use `use_reentrant=False`"):
        fit(model, "bf16-lean")
    model = Twice()
    model.reentrant = False
    trainer = fit(model, "bf16-lean")
    assert int(trainer.optimizers[0].state[model.layers[0].weight]["step"]) == 3


@pytest.mark.parametrize("whole", [True, False])
def test_compiled_models_update_too(whole):
    plain, compiled = Net(), Net()
    losses = []
    for model in (plain, compiled):
        optimizer = model.configure_optimizers()
        if model is compiled and not whole:
            model.layers[0].compile(backend="aot_eager")
        fabric, module, optimizer = in_fabric(
            "bf16-lean", torch.compile(model, backend="aot_eager") if model is compiled and whole else model, optimizer
        )
        losses.append([step(fabric, module, optimizer, batch) for batch in batches(3)])
        assert all(p.grad is None for p in model.parameters())
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)
    assert losses[0][2] < losses[0][0]


@every_name
def test_two_runs_are_the_same(name):
    first, second = Net(), Net()
    fit(first, name)
    fit(second, name)
    assert equal(first.state_dict(), second.state_dict())
    assert first.losses == second.losses


# ---- callbacks


class Tuned(Net):
    lr = 1e-2
    batch_size = 2

    def train_dataloader(self):
        data = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(7))
        return torch.utils.data.DataLoader(data, batch_size=self.batch_size)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


@pytest.mark.filterwarnings("ignore:.*(does not have many workers|log_every_n_steps|interval).*")
@pytest.mark.parametrize(
    "finder",
    [
        lambda: LearningRateFinder(num_training_steps=6, min_lr=1e-4, max_lr=1e-1),
        lambda: BatchSizeFinder(max_trials=2, steps_per_trial=1),
    ],
    ids=["rate", "batch size"],
)
def test_the_tuners_searches_leave_the_weights_as_they_were(finder, tmp_path):
    model = Tuned()
    before = weights(model)
    seen = []

    class Looks(Callback):
        def on_train_epoch_start(self, trainer, model):
            seen.append(weights(model))

    trainer = trainer_with("bf16-lean", max_steps=2, callbacks=[finder(), Looks()], default_root_dir=tmp_path)
    trainer.fit(model)
    assert trainer.global_step == 2
    assert equal(seen[-1], [p.bfloat16() for p in before])
    assert [int(entry["step"]) for entry in trainer.optimizers[0].state.values()] == [2] * 6


def test_averages_of_weights_are_warned_of():
    with pytest.warns(UserWarning, match=r"`StochasticWeightAveraging` averages .* `precision='bf16-lean'`"):
        trainer_with("bf16-lean", callbacks=[StochasticWeightAveraging(swa_lrs=1e-2)]).fit(Net(), batches(1))
