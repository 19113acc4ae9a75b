"""`lowprec plan --fits`: verdicts, refusals, the command; tests/ledger/test_simulated_memory.py has the peaks."""

import json
import logging

import pytest
import torch
from torch import nn

from lightning_lowprec.tools.cli import main
from lightning_lowprec.tools.fits import fake_gpu, simulation
from lightning_lowprec.tools.fits.report import _verdict, fits, needed, read_gpu
from lightning_lowprec.tools.fits.simulation import Setting, Simulator, inputs_of, simulate
from tests import toys

pytestmark = pytest.mark.slow

SIDE, ROWS = 512, 16
TINY = {
    "model_type": "llama", "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 1024, "num_hidden_layers": 5,
}  # fmt: skip


class Stack(toys.Stack):
    def __init__(self, depth=5):
        super().__init__(lambda: toys.Block(SIDE, norm=False, activation=torch.relu), depth)
        self.example_input_array = torch.zeros(1, SIDE, device="meta")


class Square(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(SIDE, SIDE, bias=False)
        self.example_input_array = torch.zeros(1, SIDE, device="meta")

    def forward(self, x):
        return self.linear(x)


class AsksForValues(Square):
    def forward(self, x):
        return self.linear(x[x[:, 0].nonzero()[:, 0]])


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(TINY))
    return str(path)


@pytest.fixture
def shallow(monkeypatch):
    monkeypatch.setattr(simulation, "DEPTHS", (1, 2))


def on_meta(make, *args, **kwargs):
    with torch.device("meta"):
        return make(*args, **kwargs)


def test_the_largest_batch_fits_and_one_more_does_not(shallow):
    size = 400 * 10**6 + 10**9
    model = on_meta(Stack)
    for block in model.blocks[:2]:
        block.requires_grad_(False)  # unlike the others
    report = fits(model, f"{size // 10**6}MB", names=["bf16-mixed", "bf16-sr"], batch=64)
    assert report.extrapolated.endswith(" to all 3 equal blocks of 'blocks'.")
    assert [verdict.fits for verdict in report.verdicts] == [True, True]
    first, second = report.verdicts
    assert (first.precision, first.largest_batch > second.largest_batch) == ("bf16-sr", True)
    simulator = Simulator(model, inputs_of(model))
    for rows, enough in ((first.largest_batch, True), (first.largest_batch + first.largest_batch // 49 + 1, False)):
        again = _verdict(simulator, Setting(precision="bf16-sr", batch=rows), size)
        assert again.fits is enough
        assert (needed(again.total) <= size) is enough


def test_one_rank_of_fsdp2_holds_its_share(shallow):
    model = on_meta(Stack)
    report = fits(model, "80GB", names=["bf16-remainder", "bf16-sr"], devices=4, batch=64)
    total = sum(p.numel() for p in model.parameters())
    found = {verdict.precision: verdict.peak["state"] for verdict in report.verdicts}
    assert found["bf16-remainder"] == pytest.approx(14 * total / 4, rel=0.08)
    assert found["bf16-sr"] == pytest.approx(12 * total / 4, rel=0.1)
    model = on_meta(Stack, 2)
    model.blocks[0].requires_grad_(False)  # the code of this block has no backward
    compiled = fits(model, "80GB", names=["fp8-hybrid"], devices=4, batch=64)
    verdicts = [*report.verdicts, *compiled.verdicts]
    assert all(verdict.at.startswith(("forward", "backward", "optimizer")) for verdict in verdicts)


def test_a_gpu_is_read_and_simulated_and_its_refusal_is_that_of_a_run():
    sizes = {"141GB": 141e9, "80GiB": 80 * 2**30, "1.5 TB": 1.5e12, "NVIDIA H100": 80e9, "GeForce rtx-4090": 24e9}
    sizes |= {"RTX 6000 Ada": 48e9, "rtx_pro_6000": 96e9, "RTX A6000": 48e9, "Tesla T4": 16e9}
    assert {text: read_gpu(text).size for text in sizes} == sizes
    a100, h100 = (fits(Square(), gpu, names=["fp8-hybrid"]).verdicts[0].refused for gpu in ("A100", "H100"))
    assert a100.startswith("simulated GPU (compute capability 8.0) has no FP8 tensor cores")
    assert "Use 'bf16-mixed'" in a100
    assert h100 is None


def test_the_command(shallow, config, capsys):
    words = ["plan", config, "--fits", "2GB", "--seq", "128", "--batch", "2"]
    assert main([*words, "--precisions", "bf16-sr,msamp-o2,fp8-current-te", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["simulated"] is True
    assert "all 5 equal blocks" in data["extrapolated"]
    assert data["margin"] == {"share": 0.05, "bytes": 10**9}
    assert {row["precision"]: row["fits"] for row in data["verdicts"]} == {
        "bf16-sr": True, "msamp-o2": False, "fp8-current-te": False,
    }  # fmt: skip
    assert main([*words, "--precisions", "msamp-o2,fp8-current-te"]) == 1
    text = capsys.readouterr().out
    assert "  peak, at least  " in text
    assert f"{data['parameters'] / 1e6:.3g} M parameters; batch 2 per GPU (--batch)" in text
    said = " ".join(text.split())
    assert "Simulated, not measured" in said
    assert "subtract the gradients" in said
    assert "AdamW (foreach, the default of torch)" in said
    assert "5% of the peak + 1 GB" in said
    assert "not simulated: msamp-o2" in said
    assert "the kernels of Transformer Engine do not run on tensors without values" in said
    tight = ["--fits=1GB", "--seq=32", "--precisions=bf16-sr,bf16-8bit", "--fused", "--checkpointing", "--devices=2"]
    assert main(["plan", config, *tight, "--strategy=fsdp2"]) == 1
    said = " ".join(capsys.readouterr().out.split())
    for words in (
        "AdamW (fused), blocks computed again in the backward, 2 GPUs with strategy='fsdp2', state of one computed.",
        " bf16-8bit: the model is loaded in bf16, with `dtype=torch.bfloat16`.",
        "None fits: the least needs at least 1.",
        "--fused, --checkpointing, a name that ends in -8bit, and --devices 2 --strategy fsdp2 need less",
    ):
        assert words in said


def test_what_is_refused_names_the_way_out(config, capsys):
    words = ["plan", config, "--fits"]
    for more, message in (
        (["lots", "--seq", "8"], "`fits='lots'` is not valid; expected a size such as 141GB"),
        (["24GB"], "`seq` is missing: LlamaForCausalLM reads tokens"),
        (["24GB", "--seq", "8", "--devices", "4"], "`devices=4` needs `--strategy fsdp2`"),
        (["24GB", "--seq", "8", "--batch", "0"], "`batch=0` is not valid"),
        (["24GB", "--seq", "8", "--precisions", "fp9"], "fp9"),
    ):
        assert main([*words, *more]) == 2
        assert message in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"nothing tells what Linear reads. Name a LightningDataModule"):
        fits(on_meta(nn.Linear, 4, 4), "24GB")


def test_torch_knows_every_operation_of_autocast_and_nothing_is_left_behind():
    registered = torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCUDA")
    names = {name.removeprefix("aten::").partition(".")[0] for name in registered}
    assert names >= fake_gpu._IN_HALF | fake_gpu._IN_WIDEST

    before = torch.nn.functional.linear, torch.cuda.is_available(), torch.compile
    model = on_meta(Square)
    setting = Setting(precision="fp8-hybrid", batch=ROWS, fused=True)
    rows = torch.zeros(4, SIDE)  # as many bytes as the example has
    peaks = simulate(model, inputs_of(model), setting)
    assert simulate(model, inputs_of(model, rows), setting) == peaks
    assert peaks["optimizer"]["gradients"] == 4 * SIDE**2
    assert peaks["optimizer"]["state"] >= 8 * SIDE**2, "which the first step makes, and the second one has"
    verdict = fits(on_meta(AsksForValues), "24GB", names=["32-true"]).verdicts[0]
    assert all(words in verdict.refused for words in ("aten.nonzero.default needs values", "lowprec compare"))
    assert (torch.nn.functional.linear, torch.cuda.is_available(), torch.compile) == before
    assert logging.root.manager.disable == logging.NOTSET
    x = torch.ones(2, 2, requires_grad=True)
    (x @ x).sum().backward()
    assert x.grad.eq(4).all()
    assert torch._C.DispatchKey.AutocastCUDA not in torch.ops.aten.mm.default.py_kernels
