"""Lightning's own precisions with a model that a precision of ours has left: one warning, with the remedy."""

import warnings

import lightning as L
import pytest
import torch

from lightning_lowprec import plain
from tests.precision.weights_left import WIDTH, Net, as_trained, fit
from tests.toys import ON_CPU

STOCK = ["32-true", "bf16-mixed"]
pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers.*")


@pytest.mark.parametrize("stock", STOCK)
@pytest.mark.parametrize(("name", "title"), [("fp8-hybrid", "torchao"), ("msamp-o2", "MS-AMP")])
def test_layers_that_were_left_warn_once(name, title, stock):
    module = Net()
    fit(as_trained(name), module)
    trainer = L.Trainer(precision=stock, **ON_CPU)
    match = rf"2 layers of Net are those of {title}.*`precision='{stock}'`.*lightning_lowprec.plain\(model\)"
    with pytest.warns(UserWarning, match=match) as caught:
        trainer.validate(module, verbose=False)
    assert len([warning for warning in caught if "are those of" in str(warning.message)]) == 1
    module(torch.randn(2, WIDTH))  # warnings are errors: no second one
    plain(module)
    trainer.validate(module, verbose=False)


@pytest.mark.parametrize("stock", STOCK)
@pytest.mark.filterwarnings("default:.*since an earlier run with master weights.*:UserWarning")
def test_weights_that_masters_left_in_half_precision_are_named(stock):
    module = Net()
    fit(as_trained("bf16-master"), module)
    fabric = L.Fabric(accelerator="cpu", devices=1, precision=stock)
    with pytest.warns(
        UserWarning, match=r"8 parameters of Net are torch.bfloat16 since.*`lightning_lowprec.plain\(model\)`"
    ):
        fabric.setup(module)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fabric.setup(plain(module))
        L.Fabric(accelerator="cpu", devices=1, precision="bf16-true").setup(Net())


def test_an_optimizer_that_meets_codes_of_an_earlier_run_is_told_so():
    module = Net()
    fit(as_trained("msamp-o2"), module)
    with (
        pytest.warns(UserWarning, match="those of MS-AMP"),
        pytest.raises(
            RuntimeError, match=r"If the codes (come from|are of) an earlier run.*lightning_lowprec.plain\(model\)"
        ),
    ):
        fit("32-true", module)
