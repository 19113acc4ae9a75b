"""Sharded models and sharded checkpoints: each tensor is gathered, or read, when its turn comes."""

import json
import resource
import warnings
from pathlib import Path

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy
from safetensors.torch import load_file
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import lightning_lowprec
from lightning_lowprec.serving.content import NOTHING
from lightning_lowprec.serving.export import Options, write
from lightning_lowprec.serving.sources import Source, live_model
from lightning_lowprec.tools.cli import main
from tests.fsdp2.ranks import run, server
from tests.serving.models import Module, config, llama, tensors
from tests.serving.test_formats import same_bits
from tests.toys import QUIET

pytestmark = [pytest.mark.slow, pytest.mark.distributed]
TOKENS = torch.arange(256).reshape(16, 16) % 96


def _train(rank, folder):
    warnings.simplefilter("ignore")
    found = {}
    for precision in ("fp8-hybrid", "msamp-o3"):
        module = Module()
        data = torch.utils.data.DataLoader(TOKENS, batch_size=4)
        options = {"precision": precision, "strategy": "fsdp2", "accelerator": "cpu", "devices": 2, **QUIET}
        trainer = L.Trainer(max_steps=2, **options)
        trainer.fit(module, data)
        sharded = sum(isinstance(p, DTensor) for p in module.parameters())
        module.net.config.save_pretrained(f"{folder}/config")
        trainer.save_checkpoint(f"{folder}/{precision}.ckpt")
        done = lightning_lowprec.export(
            module, f"{folder}/{precision}", format="compressed-tensors", dtype="fp32", progress=False
        )
        state = dict(lightning_lowprec.fp8_state(module, dtype="fp32"))
        found[precision] = sharded, done.same, state
    module = Module()
    L.Trainer(max_steps=2, **options).fit(module, data)
    state = dict(lightning_lowprec.fp8_state(module, dtype="fp32"))
    found["without"] = all(same_bits(state[name], found["msamp-o3"][2][name]) for name in state)
    _refused(rank, module, folder)
    _full_disk(rank, module.net, folder)
    _with_adapter(folder)
    return found


def _refused(rank, module, folder):
    """Every rank raises what rank 0 refuses."""
    Path(f"{folder}/of rank 1").mkdir(exist_ok=True)
    for out, tokenizer, kind, text in (
        ("msamp-o3", None, ValueError, "exists; expected a new folder"),
        ("config/config.json/out", None, ValueError, "expected a folder in a folder that exists"),
        ("n" * 300, None, OSError, "File name too long"),
        ("refused", f"{folder}/of rank {rank}", ValueError, "is no folder; expected one with a tokenizer"),
    ):
        with pytest.raises(kind, match=text):
            lightning_lowprec.export(module, f"{folder}/{out}", format="hf", tokenizer=tokenizer, progress=False)


def _full_disk(rank, model, folder):
    """Rank 0 may write 40 kB to a file; the first tensor has 49 kB. Every rank ends soon, and nothing is left."""
    plain, read = live_model(model), set()
    source = Source(plain.shapes, lambda name, *span: read.add(name) or plain.rows(name, *span))
    options = Options(format="hf", dtype="fp32", shard_bytes=60_000, progress=False)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, before[1]))
    try:
        with pytest.raises(OSError, match="File too large") as error:
            write(source, model, NOTHING, Path(f"{folder}/full"), options)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert str(error.value).startswith("rank 0: ") == (rank == 1)
    assert len(read) == 2, "of 12 tensors: the ranks ask each other after each 60 kB"
    dist.barrier()  # rank 0 has deleted its folder then
    assert [path.name for path in Path(folder).iterdir() if "full" in path.name] == []
    dist.barrier()  # every rank has looked, before rank 0 begins a new folder
    assert write(source, model, NOTHING, Path(f"{folder}/full"), options).tensors == 12
    assert len(tensors(Path(f"{folder}/full"))) == 12


def _with_adapter(folder):
    import peft

    torch.manual_seed(3)
    lora = peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
    model = peft.get_peft_model(llama(), lora)
    expected = {name: value.clone() for name, value in peft.get_peft_model_state_dict(model).items()}
    fully_shard(model)
    done = lightning_lowprec.export(model, f"{folder}/lora", format="hf", dtype="fp32", progress=False)
    assert done.adapter_layers == 1
    stored = load_file(f"{folder}/lora/adapter/adapter_model.safetensors")
    assert stored.keys() == expected.keys()
    assert all(torch.equal(stored[name], expected[name]) for name in stored)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    return folder, run(_train, 2, folder, str(folder))


@pytest.mark.parametrize("precision", ["fp8-hybrid", "msamp-o3"])
def test_every_rank_gets_whole_tensors_and_one_rank_writes_them(trained, precision):
    folder, ranks = trained
    stored = tensors(folder / precision)
    for rank in ranks:
        *counts, state = rank[precision]
        assert counts == [12, 7]
        assert state.keys() == stored.keys()
        assert all(same_bits(state[name], stored[name]) for name in stored)
        assert rank["without"]
    assert config(folder / precision)["architectures"] == ["LlamaForCausalLM"]


@pytest.mark.parametrize("precision", ["fp8-hybrid", "msamp-o3"])
def test_the_folder_of_shards_becomes_the_same_folder(trained, precision, tmp_path, capsys):
    source = (folder := trained[0]) / f"{precision}.ckpt"
    assert source.is_dir()
    options = [f"--model={folder / 'config'}", f"--precision={precision}", "--format=compressed-tensors"]
    written = ["export", str(source), str(tmp_path / "out"), *options, "--dtype=fp32"]
    assert main(written) == 0, capsys.readouterr().err
    live, read = tensors(folder / precision), tensors(tmp_path / "out")
    assert live.keys() == read.keys()
    assert all(same_bits(live[name], read[name]) for name in live)


class Exports(Callback):
    def __init__(self, folder):
        self.folder = folder

    def on_fit_end(self, trainer, module):
        warnings.simplefilter("ignore")
        text = lightning_lowprec.export(module, f"{self.folder}/out", progress=False).text()
        whole = Path(f"{self.folder}/out/model.safetensors").is_file()
        with pytest.raises(ValueError, match="exists; expected a new folder"):
            lightning_lowprec.export(module, f"{self.folder}/out", progress=False)
        if trainer.is_global_zero:
            lightning_lowprec.export(module, f"{self.folder}/of rank 0", progress=False)
        Path(f"{self.folder}/{trainer.global_rank}.json").write_text(json.dumps([text, whole]))


@pytest.mark.filterwarnings("ignore")
def test_every_rank_of_ddp_may_export_and_rank_0_writes(tmp_path):
    """By processes to which the callbacks are pickled, as by ``ddp_spawn``; these are forked from one with imports."""
    server()
    data = torch.utils.data.DataLoader(TOKENS, batch_size=1)
    callbacks = [Exports(str(tmp_path))]
    options = {"precision": "fp8-rowwise", "devices": 2, "accelerator": "cpu", **QUIET}
    limits = {"max_epochs": 1, "limit_train_batches": 1, "num_sanity_val_steps": 0}
    strategy = DDPStrategy(start_method="forkserver")
    trainer = L.Trainer(**limits, callbacks=callbacks, strategy=strategy, **options)
    trainer.fit(Module(), data, data)
    assert trainer.callback_metrics["loss"].isfinite()
    (text, whole), other = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    assert other == [text, whole] == [text, True]
    assert "the codes are those of the last step, bit for bit" in text
    ours, alone = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "of rank 0"))
    assert ours.keys() == alone.keys()
    assert not list(tmp_path.glob(".*"))
