"""ByteGPT and StdlibText, what `lowprec compare` trains by default; and the main job: FP8 by one word trains it."""

import lightning as L
import pytest
import torch

from lightning_lowprec.tools import demo
from lightning_lowprec.tools.demo import ByteGPT, StdlibText
from tests.toys import ON_CPU


def data(**kwargs):
    module = StdlibText(**{"block_size": 16, "batch_size": 4, "max_bytes": 20_000, "val_windows": 8, **kwargs})
    module.setup("fit")
    return module


def test_batches_are_bytes_and_the_bytes_after_them_and_the_seed_chooses_those_of_the_training():
    module = data()
    for loader in (module.train_dataloader(), module.val_dataloader()):
        x, y = next(iter(loader))
        assert x.dtype == y.dtype == torch.int64
        assert x.shape == y.shape == (4, 16)
        assert torch.equal(x[:, 1:], y[:, :-1])
        assert x.min() >= 0
        assert y.max() < 256
    first, again, other = data(seed=1), data(seed=1), data(seed=2)
    assert all(map(torch.equal, first.train_set.tensors, again.train_set.tensors))
    assert not any(map(torch.equal, first.train_set.tensors, other.train_set.tensors))
    assert all(map(torch.equal, first.val_set.tensors, other.val_set.tensors))
    train_files, val_files = demo.split(demo.STDLIB)
    assert not {*train_files} & {*val_files}
    text = b"".join(file.read_bytes() for file in val_files[:99])[: 20_000 // demo.VAL_SHARE]
    windows = [text[start : start + 16] for start in (i * (len(text) - 16) // 8 for i in range(8))]
    assert [bytes(window.tolist()) for window in first.val_set.tensors[0]] == windows, "evenly spaced"


def test_a_byte_sees_those_before_it_and_the_residual_stream_does_not_grow_with_depth():
    model, x = ByteGPT(depth=8, width=64, heads=2, block_size=16), torch.randint(256, (2, 16))
    torch.testing.assert_close(model(x)[:, :9], model(x[:, :9]))
    torch.autograd.grad(model(x).sum(), [*model.parameters()])  # raises where one is not used
    for block in model.blocks:
        for last, first in ((block.proj, block.qkv), (block.fc_out, block.fc_in)):
            assert (last.weight.std() / first.weight.std()).item() == pytest.approx((2 * 8) ** -0.5, rel=0.1)


@pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers")
@pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated")
def test_it_learns_and_logs(tmp_path, caplog):
    L.seed_everything(0, verbose=False)
    trainer = L.Trainer(
        max_steps=30, limit_val_batches=2, check_val_every_n_epoch=None, val_check_interval=30, num_sanity_val_steps=0,
        default_root_dir=tmp_path, **ON_CPU,
    )  # fmt: skip
    trainer.fit(ByteGPT(depth=1, width=16, heads=2, block_size=16, lr=1e-2), data(batch_size=16))
    assert trainer.callback_metrics["train_loss"] < 4.5
    assert trainer.callback_metrics["val_loss"] < 4.5
    assert caplog.messages[-1] == demo.NEXT


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*does not have many workers:UserWarning")
def test_fp8_stays_within_one_percent_of_float32_after_200_steps():
    def final(precision):
        torch.manual_seed(0)
        model = ByteGPT(depth=2, width=64, heads=2, block_size=64)
        data = StdlibText(block_size=64, batch_size=8, max_bytes=1_000_000, train_windows=1600, val_windows=64)
        trainer = L.Trainer(precision=precision, max_steps=200, **ON_CPU)
        trainer.fit(model, datamodule=data)
        return trainer.validate(model, datamodule=data, verbose=False)[0]["val_loss"]

    expected = final("32-true")
    assert expected < 3.2, "it learns"
    for precision in ("fp8-hybrid", "fp8-rowwise"):
        assert 0 < abs(final(precision) / expected - 1) < 0.01
