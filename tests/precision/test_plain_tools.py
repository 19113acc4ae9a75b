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
from tests.precision.weights_left import WIDTH, Net, as_trained, fit

X = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(2))
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


def sequential(net):
    """The layers of a Net as a module of torch."""
    return nn.Sequential(net.first, nn.ReLU(), net.second, net.norm, net.head)


EXACT = {
    "exported": lambda net: torch.export.export(net, (X,)).module()(X),
    "traced": lambda net: torch.jit.trace(sequential(net), X)(X),
    "scripted": lambda net: torch.jit.script(sequential(net))(X),
}
LOAD = """
import pickle, sys
for file in sys.argv[1:]:
    model, x = pickle.load(open(file, "rb"))
    print(sum(model(x).flatten().tolist()))
assert not {"lightning_lowprec", "torchao"} & {name.partition(".")[0] for name in sys.modules}
"""


@pytest.fixture(scope="module", params=["fp8-hybrid", "msamp-o3"])
def in_fp8(request):
    net = Net()
    trainer = fit(as_trained(request.param), net)
    return net.eval(), trainer


@pytest.mark.parametrize("tool", EXACT)
@torch.no_grad()
def test_on_fp8_layers_tools_name_plain(in_fp8, tool):
    net = copy.deepcopy(in_fp8[0])
    before = {fqn: (type(m), type(getattr(m, "weight", None))) for fqn, m in net.named_modules()}
    with pytest.raises(Exception, match=r"(?s)`lightning_lowprec.plain\(model\)` first"):
        EXACT[tool](net)
    assert {fqn: (type(m), type(getattr(m, "weight", None))) for fqn, m in net.named_modules()} == before
    net(X)
    same = plain(in_fp8[0], copy=True)
    torch.testing.assert_close(EXACT[tool](same), same(X), rtol=1e-5, atol=1e-5)


class Traces(DummyLogger):
    """Stands for TensorBoardLogger, which needs a package more."""

    _log_graph = True


@pytest.mark.parametrize("name", ["fp8-hybrid", "int8-mixed", "msamp-o3", "bf16-remainder"])
def test_a_logger_that_would_trace_the_model_is_refused_with_its_option(name):
    net = Net()
    fit(name, net, logger=Traces(), log_every_n_steps=1)  # nothing is traced without an example
    net.example_input_array = X
    with pytest.raises(MisconfigurationException, match=r"TensorBoardLogger.*Write `log_graph=False`"):
        fit(name, net, logger=Traces(), log_every_n_steps=1)
    EXACT["traced"](net)  # plain again


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
    command = [sys.executable, "-c", LOAD, *map(str, files)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [float(line) for line in done.stdout.split()] == pytest.approx(expected)
