"""Sharded models and sharded checkpoints: each tensor is gathered, or read, when its turn comes."""

import warnings

import lightning as L
import pytest
import torch
from torch.distributed.tensor import DTensor

import lightning_lowprec
from lightning_lowprec.tools.cli import main
from tests.fsdp2.ranks import run
from tests.serving.models import config, llama, tensors

pytestmark = pytest.mark.distributed
QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}


class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = llama()

    def training_step(self, tokens, _):
        return self.net(tokens, labels=tokens).loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def _train(rank, folder):
    warnings.simplefilter("ignore")
    found = {}
    for precision in ("fp8-tensorwise", "msamp-o3"):
        module = Module()
        data = torch.utils.data.DataLoader(torch.arange(256).reshape(16, 16) % 96, batch_size=4)
        trainer = L.Trainer(precision=precision, strategy="fsdp2", accelerator="cpu", devices=2, max_steps=2, **QUIET)
        trainer.fit(module, data)
        sharded = sum(isinstance(p, DTensor) for p in module.parameters())
        module.net.config.save_pretrained(f"{folder}/config")
        trainer.save_checkpoint(f"{folder}/{precision}.ckpt")
        done = lightning_lowprec.export(
            module, f"{folder}/{precision}", format="compressed-tensors", dtype="fp32", progress=False
        )
        state = dict(lightning_lowprec.fp8_state(module, dtype="fp32"))
        found[precision] = sharded, done.same, state
    return found


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    return folder, run(_train, 2, folder, str(folder))


@pytest.mark.parametrize("precision", ["fp8-tensorwise", "msamp-o3"])
def test_every_rank_gets_whole_tensors_and_one_rank_writes_them(trained, precision):
    folder, ranks = trained
    stored = tensors(folder / precision)
    for rank in ranks:
        sharded, same, state = rank[precision]
        assert sharded == 12
        assert same == 7
        assert state.keys() == stored.keys()
        assert all(torch.equal(state[name].view(torch.uint8), stored[name].view(torch.uint8)) for name in stored)
    assert config(folder / precision)["architectures"] == ["LlamaForCausalLM"]


@pytest.mark.parametrize("precision", ["fp8-tensorwise", "msamp-o3"])
def test_the_folder_of_shards_becomes_the_same_folder(trained, precision, tmp_path, capsys):
    folder, _ = trained
    source = folder / f"{precision}.ckpt"
    assert source.is_dir()
    options = [
        "--format=compressed-tensors",
        f"--model={folder / 'config'}",
        f"--precision={precision}",
        "--dtype=fp32",
    ]
    assert main(["export", str(source), str(tmp_path / "out"), *options]) == 0, capsys.readouterr().err
    live, read = tensors(folder / precision), tensors(tmp_path / "out")
    assert live.keys() == read.keys()
    assert all(torch.equal(live[name].view(torch.uint8), read[name].view(torch.uint8)) for name in live)
