"""FP8TorchAO: options, refusals, what it says, and what it does to a model."""

import copy
import logging
import os
import pickle
from pathlib import Path

import lightning as L
import pytest
import torch
from torch import nn

from lightning_lowprec import FP8TorchAO
from lightning_lowprec.precision.fp8 import compile_blocks
from lightning_lowprec.precision.loss_scale import LossScale
from lightning_lowprec.tools.cli import main
from lightning_lowprec.torchao.linear import FP8Linear, coded_layers
from tests import forked, toys

ROOT = Path(__file__).parents[2]


class Stack(toys.Stack):
    def __init__(self, depth=3):
        super().__init__(lambda: toys.Block(32, norm=False, activation=torch.relu), depth, head=("head", 32, 16))


def fabric(plugin):
    return L.Fabric(accelerator="cpu", plugins=plugin)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"recipe": "tensorwize"},
            r"`recipe='tensorwize'` is not valid; expected 'tensorwise', 'rowwise', 'rowwise_",
        ),
        ({"base": "fp32"}, r"`base='fp32'` is not valid; expected one of: bf16, fp16\."),
        ({"fp8_format": "e5m2"}, r"`fp8_format='e5m2'` is not valid; expected one of: None, hybrid, e4m3\."),
        ({"recipe": "rowwise", "base": "fp16"}, r"`base='fp16'` is not valid with `recipe='rowwise'`.*through bf16"),
        ({"recipe": "rowwise", "fp8_format": "hybrid"}, r"`fp8_format='hybrid'` is not valid with `recipe='rowwise'`"),
        ({"base": "fp16", "loss_scale": None}, r"`loss_scale=None` is not valid with fp16.*underflow"),
        ({"loss_scale": "dynamic"}, r"`loss_scale='dynamic'` is not valid with bf16, which has the range of float32"),
        (
            {"base": "fp16", "loss_scale": -1.0},
            r"`loss_scale=-1\.0` is not valid; expected None, 'auto', 'dynamic', a number above 0",
        ),
        ({"compile": "always"}, r"`compile='always'` is not valid; expected 'auto', True, False or a mapping"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        FP8TorchAO(**options)


def test_keep_is_a_list():
    with pytest.raises(ValueError, match=r"`keep='lm_head'` is not valid; expected a list"):
        FP8TorchAO(keep="lm_head")


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({}, "fp8-hybrid"),
        ({"base": "fp16"}, "fp8-hybrid-fp16"),
        ({"fp8_format": "e4m3"}, "fp8-e4m3"),
        ({"recipe": "rowwise"}, "fp8-rowwise"),
        ({"recipe": "rowwise_with_gw_hp"}, "fp8-rowwise-gw-hp"),
    ],
)
def test_a_plugin_made_by_hand_has_the_name_of_the_table(options, name):
    assert FP8TorchAO(**options).precision == name


def test_it_says_what_it_converted_and_that_cpu_emulates(caplog):
    caplog.set_level(logging.INFO)
    fabric(FP8TorchAO(keep=["blocks.0.up"])).setup(Stack())
    lines = [record.getMessage() for record in caplog.records]
    converted = (
        "fp8-hybrid: converted 5 of 7 linear layers, kept 2 in bf16: kept by 'blocks.0.up' ('blocks.0.up');"
        " output head (by name) ('head')."
    )
    assert converted in lines
    assert any(line.startswith("fp8-hybrid: FP8 is emulated on cpu") for line in lines)


def test_lines_name_the_format_that_runs():
    cpu = torch.device("cpu")
    assert FP8TorchAO("mxfp8").how(cpu).startswith("MXFP8 is emulated on cpu: codes and scales")
    assert FP8TorchAO("rowwise").how(cpu).startswith("FP8 is emulated on cpu: codes and scales")


def test_a_model_in_which_nothing_converts_raises_with_the_plan():
    with pytest.raises(ValueError, match="would convert none of the 1 linear layers of Sequential") as caught:
        fabric(FP8TorchAO()).setup(nn.Sequential(nn.Conv2d(1, 1, 1), nn.Linear(10, 10)))
    assert "kept: features are no multiples of 16" in str(caught.value)
    assert "'bf16-mixed'" in str(caught.value)
    with pytest.raises(ValueError, match=r"would convert none of the 0 .*\n\(the model has no Linear\)"):
        fabric(FP8TorchAO()).setup(nn.BatchNorm2d(1))


def test_a_keep_that_matches_nothing_raises_at_setup():
    with pytest.raises(ValueError, match=r"`keep='blocks.9'` matches no Linear"):
        fabric(FP8TorchAO(keep=["blocks.9"])).setup(Stack())


OLD, HOPPER = (8, 0), (9, 0)


def on_gpu(monkeypatch, capability):
    """Only the two facts that decide: what the GPU is called and what it can do."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "GPU X")
    return torch.device("cuda", 0)


def test_a_gpu_without_fp8_is_refused_with_the_remedy(monkeypatch):
    device = on_gpu(monkeypatch, OLD)
    plugin = FP8TorchAO()
    plugin.bind_device(device)
    message = r"cannot run: GPU X \(compute capability 8\.0\) has no FP8 tensor cores.*emulate=True"
    with pytest.raises(RuntimeError, match=message):
        plugin.convert_module(Stack())
    emulating = FP8TorchAO(emulate=True, compile=False)
    emulating.bind_device(device)
    assert all(layer.config.emulate for layer in coded_layers(emulating.convert_module(Stack())))


def test_a_gpu_with_fp8_runs_kernels_and_compiles_repeated_blocks(monkeypatch):
    plugin = FP8TorchAO()
    plugin.bind_device(on_gpu(monkeypatch, HOPPER))
    with pytest.warns(UserWarning, match=r"6 of 6 converted layers are expected to be slower.*keep="):
        model = plugin.convert_module(Stack())
    assert not any(layer.config.emulate for layer in coded_layers(model))
    assert all(block._compiled_call_impl is not None for block in model.blocks)
    assert model._compiled_call_impl is None
    untouched = FP8TorchAO()
    untouched.bind_device(plugin.modules.device)
    user_compiled = Stack()
    user_compiled.blocks[0].compile(backend="eager")
    with pytest.warns(UserWarning, match="are expected to be slower"):
        untouched.convert_module(user_compiled)
    assert user_compiled.blocks[1]._compiled_call_impl is None


class Single(Stack):
    """A list of one block, and a list of one stage, which holds a stack and so is no list of blocks."""

    def __init__(self):
        super().__init__(depth=1)
        self.stages = nn.ModuleList([Stack(2)])


def test_blocks_of_a_sequential_are_compiled_and_small_layers_in_one_are_not(monkeypatch):
    """timm keeps its blocks in an nn.Sequential."""
    plugin = FP8TorchAO()
    plugin.bind_device(on_gpu(monkeypatch, HOPPER))
    small = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    parts = nn.Sequential(nn.Sequential(nn.LayerNorm(32)), nn.Sequential(toys.Block(), toys.Block()))
    model = nn.ModuleDict({"blocks": nn.Sequential(toys.Block(), toys.Block()), "small": small, "parts": parts})
    with pytest.warns(UserWarning, match="are expected to be slower"):
        plugin.convert_module(model)
    compiled = [fqn for fqn, module in model.named_modules() if module._compiled_call_impl is not None]
    assert compiled == ["blocks.0", "blocks.1", "parts.1.0", "parts.1.1"]


def test_a_single_block_is_compiled(monkeypatch):
    plugin = FP8TorchAO()
    plugin.bind_device(on_gpu(monkeypatch, HOPPER))
    with pytest.warns(UserWarning, match="are expected to be slower"):
        model = plugin.convert_module(Single())
    compiled = [fqn for fqn, module in model.named_modules() if module._compiled_call_impl is not None]
    assert compiled == ["blocks.0", "stages.0.blocks.0", "stages.0.blocks.1"]


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


def test_compile_on_request_is_equal_to_eager():
    losses = []
    for compile in (False, {"backend": "aot_eager"}):
        torch.manual_seed(0)
        model, optimizer = Stack(), None
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = fabric(FP8TorchAO(compile=compile)).setup(model, optimizer)
        x = torch.randn(24, 32, generator=torch.Generator().manual_seed(1))
        for _ in range(3):
            loss = model(x).pow(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss)
        assert (model.module.blocks[0]._compiled_call_impl is not None) == bool(compile)
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    ("block", "operation"),
    [
        (lambda: nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32)), "relu"),
        (lambda: nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True), "attention"),
    ],
    ids=["Sequential", "TransformerEncoderLayer"],
)
def test_blocks_of_torchs_own_classes_are_compiled_whole(block, operation):
    """Not in pieces: one graph for the first block, whose input needs no gradient, and one for all others."""
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


def test_compile_on_request_needs_repeated_blocks():
    with pytest.raises(ValueError, match=r"`compile=True` found no blocks.*`compile=False`"):
        fabric(FP8TorchAO(compile=True)).setup(nn.Sequential(nn.Linear(16, 16)))


def test_fp8_eval_off():
    for fp8_eval in (True, False):
        torch.manual_seed(0)
        model = fabric(FP8TorchAO(fp8_eval=fp8_eval)).setup(Stack()).eval()
        plain = Stack()
        plain.load_state_dict(model.state_dict())
        x = torch.randn(16, 32)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            exact = plain(x.bfloat16()).float()
        assert torch.equal(model(x), exact) is not fp8_eval


def test_converting_again_changes_nothing():
    model = Stack()
    plugin = FP8TorchAO()
    plugin.convert_module(model)
    before = [(type(m), dict(m.__dict__)) for m in model.modules()]
    parameters = list(model.parameters())
    plugin.convert_module(model)
    after = [(type(m), dict(m.__dict__)) for m in model.modules()]
    assert [t for t, _ in before] == [t for t, _ in after]
    assert [d.keys() for _, d in before] == [d.keys() for _, d in after]
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))


def test_another_recipe_replaces_the_first():
    model = Stack()
    FP8TorchAO().convert_module(model)
    FP8TorchAO(recipe="rowwise", keep=["up"]).convert_module(model)
    assert [type(block.up) for block in model.blocks] == [nn.Linear] * 3
    granularity = model.blocks[0].down.config.cast_config_input.scaling_granularity
    assert granularity.value == "axiswise"


def test_converted_models_copy_and_pickle():
    model = fabric(FP8TorchAO()).setup(Stack()).module
    x = torch.randn(16, 32)
    for clone in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(clone.blocks[0].up) is FP8Linear
        assert torch.equal(clone(x), model(x))


def test_the_state_names_the_backend_and_holds_plain_values():
    assert FP8TorchAO().state_dict() == {"backend": "torchao"}
    scaled = FP8TorchAO(base="fp16", loss_scale=LossScale(initial=8.0)).state_dict()
    assert scaled["loss_scale"]["scale"] == 8.0


def test_an_optimizer_built_before_setup_trains_the_converted_layers():
    model = Stack()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    before = {name: p.clone() for name, p in model.named_parameters()}
    wrapped, optimizer = fabric(FP8TorchAO()).setup(model, optimizer)
    wrapped(torch.randn(16, 32)).pow(2).sum().backward()
    optimizer.step()
    assert not any(torch.equal(before[name], p) for name, p in model.named_parameters())


NOT_IMPORTED = """
import sys
for name in [name for name in sys.modules if name.partition(".")[0] == "torchao"]:  # which the server imports
    del sys.modules[name]
"""
MISSING = """
sys.modules["torchao"] = None  # what an absent distribution looks like to an import
import lightning as L, lightning_lowprec
try:
    L.Trainer(precision="fp8-hybrid", accelerator="cpu", logger=False)
except ModuleNotFoundError as error:
    assert "needs torchao, which is not installed: `pip install" in str(error), error
else:
    raise SystemExit("accepted")
L.Trainer(precision="half-auto", accelerator="cpu", logger=False, enable_checkpointing=False)
from lightning_lowprec.tools.cli import main
assert main(["doctor", "--for", "fp8-hybrid"]) == 1
assert main(["doctor", "--for", "half-auto"]) == 0
"""


def python(code, folder):
    """Run it in a process that has imported Lightning and no torchao; ``folder`` comes first on its path."""
    environ = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}
    return forked.python("-c", NOT_IMPORTED + code, cwd=folder, environ=environ)


@pytest.mark.slow
def test_without_torchao(tmp_path):
    result = python(MISSING, tmp_path)
    assert result.returncode == 0, result.stderr
    assert "needs torchao" in result.stderr


@pytest.mark.slow
def test_with_a_broken_torchao(tmp_path):
    (tmp_path / "torchao").mkdir()
    (tmp_path / "torchao" / "__init__.py").write_text("import torch\ntorch.no_such_thing")
    result = python("import lightning_lowprec; lightning_lowprec.FP8TorchAO()", tmp_path)
    assert "torchao, which is installed but does not import (AttributeError: module 'torch'" in result.stderr


@pytest.mark.parametrize("device", ["foo", "cuda:97"])
def test_doctor_refuses_a_device_that_is_not_there(device, capsys):
    assert main(["doctor", f"--device={device}"]) == 2
    assert f"`device='{device}'` is not available here" in capsys.readouterr().err


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_kernels_on_cpu_run_if_this_torch_has_them_and_are_refused_if_not(recipe):
    def set_up(emulate):
        torch.manual_seed(0)
        return fabric(FP8TorchAO(recipe=recipe, emulate=emulate)).setup(Stack())

    if recipe == "rowwise" and torch.__version__ < "2.13":
        with pytest.raises(
            RuntimeError, match=r"has no rowwise FP8 kernel for CPU \(2\.13 has\)\. Leave `emulate` alone"
        ):
            set_up(False)
        return
    x = torch.randn(16, 32)
    exact, kernels = set_up(True)(x), set_up(False)(x)
    noise = (kernels - exact).pow(2).mean() / exact.pow(2).mean()
    assert 10 * torch.log10(noise) < -30.0, "the same codes; products rounded to bf16 (2**-9, -48 dB) at each layer"


@pytest.mark.parametrize(("device", "said"), [("cuda", 1), ("cpu", 0)])
def test_a_line_says_that_fp8_without_a_compiler_is_slow(device, said, caplog):
    """No memory of the device is touched."""
    net = nn.Sequential(nn.Linear(32, 32))
    compile_blocks(net, [net[0]], False, torch.device(device), precision="fp8-hybrid", advice=FP8TorchAO.advice)
    assert caplog.text.count("fp8-hybrid: compile=False: no block is compiled. FP8 is slow") == said
