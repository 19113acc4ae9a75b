"""`lowprec parity`: differences of log-probabilities, against a comparison by hand."""

import json
import warnings

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM

import lightning_lowprec
from lightning_lowprec import FP8TorchAO, names
from lightning_lowprec.tools.cli import main
from tests.serving.models import llama


@pytest.fixture(autouse=True)
def quiet_transformers():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A checkpoint, and folders: the codes of the run, those of another format, and one with another weight."""
    folder = tmp_path_factory.mktemp("parity")
    model = llama()
    torch.save(model.state_dict(), folder / "last.ckpt")
    converted(model)
    for format, dtype in (
        ("compressed-tensors", "fp32"),
        ("torchao", "fp32"),
        ("hf-fp8-block", "fp32"),
        ("hf", "bf16"),
    ):
        lightning_lowprec.export(model, folder / format, format=format, dtype=dtype, progress=False)
    return folder


def converted(model, plugin=None):
    plugin = plugin or FP8TorchAO("rowwise")
    plugin.bind_device(torch.device("cpu"))
    plugin.convert_module(model)
    return model.eval()


def log_probabilities(model, tokens):
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        logits = model(tokens).logits[0]
    return torch.nn.functional.log_softmax(logits[:-1].double(), -1)[torch.arange(127), tokens[0, 1:]]


def parity(folder, format, *options):
    return main(["parity", str(folder / "last.ckpt"), str(folder / format), "--precision=fp8-rowwise", *options])


@pytest.mark.parametrize("format", ["compressed-tensors", "torchao"])
def test_the_codes_of_the_last_step_give_the_forward_that_trained(exported, format, capsys):
    assert parity(exported, format) == 0, capsys.readouterr()
    said = capsys.readouterr().out
    assert "log-probabilities of 127 tokens" in said
    assert [line.split()[-2:] for line in said.splitlines() if line.startswith("weights:")] == [["0", "0"]]


def test_the_codes_of_blocks_give_the_forward_that_trained(tmp_path, capsys):
    model = llama()
    torch.save(model.state_dict(), tmp_path / "last.ckpt")
    converted(model, names.create("fp8-block"))
    lightning_lowprec.export(model, tmp_path / "out", format="hf-fp8-block", dtype="fp32", progress=False)
    command = ["parity", str(tmp_path / "last.ckpt"), str(tmp_path / "out"), "--precision=fp8-block", "--json"]
    assert main(command) == 0
    assert json.loads(capsys.readouterr().out)["weights"] == {"mean": 0.0, "max": 0.0}


def test_both_differences_are_those_computed_by_hand(exported, capsys):
    assert parity(exported, "hf-fp8-block", "--json") == 1, "codes with other scales are rounded again"
    found = json.loads(capsys.readouterr().out)
    tokens = torch.randint(0, 96, (1, 128), generator=torch.Generator().manual_seed(0))
    trained = log_probabilities(converted(llama()), tokens)
    read = AutoModelForCausalLM.from_pretrained(exported / "hf-fp8-block", dtype="auto").eval()
    with torch.no_grad():
        logits = read(tokens).logits[0]
    served = torch.log_softmax(logits[:-1].double(), -1)[torch.arange(127), tokens[0, 1:]]
    off = (trained.double() - served.double()).abs()
    assert found["served"] == {"mean": pytest.approx(off.mean().item()), "max": pytest.approx(off.max().item())}
    decoded = LlamaForCausalLM(llama().config)
    decoded.load_state_dict({name: value.float() for name, value in by_hand(exported / "hf-fp8-block").items()})
    off = (trained.double() - log_probabilities(converted(decoded), tokens).double()).abs()
    assert found["weights"] == {"mean": pytest.approx(off.mean().item()), "max": pytest.approx(off.max().item())}
    assert found["holds"] is False
    assert "'weights'" in found["failures"][0]


def by_hand(folder):
    from safetensors.torch import load_file

    stored = load_file(folder / "model.safetensors")
    scales = {name: stored.pop(name) for name in [*stored] if name.endswith("_scale_inv")}
    for name, grid in scales.items():
        weight = stored[name.removesuffix("_scale_inv")]
        spread = torch.kron(grid, torch.ones(128, 128))[: weight.shape[0], : weight.shape[1]]
        stored[name.removesuffix("_scale_inv")] = weight.float() * spread
    return stored


def test_bounds_decide_the_status(exported, capsys):
    assert parity(exported, "hf", "--max_difference=10", "--max_served=10") == 0
    assert "served: by transformers" in capsys.readouterr().out
    assert parity(exported, "hf", "--max_difference=10", "--max_served=0") == 1
    assert "parity failed: the largest difference of 'served' is" in capsys.readouterr().out
