"""The format of tests/toy_format.py is planned, trained, compiled, sharded, exported and reported like our own."""

import json
import re
import runpy
from pathlib import Path

import pytest
import torch
from torch import nn

from lightning_lowprec.conversion import backends
from lightning_lowprec.tools.cli import main
from lightning_lowprec.torchao.linear import coded_layers
from tests.fsdp2.toy import Toy
from tests.quality import expect_db, sqnr


def define():
    """What the file defines, registered."""
    return runpy.run_path(str(Path(__file__).parents[1] / "toy_format.py"))


@pytest.fixture
def page():
    yield define()
    backends.unregister("int5")


def test_each_product_is_that_of_the_codes(page):
    layer = nn.Linear(32, 48)
    exact = nn.Linear(32, 48)
    exact.load_state_dict(layer.state_dict())
    plugin = page["Int5Mixed"]()
    plugin.bind_device(torch.device("cpu"))
    plugin.convert_module(model := nn.Sequential(layer))
    x = torch.randn(21, 32, generator=torch.Generator().manual_seed(0))
    found = []
    for module in (model, exact):
        given = x.clone().requires_grad_()
        output = module(given)
        output.square().sum().backward()
        found.append((output.detach(), given.grad))
    (codes, step), (w_codes, w_step) = page["codes_of"](x), page["codes_of"](layer.weight.detach())
    assert codes.abs().max() == 15
    assert set(codes.flatten().tolist()) <= set(range(-15, 16))
    by_hand = (codes * step) @ (w_codes * w_step).t() + layer.bias.detach()
    torch.testing.assert_close(found[0][0], by_hand)
    for left, right in zip(*found, strict=True):
        expect_db(sqnr(right, left), 20)
    expect_db(sqnr(exact.weight.grad, layer.weight.grad), 20)


def test_plan_and_doctor_know_it(page, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    module = tmp_path / "int5_model.py"
    module.write_text("from torch import nn\nNet = lambda: nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 32))\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert main(["plan", "int5_model.Net", "--precision", "int5-mixed", "--json"]) == 0
    assert [row["fqn"] for row in json.loads(capsys.readouterr().out)["plan"]] == ["0", "1"]
    assert main(["doctor"]) == 0
    said = capsys.readouterr().out
    assert re.search(r"^int5 +yes +int5-mixed: int5 products by torch on cpu$", said, flags=re.MULTILINE)


def test_it_is_exported_without_a_scale_of_its_own(page, tmp_path):
    """Its codes are no server's, so the format's own scales are what the weights get."""
    plugin = page["Int5Mixed"]()
    plugin.bind_device(torch.device("cpu"))
    plugin.convert_module(net := Toy())
    assert [backends.weight_roundings(layer) for layer in coded_layers(net)] == 4 * [{"weight": None}]
