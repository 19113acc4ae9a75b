"""ByteGPT and StdlibText: what `lowprec compare` trains by default."""

import lightning as L
import pytest
import torch

from lightning_lowprec.tools.demo import (
    EXCLUDED_FOLDERS,
    NEXT,
    STDLIB,
    ByteGPT,
    StdlibText,
    read,
    rotate,
    split,
    windows,
)

TINY = {"depth": 1, "width": 16, "heads": 2, "block_size": 16}


def data(**kwargs):
    module = StdlibText(**{"block_size": 16, "batch_size": 4, "max_bytes": 20_000, "val_windows": 8, **kwargs})
    module.setup("fit")
    return module


# ---- the text


def test_training_and_validation_read_different_files():
    train, val = split(STDLIB)
    assert set(train).isdisjoint(val)
    assert len(val) == (len(train) + len(val)) // 10
    for file in train + val:
        assert file.suffix == ".py"
        assert EXCLUDED_FOLDERS.isdisjoint(file.relative_to(STDLIB).parts)


def test_the_split_does_not_depend_on_where_the_folder_lies(tmp_path):
    folders = [tmp_path / "here", tmp_path / "elsewhere"]
    for folder in folders:
        folder.mkdir()
        for i in range(12):
            (folder / f"part{i}.py").write_text(f"{i:02d} " * 200)
    names = [[[file.name for file in part] for part in split(folder)] for folder in folders]
    assert names[0] == names[1]
    assert [len(part) for part in names[0]] == [11, 1]


def test_batches_are_bytes_and_the_bytes_after_them():
    module = data()
    for loader in (module.train_dataloader(), module.val_dataloader()):
        x, y = next(iter(loader))
        assert x.dtype == y.dtype == torch.int64
        assert x.shape == y.shape == (4, 16)
        assert torch.equal(x[:, 1:], y[:, :-1])
        assert x.min() >= 0
        assert y.max() < 256


def test_the_seed_chooses_the_training_windows_and_leaves_validation_alone():
    first, again, other = data(seed=1), data(seed=1), data(seed=2)
    assert all(map(torch.equal, first.train_set.tensors, again.train_set.tensors))
    assert not any(map(torch.equal, first.train_set.tensors, other.train_set.tensors))
    assert all(map(torch.equal, first.val_set.tensors, other.val_set.tensors))


def test_sizes_hold_and_every_window_is_whole():
    module = data(train_windows=500)
    assert len(module.train_set) == 500
    assert len(module.val_set) == 8
    assert len(read(split(STDLIB)[0], module.max_bytes)) == 20_000
    assert {len(window) for pair in module.train_set for window in pair} == {16}
    assert {len(window) for pair in module.val_set for window in pair} == {16}


def test_the_last_byte_of_a_text_can_be_a_target(tmp_path):
    (tmp_path / "text").write_bytes(bytes(range(17)))  # exactly one window of block_size 16
    text = read([tmp_path / "text"], max_bytes=1_000)
    assert windows(text, 16).tolist() == [list(range(17))]


# ---- the model


def test_first_loss_is_that_of_guessing():
    torch.manual_seed(0)
    x = torch.randint(256, (2, 129))
    assert ByteGPT()._loss((x[:, :-1], x[:, 1:])).item() == pytest.approx(5.545, abs=0.1)  # ln 256


def test_every_linear_can_run_in_fp8_and_the_head_is_its_own():
    model = ByteGPT()
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            assert module.in_features % 16 == 0
            assert module.out_features % 16 == 0
    assert model.lm_head.weight is not model.token_embedding.weight
    assert isinstance(model.blocks, torch.nn.ModuleList)


def test_a_byte_sees_only_the_bytes_before_it():
    torch.manual_seed(0)
    model = ByteGPT(**TINY)
    tokens = torch.randint(256, (1, 16))
    changed = tokens.clone()
    changed[0, 10] = (changed[0, 10] + 1) % 256
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :10], after[:, :10], rtol=0, atol=0)
    assert not torch.equal(before[:, 10:], after[:, 10:])


def test_rotation_depends_on_distance_alone():
    torch.manual_seed(0)
    turn = ByteGPT(**TINY).turn
    q, k = torch.randn(2, 8).double()
    rotated_q = rotate(q.expand(16, 8), turn.double())
    rotated_k = rotate(k.expand(16, 8), turn.double())
    products = rotated_q @ rotated_k.T
    for distance in (0, 3):
        diagonal = products.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-5, atol=1e-5)
    assert abs(products[0, 0] - products[0, 3]) > 1e-3


def test_the_loss_is_computed_in_float32():
    model = ByteGPT(**TINY)
    x = torch.randint(256, (2, 16))
    with torch.autocast("cpu", torch.bfloat16):
        assert model(x).dtype == torch.bfloat16
        assert model._loss((x, x)).dtype == torch.float32


# ---- both


@pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers")
@pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated")
def test_it_learns_and_logs(tmp_path, caplog):
    L.seed_everything(0, verbose=False)
    trainer = L.Trainer(
        accelerator="cpu", max_steps=30, limit_val_batches=2, check_val_every_n_epoch=None, val_check_interval=30,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        num_sanity_val_steps=0, default_root_dir=tmp_path,
    )  # fmt: skip
    trainer.fit(ByteGPT(**TINY, lr=1e-2), data(batch_size=16))
    assert trainer.callback_metrics["train_loss"] < 4.5
    assert trainer.callback_metrics["val_loss"] < 4.5
    assert caplog.messages[-1] == NEXT
