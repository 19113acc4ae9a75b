"""Tools that know torch's own layers: on a plain model they work; export, trace and script name it on other layers."""

import copy
import pickle
import subprocess
import sys

import pytest
import torch
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_lowprec import MSAMP, FP8TorchAO, HalfMixed, Int8TorchAO, plain
from tests.precision.weights_left import Net, as_trained, fit

X = torch.randn(16, 32, generator=torch.Generator().manual_seed(2))
PLUGINS = {
    "torchao": FP8TorchAO,
    "int8": Int8TorchAO,
    "msamp-o3": lambda: MSAMP("O3"),
    "bf16-remainder": lambda: HalfMixed("bf16", master_weights="remainder"),
}
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of torch.jit, torch.ao and their own insides
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
    pytest.mark.filterwarnings("ignore:.*(to_torchscript|isinstance.treespec, LeafSpec|torch.quantize_per_tensor).*"),
]
LOAD = """
import pickle, sys
model, x = pickle.load(open(sys.argv[1], "rb"))
assert not {"lightning_lowprec", "torchao"} & {name.partition(".")[0] for name in sys.modules}
print(sum(model(x).flatten().tolist()))
"""
"""Unpickles a model in a process that has never heard of this package; its entry point has a module of its own."""


def sequential(net):
    """The layers of a Net as a module of torch."""
    return nn.Sequential(net.first, nn.ReLU(), net.second, net.norm, net.head)


def exported(net, folder):
    return torch.export.export(net, (X,)).module()(X)


def onnx(net, folder):
    return run_onnx(torch.onnx.export(net, (X,), dynamo=True, verbose=False).model_proto)


def run_onnx(proto):
    from onnx.reference import ReferenceEvaluator

    (output,) = ReferenceEvaluator(proto).run(None, {proto.graph.input[0].name: X.numpy()})
    return torch.from_numpy(output)


def traced(net, folder):
    return torch.jit.trace(sequential(net), X)(X)


def scripted(net, folder):
    return torch.jit.script(sequential(net))(X)


EXACT = {f.__name__: f for f in (exported, onnx, traced, scripted)}


def test_a_pickle_needs_torch_alone(tmp_path):
    expected, files = [], []
    for name, make in PLUGINS.items():
        net = Net()
        trainer = fit(as_trained(make()), net)
        model = sequential(plain(net)).eval()
        files.append(tmp_path / name)
        files[-1].write_bytes(pickle.dumps((model, X)))
        expected.append(sum(model(X).flatten().tolist()))
        assert trainer
    # one process for all: the import of torch is what takes the time
    script = "import sys\nfiles = sys.argv[1:]\nfor file in files:\n    sys.argv[1] = file\n" + "".join(
        f"    {line}\n" for line in LOAD.strip().splitlines()
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *map(str, files)], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert [float(line) for line in done.stdout.split()] == pytest.approx(expected)


FP8 = {name: PLUGINS[name] for name in ("torchao", "msamp-o3")}


@pytest.fixture(scope="module", params=FP8)
def in_fp8(request):
    net = Net()
    trainer = fit(as_trained(FP8[request.param]()), net)
    return net.eval(), trainer


@pytest.mark.parametrize("tool", EXACT)
@torch.no_grad()
def test_on_fp8_layers_tools_name_plain(in_fp8, tool, tmp_path, capsys):
    net = copy.deepcopy(in_fp8[0])
    before = {fqn: (type(m), type(getattr(m, "weight", None))) for fqn, m in net.named_modules()}
    with pytest.raises(Exception, match=r"(?s)`lightning_lowprec.plain\(model\)` first"):
        EXACT[tool](net, tmp_path)
    assert {fqn: (type(m), type(getattr(m, "weight", None))) for fqn, m in net.named_modules()} == before
    net(X)
    same = plain(in_fp8[0], copy=True)
    torch.testing.assert_close(EXACT[tool](same, tmp_path), same(X), rtol=1e-5, atol=1e-5)


class Traces(DummyLogger):
    """Stands for TensorBoardLogger, which needs a package more."""

    _log_graph = True


@pytest.mark.parametrize("make", PLUGINS.values(), ids=PLUGINS)
def test_a_logger_that_would_trace_the_model_is_refused_with_its_option(make):
    net = Net()
    fit(make(), net, logger=Traces(), log_every_n_steps=1)  # nothing is traced without an example
    net.example_input_array = X
    with pytest.raises(MisconfigurationException, match=r"TensorBoardLogger.*Write `log_graph=False`"):
        fit(make(), net, logger=Traces(), log_every_n_steps=1)
    traced(net, None)  # plain again
