"""Master weights as users meet them: evaluation before training, loggers, gradients that are shown, lazy layers."""

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import nn

from lightning_lowprec import HalfMixed, LossScale
from tests.masters.test_float32_accumulation import half
from tests.precision.weights_left import WIDTH, Net, as_trained, exact_weights, fit, same_bits
from tests.toys import ON_CPU


class Constant(L.LightningModule):
    """The gradient of `weight` is 1 at every step; no weight is a bf16 number, and no step reaches the next one."""

    START = torch.tensor([1.001, 2.002, 3.003, 4.004])

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(self.START.clone())

    def training_step(self, batch, batch_idx):
        return self.weight.float().sum()

    def validation_step(self, batch, batch_idx):
        self.log("is_half", float(self.weight.dtype is not torch.float32))

    def train_dataloader(self):
        return torch.utils.data.DataLoader(range(5), batch_size=1)

    val_dataloader = train_dataloader

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-3)


@pytest.mark.parametrize("name", ["bf16-master", "bf16-remainder", "bf16-8bit", "fp16-master"])
def test_small_steps_arrive_from_the_weights_before_the_cast_also_after_an_evaluation(name):
    model = Constant()
    trainer = L.Trainer(plugins=as_trained(half(name)), max_epochs=1, **{**ON_CPU, "limit_val_batches": 1})
    assert trainer.validate(model, verbose=False)[0]["is_half"] == 1.0
    assert torch.equal(model.weight, Constant.START), "an evaluation changes nothing"
    trainer.fit(model)
    (master,) = trainer.precision_plugin.main_params(trainer.optimizers[0])
    torch.testing.assert_close(master, Constant.START - 5e-3, rtol=1e-6, atol=0)
    assert torch.equal(model.weight, master.to(model.weight.dtype))


def test_the_loss_scale_reaches_the_users_logger(tmp_path):
    logger = [CSVLogger(tmp_path / "first"), CSVLogger(tmp_path)]
    plugin = HalfMixed("fp16", master_weights=True, loss_scale=LossScale(initial=16.0, growth_interval=4))
    net = Net()
    net.batch_size = 3
    fit(plugin, net, logger=logger, log_every_n_steps=2)
    rows = (tmp_path / "lightning_logs" / "version_0" / "metrics.csv").read_text().splitlines()
    header, *cells = (row.split(",") for row in rows)
    scales = [row[header.index("lowprec/loss_scale")] for row in cells]
    assert [float(scale) for scale in scales if scale] == [16.0, 32.0, 32.0, 64.0]
    assert "lowprec/skipped_steps" in header


def test_a_skipped_step_leaves_nothing_behind_that_model_zero_grad_cannot_reach():
    fabric = L.Fabric(plugins=half("fp16-master"), accelerator="cpu")
    net = nn.Linear(16, 16)
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    before = net.weight.detach().clone()
    for value in (float("inf"), 1.0, 1.0):
        fabric.backward(model(torch.full((2, 16), value)).float().mean())
        optimizer.step()
        model.zero_grad()
    assert fabric.strategy.precision.scaler.skipped_steps == 1
    assert not torch.equal(net.weight, before)


MASTERS = ["bf16-master", "fp16-master", "bf16-remainder", "bf16-sr"]
MAX_NORM = 1e-4


def in_fabric(name, module, lr=1.0):
    fabric = L.Fabric(accelerator="cpu", devices=1, precision=name)
    return fabric, *fabric.setup(module, torch.optim.SGD(module.parameters(), lr=lr))


def backward(fabric, model):
    fabric.backward(1e-2 * (model(torch.ones(4, WIDTH)) - 1).square().mean())  # fp16's first loss scale is 65536


@pytest.mark.parametrize("name", MASTERS)
def test_what_is_done_to_the_gradient_that_is_shown_reaches_the_step(name):
    changes = {}
    for edit in ("none", "in place", "assigned", "clipped again", "dropped by the optimizer", "dropped by the model"):
        fabric, model, optimizer = in_fabric(name, Net())
        before = [m.detach().clone() for m in fabric.strategy.precision.main_params(optimizer.optimizer)]
        backward(fabric, model)
        fabric.clip_gradients(model, optimizer, max_norm=MAX_NORM)
        for p in model.parameters():
            if edit == "in place":
                p.grad.mul_(2)
            elif edit in ("assigned", "clipped again"):
                p.grad = p.grad * 2
        if edit == "clipped again":
            fabric.clip_gradients(model, optimizer, max_norm=1e9)
        if edit == "dropped by the optimizer":
            optimizer.zero_grad()
        elif edit == "dropped by the model":
            model.zero_grad()
            backward(fabric, model)
            assert {p.grad.dtype for p in model.parameters()} == {model.first.weight.dtype}
            model.zero_grad()
        optimizer.step()
        after = fabric.strategy.precision.main_params(optimizer.optimizer)
        changes[edit] = [a.detach() - b for a, b in zip(after, before, strict=True)]
        backward(fabric, model)
        assert {p.grad.dtype for p in model.parameters()} == {model.first.weight.dtype}, "as before the clipping"
    if name == "bf16-sr":
        return  # the weights round, so that the changes are right on average only
    for single, in_place, assigned, again, *dropped in zip(*changes.values(), strict=True):
        torch.testing.assert_close(in_place, 2 * single, rtol=1e-3, atol=3e-7)  # the weights' own resolution
        assert all(torch.equal(each, in_place) for each in (assigned, again))
        assert not any(change.any() for change in dropped)


@pytest.mark.parametrize("name", ["bf16-master", "bf16-remainder", "fp16-master"])
def test_clipping_by_a_factor_is_clipping_in_place(name, monkeypatch):
    """On GPUs gradients stay at the parameters, and the step multiplies them; what is assigned or comes later, not."""
    found = []
    for devices in (set(), {"cpu"}):
        monkeypatch.setattr("lightning_lowprec.masters.step.DEVICES", devices)
        fabric, net, norms = L.Fabric(accelerator="cpu", devices=1, precision=name), Net(), []
        made = [torch.optim.SGD([*net.parameters()][half], lr=1.0) for half in (slice(4), slice(4, None))]
        model, *optimizers = fabric.setup(net, *made)
        for backwards in (2, 1):
            for _ in range(backwards):
                backward(fabric, model)
                norms += [fabric.clip_gradients(model, optimizer, max_norm=MAX_NORM) for optimizer in optimizers]
                model.head.bias.grad = torch.full_like(model.head.bias, MAX_NORM)
                norms.append(fabric.clip_gradients(model, optimizers[1], max_norm=MAX_NORM / 2, norm_type=torch.inf))
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        masters = [m for each in made for m in fabric.strategy.precision.main_params(each)]
        found.append([*norms, *(m.detach() - before for m, before in zip(masters, Net().parameters(), strict=True))])
        for p in model.parameters():
            p.grad = torch.full_like(p, torch.nan)
        if name != "fp16-master":  # which would skip the step
            with pytest.raises(RuntimeError, match=r"order 1 .*not finite, so .*cannot be clipped|non-finite"):
                fabric.clip_gradients(model, optimizer, max_norm=2.0, norm_type=1)
            assert fabric.clip_gradients(model, optimizer, max_norm=1.0, error_if_nonfinite=False).isnan()
    torch.testing.assert_close(*found, rtol=1e-3, atol=2.0**-22)  # two steps of the norm's weights, which are 1


@pytest.mark.parametrize("name", MASTERS)
def test_no_optimizer_is_no_error(name):
    module, same = Net(), exact_weights(Net())
    module.configure_optimizers = lambda: None
    with pytest.warns(UserWarning, match="this fit will run with no optimizer"):
        fit(as_trained(name), module)
    assert same_bits(exact_weights(module), same)


COUPLED = {
    "spectral norm": (
        lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(32, 32)),
        ["parametrizations.weight.original"],
    ),
    "spectral norm by a hook": (lambda: nn.utils.spectral_norm(nn.Linear(32, 32)), ["weight_orig"]),
    "batch norm": (lambda: nn.BatchNorm1d(32), ["weight", "bias"]),
    "weight norm": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(32, 32)), []),
    "pruned": (lambda: nn.utils.prune.l1_unstructured(nn.Linear(32, 32), "weight", amount=0.5), []),
}


@pytest.mark.parametrize("kind", COUPLED)
@pytest.mark.parametrize("name", MASTERS)
def test_what_is_computed_with_buffers_keeps_float32(name, kind):
    torch.manual_seed(0)
    make, names = COUPLED[kind]
    model = nn.Sequential(make(), make(), nn.Linear(32, 32))
    fabric, wrapped, optimizer = in_fabric(name, model, lr=0.1)
    for _ in range(3):
        fabric.backward(wrapped(torch.ones(4, 32)).float().square().mean())
        optimizer.step()
        optimizer.zero_grad()
    expected = [f"{layer}.{each}" for layer in (0, 1) for each in names]
    assert [fqn for fqn, p in model.named_parameters() if p.dtype is torch.float32] == expected
    if "spectral" in kind:
        assert torch.linalg.matrix_norm(model[0].weight.detach().float(), 2) == pytest.approx(1.0, rel=0.35)


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
@pytest.mark.parametrize("name", MASTERS)
def test_a_lazy_layer_gets_masters_when_it_has_weights(name):
    class Lazy(Net):
        def __init__(self):
            super().__init__()
            self.first = nn.LazyLinear(WIDTH)

    module = Lazy()
    trainer = fit(as_trained(name), module)
    assert type(module.first) is nn.Linear
    assert module.first.weight.dtype in (torch.bfloat16, torch.float16)
    held = list(trainer.precision_plugin.main_params(trainer.optimizers[0]))
    assert {p.dtype for p in held} == {torch.float32}
    assert len(held) == 8
    if name != "bf16-sr":  # which has no masters between steps
        assert any((m != p).any() for m, p in zip(held, module.parameters(), strict=True)), "more than the weights"
