"""The files of a checkpoint belong together and are whole, or loading raises and names the file."""

import errno
import json
import os
import random
import re
import resource
import shutil
import signal
import time
from pathlib import Path
from pickle import UnpicklingError
from unittest.mock import patch

import lightning as L
import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from lightning_lowprec import FSDP2Strategy
from lightning_lowprec.checkpoints import files, save
from lightning_lowprec.checkpoints.load import open_checkpoint
from lightning_lowprec.checkpoints.weights import open_weights
from tests.checkpoints.test_untrusted_checkpoints import UNSAFE, Config
from tests.fsdp2 import toy
from tests.fsdp2.ranks import launch
from tests.fsdp2.test_resume_trainer import fit
from tests.fsdp2.toy import assert_same, everything, setup, train
from tests.toys import ON_CPU

pytestmark = pytest.mark.distributed
SHARDS = ("__0_0.distcp", "__1_0.distcp")
FILES = (*SHARDS, "meta.pt", ".metadata", "lightning_lowprec.json")
OLD = Path(__file__).with_name("gone")
SPACE = 20_000
"""Bytes that a file may have where the disk is full; a shard of the toy has more."""


def state(model, optimizer, step=0, **more):
    return {"model": model, "optimizer": optimizer, "step": step, **more}


def saves(rank, ranks, folder):
    for kind in ("sharded", "full"):
        fabric, model, optimizer = setup("bf16-master", ranks, kind=kind)
        for step in (1, 2):
            train(fabric, model, optimizer, range(step - 1, step), ranks)
            fabric.save(folder / f"{kind}.{step}", state(model, optimizer, step))
        truth = everything(model, optimizer, fabric.strategy.precision)
        if rank == 0:
            torch.save(truth, folder / f"{kind}.truth")
    mixed_on_two_ranks(fabric, model, optimizer, rank, folder)
    for kind in ("sharded", "full"):
        fails(rank, ranks, folder, kind)
    passes_the_options_on(rank, ranks, folder)


def mixed_on_two_ranks(fabric, model, optimizer, rank, folder):
    """Each file is checked on one rank; both ranks raise the same error, and the model keeps its weights."""
    before = everything(model, optimizer, fabric.strategy.precision)
    if rank == 0:
        shutil.copytree(folder / "sharded.1", folder / "mixed")
        shutil.copy(folder / "sharded.2" / SHARDS[1], folder / "mixed")
    fabric.barrier()
    for error, said in ((ValueError, "damaged, or belongs to another save: .* CRC-32"), (FileNotFoundError, "missing")):
        with pytest.raises(error, match=f"mixed/__1_0.distcp' is {said}"):
            fabric.load(folder / "mixed", state(model, optimizer))
        (folder / "mixed" / SHARDS[1]).unlink(missing_ok=True)
    assert_same(everything(model, optimizer, fabric.strategy.precision), before, "after a refused checkpoint")


CLEAN_UP = save._clean_up


def late(path):
    time.sleep(0.3)
    return CLEAN_UP(path)


def fails(rank, ranks, folder, kind):
    """A full disk, on one rank or on both: all ranks raise an OSError, nothing is left, the old checkpoint stays."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    path = folder / f"disk.{kind}" / "last.ckpt"
    fabric, model, optimizer = setup("32-true", ranks, kind=kind)
    cases = (("first", [0], {}), ("shard", [1], {}), ("both", [0, 1], {}), ("rest", [0], {"rest": torch.zeros(SPACE)}))
    for name, full_ranks, more in cases if kind == "sharded" else cases[:1]:
        free = resource.getrlimit(resource.RLIMIT_FSIZE)
        limit = SPACE if name != "rest" else 2 * SPACE
        if rank in full_ranks:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, free[1]))
        others = r" \(and 1 more ranks\)" if name == "both" else ""
        before = "there is no earlier one of this name" if name == "first" else "the earlier .* of this name is whole"
        why = rf"last.ckpt' was not saved: rank {full_ranks[0]}: .*File too large[^()]*{others}; {before}\.$"
        with patch.object(save, "_clean_up", late if rank else CLEAN_UP), pytest.raises(OSError, match=why) as caught:
            fabric.save(path, state(model, optimizer, **more))
        resource.setrlimit(resource.RLIMIT_FSIZE, free)
        assert caught.value.errno == errno.EFBIG
        if rank == 0:
            assert sorted(f.name for f in path.parent.iterdir()) == ([] if name == "first" else ["last.ckpt"])
            save.aside(path).mkdir()  # the next save begins
        fabric.barrier()
        assert save.aside(path).exists()
        if name == "first":
            train(fabric, model, optimizer, range(1), ranks)
            fabric.save(path, state(model, optimizer, 1))
            saved = everything(model, optimizer, fabric.strategy.precision)
            train(fabric, model, optimizer, range(1, 2), ranks)
    received = state(model, optimizer)
    fabric.load(path, received)
    assert received["step"] == 1
    assert_same(everything(model, optimizer, fabric.strategy.precision), saved, kind)


class AddsConfig(L.Callback):
    def on_save_checkpoint(self, trainer, module, checkpoint):
        checkpoint["config"] = Config()


def passes_the_options_on(rank, ranks, folder):
    """Trainer and Fabric read an object if torch's variable says so, and an edited file if the strategy says so."""
    trainer, *_ = fit("32-true", ranks, 1, "sharded", callbacks=[AddsConfig()], folder=folder / "logs")
    trainer.save_checkpoint(folder / "trainer.ckpt")
    fabric, model, optimizer = setup("32-true", ranks, verify_checkpoints=False)
    fabric.save(folder / "fabric.ckpt", state(model, optimizer, config=Config()))

    def load(by, verify=True):
        if by == "trainer":
            strategy = FSDP2Strategy(verify_checkpoints=verify)
            return fit("32-true", ranks, 2, strategy, path=folder / "trainer.ckpt")[1].losses
        fabric, model, optimizer = setup("32-true", ranks, verify_checkpoints=verify)
        return fabric.load(folder / "fabric.ckpt", state(model, optimizer))

    for by in ("trainer", "fabric"):
        meta = folder / f"{by}.ckpt" / "meta.pt"
        with pytest.raises(UnpicklingError, match=rf"{by}\.ckpt/meta\.pt' holds an object of .*Config.*{UNSAFE}=1"):
            load(by)
        os.environ[UNSAFE] = "1"
        assert load(by)
        if rank == 0:
            torch.save({**torch.load(meta), "note": "edited"}, meta)
        fabric.barrier()
        with pytest.raises(ValueError, match=rf"{by}\.ckpt/meta\.pt' is damaged, or belongs to another save"):
            load(by)
        assert load(by, verify=False)
        del os.environ[UNSAFE]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    launch(saves, 2, folder, folder)
    return folder


@pytest.fixture
def copy(saved, tmp_path):
    return shutil.copytree(saved / "sharded.1", tmp_path / "c")


def names(path):
    return re.escape(str(path))


def test_tools_of_torch_read_our_folders_of_these_files(saved, tmp_path):
    assert sorted(f.name for f in (saved / "sharded.1").iterdir()) == sorted(FILES)
    dcp_to_torch_save(saved / "sharded.2", tmp_path / "whole")
    truth = torch.load(saved / "sharded.truth", weights_only=True)
    assert_same(dict(torch.load(tmp_path / "whole", weights_only=True)["model"]), truth["model"], "torch's tool")


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_was_cut_or_is_missing(copy, name):
    os.truncate(copy / name, size := (copy / name).stat().st_size - 1)
    with pytest.raises(ValueError, match=rf"'{names(copy / name)}' is damaged.* {size}\b"):  # json says where it ended
        open_checkpoint(copy)
    (copy / name).unlink()
    expected = ValueError if name == "meta.pt" else FileNotFoundError  # without it the folder is no checkpoint at all
    with pytest.raises(expected, match=names(copy / name) if name != "meta.pt" else "is a folder without 'meta.pt'"):
        open_checkpoint(copy)


def flipped(path, bit):
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def test_every_flipped_bit_of_a_folder_is_noticed(copy, monkeypatch):
    monkeypatch.setattr(files, "READ_AT_ONCE", 1000)  # several blocks, as large files have
    source = random.Random(0)
    for name in FILES:
        for bit in source.sample(range(8 * (copy / name).stat().st_size), 40):
            flipped(copy / name, bit)
            with pytest.raises((ValueError, OSError), match=names(copy)) as caught:
                open_checkpoint(copy)
            assert name == FILES[-1] or str(copy / name) in str(caught.value)
            flipped(copy / name, bit)
    open_checkpoint(copy)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda stored: {"files": {n: {**e, "crc32": e["crc32"].upper()} for n, e in stored.items()}},
            "is damaged: the checksum of .* is not as it was",  # the same number, by a flipped bit of a letter
        ),
        (lambda stored: {"files": {"../x": stored["meta.pt"]}}, r"is damaged: the file '\.\./x' is not in the folder"),
        (lambda stored: {"files": stored.pop(SHARDS[1]) and stored}, f"is damaged: it does not list '{SHARDS[1]}'"),
        (lambda stored: {"files": stored.pop("meta.pt") and stored}, "is damaged: it does not list 'meta.pt'"),
        (lambda stored: {"format": 4}, r"has the format 4, .* reads 3\. Install a later version"),
    ],
    ids=["capitals", "outside", "no shard", "no meta.pt", "a later version"],
)
def test_a_manifest_that_was_not_written_so_is_refused(copy, change, message):
    stored = json.loads((copy / FILES[-1]).read_text())
    (copy / FILES[-1]).write_text(json.dumps({**stored, **change(stored["files"])}))
    with pytest.raises(ValueError, match=f"'{names(copy / FILES[-1])}' {message}"):
        open_checkpoint(copy)


def test_checksums_are_skipped_if_the_user_says_so(saved, copy, caplog):
    flipped(copy / SHARDS[0], 4 * (copy / SHARDS[0]).stat().st_size)  # in its middle
    with pytest.raises(ValueError, match="`verify_checkpoints=False` of the strategy loads the file without"):
        open_checkpoint(copy)
    with caplog.at_level("INFO"):
        open_checkpoint(copy, verify=False)
        assert caplog.messages == [f"fsdp2: the checksums of '{copy}' are not compared (`verify_checkpoints=False`)."]
        new = copy.rename(save.completed(copy))
        open_checkpoint(copy, verify=False)
    said = f"fsdp2: '{copy}' is being replaced, or a run was killed there; loading the new '{new}'."
    assert caplog.messages[1] == said


class Fitted(L.LightningModule):
    def __init__(self, several=False, order=1):
        super().__init__()
        self.linear = torch.nn.Linear(16, 8)
        self.automatic_optimization, self.order = not several, order

    def forward(self, batch):
        return self.linear(batch)

    def training_step(self, batch, _):
        loss = self(batch).square().mean()
        if self.automatic_optimization:
            return loss
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            optimizer.step()

    def configure_optimizers(self):
        groups = [{"params": [p], "lr": p.ndim * 1e-3} for p in self.parameters()][:: self.order]
        return [torch.optim.AdamW(group) for group in ([groups] if self.automatic_optimization else zip(groups))]


def with_a_buffer(strict=True):
    (module := Fitted()).register_buffer("extra", torch.ones(2))
    module.strict_loading = strict
    return module


def fitted(module, path=None, epochs=1, precision="32-true", strategy="fsdp2"):
    trainer = L.Trainer(**ON_CPU, strategy=strategy, max_epochs=epochs, precision=precision)
    trainer.fit(module, torch.randn(2, 4, 16), ckpt_path=path)
    return trainer


@pytest.mark.filterwarnings("ignore:.*returned `None`, this fit will run with no optimizer")
def test_what_differs_from_a_checkpoint_raises_or_is_left_alone_on_request(tmp_path):
    trainer, path = fitted(module := Fitted()), tmp_path / "c"
    trainer.save_checkpoint(path)
    with pytest.raises(TypeError, match=r"`storage_options=\{\}` is not valid with 'fsdp2'"):
        trainer.save_checkpoint(path, storage_options={})
    with pytest.raises(ValueError, match=r"c' has the state of 1 optimizers, the model has 2\."):
        fitted(Fitted(several=True), path)
    trainer.save_checkpoint(tmp_path / "weights", weights_only=True)
    module.linear.bias.data.zero_()
    trainer.predict(module, torch.randn(1, 4, 16), ckpt_path=tmp_path / "weights")
    assert module.linear.bias.full_tensor().all(), "loaded outside of a fit"
    for kind in ("sharded", "full"):
        two = [fitted(Fitted(several=True), strategy=FSDP2Strategy(state_dict_type=kind))]
        next(iter(two[0].optimizers[0].state.values()))["whole"] = torch.ones(3)  # which every rank has whole
        two[0].save_checkpoint(tmp_path / kind)
        two.append(fitted(Fitted(several=True), tmp_path / kind))
        assert [type(e["whole"]) for t in two for e in t.optimizers[0].state.values()] == [torch.Tensor] * 2
        assert_same(*(toy.full([o.state_dict() for o in trainer.optimizers]) for trainer in two), f"{kind}, of two")
    with pytest.raises(KeyError, match=r"Missing in the checkpoint: \['extra'\].*`strict_loading = False`"):
        fitted(with_a_buffer(), path)
    assert [g["lr"] for g in fitted(Fitted(order=-1), path).optimizers[0].param_groups] == [1e-3, 2e-3], "by names"
    fitted(other := with_a_buffer(strict=False), path).save_checkpoint(tmp_path / "more")
    with pytest.raises(KeyError, match=r"unexpected: \['extra'\]"):
        fitted(Fitted(), tmp_path / "more")
    assert_same(toy.full(dict(other.state_dict())), toy.full({**module.state_dict(), "extra": other.extra}), "loaded")
    for precision in ("bf16-mixed", "bf16-remainder"):
        for epochs, before in ((1, None), (2, tmp_path / precision)):
            (untrained := Fitted()).configure_optimizers = lambda: None
            trainer = fitted(untrained, before, epochs, precision)
            trainer.save_checkpoint(tmp_path / precision)
            assert trainer.current_epoch == epochs
    fabric, raw = toy.fabric_for("32-true", strategy="fsdp2"), tmp_path / "raw"
    model = fabric.setup_module(Fitted())
    torch.save({"linear.weight": torch.ones(8, 16), "linear.bias": torch.ones(8), "more": torch.ones(2)}, raw)
    with pytest.raises(KeyError, match=r"Missing in the checkpoint: \[\], unexpected: \['more'\]"):
        fabric.load_raw(raw, model)
    fabric.load_raw(raw, model, strict=False)
    assert model.linear.weight.full_tensor().eq(1).all()


def test_half_weights_that_were_edited_win_over_their_masters(tmp_path):
    fitted(Fitted(), None, 1, "bf16-remainder", FSDP2Strategy(state_dict_type="full")).save_checkpoint(tmp_path / "c")
    content = torch.load(tmp_path / "c", weights_only=True)
    edited, master = content["state_dict"]["linear.weight"], content["optimizer_states"][0]["state"][0]["master_param"]
    edited[0] = 7
    torch.save(content, tmp_path / "c")
    master[0] = 7  # is expected
    for precision in ("32-true", "bf16-remainder", "bf16-master"):
        trainer = fitted(Fitted(), tmp_path / "c", precision=precision)
        (weight, _) = trainer.precision_plugin.main_params(trainer.optimizers[0])
        assert torch.equal(weight.full_tensor(), master), precision


@pytest.mark.parametrize("precision", ["bf16-remainder", "32-true"])
def test_a_folder_of_format_1_resumes_with_exact_masters(precision):
    """Two ranks of release 0.2.0 wrote ``gone/format-1`` under 'bf16-remainder', after three steps."""
    expected = torch.load(OLD / "format-1.expected.pt", weights_only=True)
    trainer = L.Trainer(**ON_CPU, strategy="fsdp2", precision=precision, max_steps=3)
    trainer.fit(module := Fitted(), torch.randn(9, 4, 16), ckpt_path=OLD / "format-1")
    masters = [master.full_tensor() for master in trainer.precision_plugin.main_params(trainer.optimizers[0])]
    assert trainer.global_step == 3
    assert_same(dict(zip(expected, masters, strict=True)), expected, "masters")
    weights = {name: value.full_tensor() for name, value in module.state_dict().items()}
    assert_same(weights, {name: value.to(weights[name].dtype) for name, value in expected.items()}, "weights")


def test_a_folder_of_format_2_loads(tmp_path):
    """Two ranks wrote ``gone/format-2`` before headers of shards, and checksums beside the list of files, left."""
    path = shutil.copytree(OLD / "format-2", tmp_path / "c")
    expected = torch.load(OLD / "format-2.expected.pt", weights_only=True)
    assert open_checkpoint(path).rest == {"step": 3}
    source = open_weights(path)
    assert_same({name: source.whole(name) for name in source.shapes}, expected, "export")
    model = torch.nn.Linear(8, 4)
    assert_same(open_checkpoint(path).model("model", model.state_dict()), expected, "resume")
    (path / FILES[-1]).unlink()
    with pytest.raises(FileNotFoundError, match=r"lightning_lowprec.json' is missing"):
        open_checkpoint(path)
