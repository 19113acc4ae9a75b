"""FP8TorchAO: options, refusals, what it says, and what it does to a model."""

import copy
import logging
import sys

import lightning as L
import pytest
import torch
from torch import nn

from lightning_lowprec import FP8TorchAO
from lightning_lowprec.tools.cli import main
from tests import toys
from tests.quality import sqnr
from tests.toys import on_gpu


def coded_layers(model):
    return [layer for layer in model.modules() if type(layer).__name__ == "FP8Linear"]


class Stack(toys.Stack):
    def __init__(self, depth=3):
        super().__init__(lambda: toys.Block(32, norm=False, activation=torch.relu), depth, head=("head", 32, 16))


def fabric(plugin):
    return L.Fabric(accelerator="cpu", plugins=plugin)


def test_it_says_what_it_converted_and_that_cpu_emulates(caplog):
    caplog.set_level(logging.INFO)
    lightning = fabric(FP8TorchAO(keep=["blocks.0.up"]))
    for _ in range(2):  # as fit, then test
        lightning.setup(Stack())
    lines = [record.getMessage() for record in caplog.records]
    converted = (
        "fp8-hybrid: converted 5 of 7 linear layers, kept 2 in bf16: kept by 'blocks.0.up' ('blocks.0.up');"
        " output head (by name) ('head')."
    )
    assert lines.count(converted) == 1
    assert sum(line.startswith("fp8-hybrid: FP8 is emulated on cpu") for line in lines) == 1
    assert FP8TorchAO("mxfp8").how(torch.device("cpu")).startswith("MXFP8 is emulated on cpu: codes and scales")


def test_a_model_in_which_nothing_converts_or_nothing_compiles_raises():
    with pytest.raises(ValueError, match="would convert none of the 1 linear layers of Sequential") as caught:
        fabric(FP8TorchAO()).setup(nn.Sequential(nn.Conv2d(1, 1, 1), nn.Linear(10, 10)))
    assert "kept: features are no multiples of 16" in str(caught.value)
    assert "'bf16-mixed'" in str(caught.value)
    with pytest.raises(ValueError, match=r"would convert none of the 0 .*\n\(the model has no Linear\)"):
        fabric(FP8TorchAO()).setup(nn.BatchNorm2d(1))
    with pytest.raises(ValueError, match=r"`compile=True` found no blocks.*`compile=False`"):
        fabric(FP8TorchAO(compile=True)).setup(nn.Sequential(nn.Linear(16, 16)))


OLD, HOPPER = (8, 0), (9, 0)


def test_a_gpu_without_fp8_is_refused_with_the_remedy(monkeypatch):
    device = on_gpu(monkeypatch, OLD)
    message = r"cannot run: GPU X \(compute capability 8\.0\) has no FP8 tensor cores.*emulate=True"
    with pytest.raises(RuntimeError, match=message):
        toys.convert(FP8TorchAO(), Stack(), device)
    model = toys.convert(FP8TorchAO(emulate=True, compile=False), Stack(), device)
    assert all(layer.config.emulate for layer in coded_layers(model))


class Single(Stack):
    """A list of one block, and a list of one stage, which holds a stack and so is no list of blocks."""

    def __init__(self):
        super().__init__(depth=1)
        self.stages = nn.ModuleList([Stack(2)])


class Sequential(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(toys.Block(), toys.Block())
        self.small, self.one = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)), nn.Sequential(toys.Block())
        self.parts = nn.Sequential(nn.Sequential(nn.LayerNorm(32)), nn.Sequential(toys.Block(), toys.Block()))


def compiled_by_user():
    model = Stack()
    model.blocks[0].compile(backend="eager")
    return model


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (Stack, ["blocks.0", "blocks.1", "blocks.2"]),
        (compiled_by_user, ["blocks.0"]),
        (Single, ["blocks.0", "stages.0.blocks.0", "stages.0.blocks.1"]),
        (Sequential, ["blocks.0", "blocks.1", "parts.1.0", "parts.1.1"]),
    ],
)
def test_a_gpu_with_fp8_runs_kernels_and_compiles_repeated_blocks(make, expected, monkeypatch):
    device = on_gpu(monkeypatch, HOPPER)
    with pytest.warns(
        UserWarning, match=r"converted layers are expected to be slower.*, \.{4} `bf16-mixed` is expected"
    ):
        model = toys.convert(FP8TorchAO(), make(), device)
    assert not any(layer.config.emulate for layer in coded_layers(model))
    compiled = [fqn for fqn, module in model.named_modules() if module._compiled_call_impl is not None]
    assert compiled == expected


def test_layers_that_are_expected_to_be_slower_are_named_with_the_option_that_keeps_them(monkeypatch):
    device = on_gpu(monkeypatch, HOPPER)
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8192, 8192), *(nn.Linear(64, 64) for _ in range(3)))
    with pytest.warns(UserWarning, match=r"3 of 4 converted layers .*, 3 \(64 -> 64\)\. `plugins=FP8TorchAO\(keep="):
        toys.convert(FP8TorchAO(), model, device)
    monkeypatch.setattr(torch.version, "cuda", "12.9")  # blocks by cuBLASLt, of which nobody has published figures
    toys.convert(FP8TorchAO({"0": "tensorwise", "*": "block"}), model, device)


def test_without_registration_the_device_is_that_of_the_first_forward(monkeypatch):
    for module in ("set_up", "host"):
        monkeypatch.setattr(f"lightning_lowprec.precision.{module}.default_device", lambda: torch.device("cuda", 0))
    models = [Stack(), Stack()]  # on CPU still, in a process that has a GPU: they may move
    plugin = FP8TorchAO()
    for model in models:
        plugin.convert_module(model)
        assert coded_layers(model) == []
    with plugin.forward_context():
        assert torch.is_autocast_enabled("cpu")
    assert all(len(coded_layers(model)) == 6 for model in models)


@pytest.mark.parametrize(
    ("block", "operation"),
    [
        (lambda: nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32)), "relu"),
        (lambda: nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True), "attention"),
    ],
    ids=["Sequential", "TransformerEncoderLayer"],
)
def test_blocks_of_torchs_own_classes_are_compiled_whole(block, operation):
    torch._dynamo.reset()
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph.code)
        return graph.forward

    net = toys.Stack(block, depth=3, seed=0)
    eager = fabric(FP8TorchAO(compile=False)).setup(copy.deepcopy(net))
    model = fabric(FP8TorchAO(compile={"backend": backend})).setup(net)
    x = torch.randn(2, 8, 32)
    for _ in range(2):
        out = model(x)
        out.sum().backward()
    assert torch.equal(out, eager(x))
    assert len(graphs) == 2
    assert all(operation in graph for graph in graphs)


def test_a_frozen_weight_keeps_nothing_of_its_input():
    lightning = fabric(FP8TorchAO(weight_codes="per_gemm"))
    lightning.setup_module(layer := nn.Linear(64, 32).requires_grad_(False))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t), lightning.autocast():
        assert layer(torch.randn(21, 64, requires_grad=True)).requires_grad
    assert all(t.data_ptr() == layer.weight.data_ptr() for t in kept)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_kernels_on_cpu_run_if_this_torch_has_them_and_are_refused_if_not(recipe):
    x = torch.randn(16, 32)
    exact, kernels = (FP8TorchAO(recipe, emulate=emulate) for emulate in (True, False))
    expected = fabric(exact).setup(model := Stack())(x)
    if recipe == "rowwise" and torch.__version__ < "2.13":
        with pytest.raises(RuntimeError, match=r"no rowwise FP8 kernel for CPU \(2\.13 has\)\. Leave `emulate` alone"):
            fabric(kernels).setup(model)
        return
    assert sqnr(expected, fabric(kernels).setup(model)(x)) > 30.0, "the same codes; products rounded to bf16 (48 dB)"


@pytest.mark.filterwarnings("ignore:.*converted layers are expected to be slower:UserWarning")
@pytest.mark.parametrize(("device", "said"), [("cuda", 1), ("cpu", 0)])
def test_a_line_says_that_fp8_without_a_compiler_is_slow(device, said, caplog, monkeypatch):
    caplog.set_level(logging.INFO)
    toys.convert(FP8TorchAO(compile=False), Stack(), on_gpu(monkeypatch, HOPPER) if device == "cuda" else "cpu")
    assert caplog.text.count("fp8-hybrid: compile=False: no block is compiled. FP8 is slow") == said


@pytest.mark.slow
def test_a_torchao_that_is_missing_or_broken_is_named(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "torchao", None)  # what an absent distribution looks like to an import
        with pytest.raises(ModuleNotFoundError, match="needs torchao, which is not installed: `pip install"):
            L.Trainer(precision="fp8-hybrid", accelerator="cpu", logger=False)
        assert main(["doctor", "--for", "fp8-hybrid"]) == 1
        assert main(["doctor", "--for", "half-auto"]) == 0
    (tmp_path / "torchao").mkdir()
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchao"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(tmp_path))
    for why in ("AttributeError", "OSError", "AssertionError", "RuntimeError", "ModuleNotFoundError"):
        (tmp_path / "torchao" / "__init__.py").write_text(f"raise {why}")
        with pytest.raises(ImportError, match=rf"torchao, which is installed but does not import \({why}"):
            FP8TorchAO()
