"""Sharded models and sharded checkpoints: each tensor is gathered, or read, when its turn comes."""

import warnings

import lightning as L
import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

import lightning_lowprec
from lightning_lowprec import LowPrecisionEval
from lightning_lowprec.serving.served_layers import ServedLayers
from lightning_lowprec.tools.cli import main
from tests.fsdp2.ranks import run
from tests.serving.models import config, decoded, llama, tensors

pytestmark = pytest.mark.distributed
TOKENS = torch.arange(256).reshape(16, 16) % 96
DOWN = "model.layers.0.mlp.down_proj"
QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}


class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = llama()

    def forward(self, tokens):
        return self.net(tokens)

    def training_step(self, tokens, _):
        return self.net(tokens, labels=tokens).loss

    def validation_step(self, tokens, _):
        self.log("loss", self.net(tokens, labels=tokens).loss, sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def _seen_by_down(module):
    """Input and output of one layer."""
    seen = []

    def look(layer, args, output):
        seen.extend((*args, output))

    hook = module.net.get_submodule(DOWN).register_forward_hook(look)
    module(TOKENS[:4])
    hook.remove()
    return seen


def _train(rank, folder):
    warnings.simplefilter("ignore")
    found = {}
    for precision in ("fp8-tensorwise", "msamp-o3"):
        module = Module()
        data = torch.utils.data.DataLoader(TOKENS, batch_size=4)
        evaluation = LowPrecisionEval(prefix="served/", weights_only=True)
        options = {"precision": precision, "strategy": "fsdp2", "accelerator": "cpu", "devices": 2, **QUIET}
        trainer = L.Trainer(max_steps=2, callbacks=[evaluation], **options)
        trainer.fit(module, data, data)
        (losses,) = trainer.validate(module, data, verbose=False)
        sharded = sum(isinstance(p, DTensor) for p in module.parameters())
        module.net.config.save_pretrained(f"{folder}/config")
        trainer.save_checkpoint(f"{folder}/{precision}.ckpt")
        done = lightning_lowprec.export(
            module, f"{folder}/{precision}", format="compressed-tensors", dtype="fp32", progress=False
        )
        state = dict(lightning_lowprec.fp8_state(module, dtype="fp32"))
        layers = ServedLayers(module, evaluation._format, weights_only=True, options=None)
        with torch.no_grad(), layers.swapped():
            seen = _seen_by_down(module)
        local = sum(weight._codes.to_local().nbytes for _, weight, _ in layers._linears)
        found[precision] = sharded, done.same, state, losses, seen, local
    module = Module()
    L.Trainer(max_steps=2, **options).fit(module, data)
    state = dict(lightning_lowprec.fp8_state(module, dtype="fp32"))
    found["without"] = all(same(state[name], found["msamp-o3"][2][name]) for name in state)
    return found


def same(a, b):
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    return folder, run(_train, 2, folder, str(folder))


@pytest.mark.parametrize("precision", ["fp8-tensorwise", "msamp-o3"])
def test_every_rank_gets_whole_tensors_and_one_rank_writes_them(trained, precision):
    folder, ranks = trained
    stored = tensors(folder / precision)
    for rank in ranks:
        sharded, unchanged, state, *_ = rank[precision]
        assert sharded == 12
        assert unchanged == 7
        assert state.keys() == stored.keys()
        assert all(same(state[name], stored[name]) for name in stored)
    assert config(folder / precision)["architectures"] == ["LlamaForCausalLM"]


@pytest.mark.parametrize("precision", ["fp8-tensorwise", "msamp-o3"])
def test_evaluation_of_a_sharded_model_is_that_of_its_export_with_codes_cut_over_the_ranks(trained, precision):
    folder, ranks = trained
    weights = {name: w for name, w in decoded(folder / precision, "compressed-tensors").items() if "_proj" in name}
    for rank in ranks:
        *_, losses, (input, output), local = rank[precision]
        assert torch.equal(output, F.linear(input, weights[f"{DOWN}.weight"].to(input.dtype)))
        assert local == sum(weight.numel() for weight in weights.values()) / 2
        assert losses["served/loss"] == pytest.approx(losses["loss"], rel=0.01)
        assert losses["served/loss"] != losses["loss"]
        assert rank["without"]


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
