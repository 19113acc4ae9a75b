"""Averages of weights by Lightning's callbacks under MS-AMP: float32, of the exact values of the weights."""

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging

from lightning_lowprec import MSAMP
from lightning_lowprec.msamp.weight import master_of, msamp_state_of, values_of
from tests.msamp.msamp_runs import CHATTER, LEVELS, Batches, Net
from tests.toys import ON_CPU

pytestmark = pytest.mark.filterwarnings(CHATTER)
DECAY = 0.9


def exact(param):
    """The values that the next step starts from."""
    if msamp_state_of(param) is None:
        return param.detach().double().clone()
    master = master_of(param)
    return (values_of(param) if master is None else master).double()


class Watched(Net):
    """Keeps the exact weights after every step and in every validation."""

    def __init__(self):
        super().__init__()
        self.trained, self.validated = [], []

    def on_train_batch_end(self, *args):
        self.trained.append([exact(p) for p in self.parameters()])

    def validation_step(self, batch, batch_idx):
        self.validated.append([exact(p) for p in self.parameters()])


def fitted(level, callback, path=None, epochs=2, **options):
    module = Watched()
    options = {**ON_CPU, "max_epochs": epochs, "num_sanity_val_steps": 0, **options}
    trainer = L.Trainer(plugins=MSAMP(level), callbacks=callback, **options)
    trainer.fit(module, Batches(), Batches(1), ckpt_path=path)
    return module, trainer


def check_rounded(actual, expected):
    """``actual`` is ``expected`` in float16 codes, whose scale is a power of two, but for float32's rounding."""
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a.double(), e, rtol=2**-10.9, atol=float(e.abs().max()) * 2**-23)


def check_equal(some, others):
    for one, other in zip(some, others, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("level", LEVELS)
def test_an_ema_is_that_of_exact_weights_and_leaves_the_training_alone(level):
    module, _ = fitted(level, EMAWeightAveraging(decay=DECAY))
    check_equal(fitted(level, [])[0].trained, module.trained)
    averages = [module.trained[0]]
    for weights in module.trained[1:]:
        averages.append([DECAY * mean + (1 - DECAY) * new for mean, new in zip(averages[-1], weights, strict=True)])
    check_rounded(module.validated[0], averages[3])
    check_rounded(module.validated[1], averages[7])
    check_rounded(module.parameters(), averages[7])


@pytest.mark.parametrize("level", LEVELS)
def test_stochastic_averages_are_the_mean_of_the_epochs(level):
    """From epoch 1 on, each epoch's start is averaged."""
    module, _ = fitted(level, StochasticWeightAveraging(swa_lrs=1e-2, swa_epoch_start=2), epochs=4)
    starts = [module.trained[4 * epoch - 1] for epoch in (1, 2, 3)]
    check_rounded(module.parameters(), [sum(weights) / 3 for weights in zip(*starts, strict=True)])


@pytest.mark.filterwarnings("ignore:Checkpoint directory")
def test_a_run_with_an_average_goes_on_bit_for_bit(tmp_path):
    whole, _ = fitted("O3", EMAWeightAveraging(decay=DECAY), epochs=3)
    callbacks = [EMAWeightAveraging(decay=DECAY), L.pytorch.callbacks.ModelCheckpoint(tmp_path, save_last=True)]
    fitted("O3", callbacks, enable_checkpointing=True)
    module, _ = fitted("O3", callbacks, tmp_path / "last.ckpt", epochs=3, enable_checkpointing=True)
    check_equal(whole.trained[-4:], module.trained)
    check_equal([list(whole.parameters())], [list(module.parameters())])
