"""Names of libraries are found, or listed as lost; torchao and transformers have all that we use."""

import pytest
from torch import nn

from lightning_lowprec.private import torchao as of_torchao
from lightning_lowprec.private import transformers as of_transformers
from lightning_lowprec.private.names import missing

LINEAR = "torch.nn.modules.linear.Linear"


def test_names_that_are_there():
    assert missing(["torch.nn.Module._compiled_call_impl", f"{LINEAR}.forward", f"{LINEAR}().in_features"]) == []


@pytest.mark.parametrize(
    "name",
    ["torch.no_such_module.f", "torch.nn.NoSuchClass", f"{LINEAR}.in_features", f"{LINEAR}().no_such_attribute"],
)
def test_names_that_are_gone(name):
    assert missing([name, "torch.nn"]) == [name]


def test_a_lost_name_of_torchao(monkeypatch):
    from torchao.float8.float8_training_tensor import Float8TrainingTensor

    assert of_torchao.moved() == []
    monkeypatch.delattr(Float8TrainingTensor, "_scale")
    assert of_torchao.moved() == [f"{Float8TrainingTensor.__module__}.Float8TrainingTensor._scale"]


def test_a_lost_name_of_transformers(monkeypatch):
    mixtral = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
    assert of_transformers.moved() == []
    monkeypatch.delattr(mixtral.MixtralExperts, "_apply_gate")
    assert of_transformers.moved() == [f"{mixtral.__name__}.MixtralExperts._apply_gate"]
    with pytest.raises(ImportError, match=r"transformers \d.* has no `_apply_gate` in Linear"):
        of_transformers.check_experts(nn.Linear(1, 1))
