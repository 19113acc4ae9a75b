"""Master weights as users meet them: names, callbacks, schedulers, evaluation before training, loggers."""

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import nn

from lightning_lowprec import HalfMixed, LossScale
from tests.masters.test_float32_accumulation import half
from tests.precision.weights_left import Net, as_trained, fit
from tests.toys import ON_CPU


def masters_of(trainer):
    return trainer.precision_plugin.main_params(trainer.optimizers[0])


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
    (master,) = masters_of(trainer)
    torch.testing.assert_close(master, Constant.START - 5e-3, rtol=1e-6, atol=0)
    assert torch.equal(model.weight, master.to(model.weight.dtype))


def test_the_loss_scale_reaches_the_users_logger(tmp_path):
    logger = CSVLogger(tmp_path)
    plugin = HalfMixed("fp16", master_weights=True, loss_scale=LossScale(initial=16.0, growth_interval=4))
    net = Net()
    net.batch_size = 3
    fit(plugin, net, logger=logger, log_every_n_steps=1)
    rows = (tmp_path / "lightning_logs" / "version_0" / "metrics.csv").read_text().splitlines()
    header, *cells = (row.split(",") for row in rows)
    scales = [row[header.index("lowprec/loss_scale")] for row in cells]
    assert [float(scale) for scale in scales if scale] == [16.0, 16.0, 16.0, 32.0, 32.0, 32.0, 32.0, 64.0]
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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "fp16", "master_weights": "remainder"}, r"`master_weights='remainder'` is not valid with fp16"),
        ({"dtype": "bf16", "buffer_dtype": torch.float32}, r"`buffer_dtype=torch.float32` goes with `master_weights`"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        HalfMixed(**options)
