"""What a plugin does around forward: autocast and default dtype, the dtypes of inputs and outputs."""

from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
from contract_models import Net, fabric_with, net, random_batches, same, trainer_with
from plugins_under_test import every_name, every_plugin, make
from torch import Tensor, nn

CONTEXTS = (
    "forward_context",
    "train_step_context",
    "val_step_context",
    "test_step_context",
    "predict_step_context",
    "tensor_init_context",
    "module_init_context",
)


def torch_state() -> tuple[object, ...]:
    """Everything of torch that a precision plugin may change for a while."""
    return (
        torch.get_default_dtype(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_cache_enabled(),
        torch.is_grad_enabled(),
    )


@pytest.fixture(autouse=True)
def _unchanged_torch() -> Iterator[None]:
    before = torch_state()
    yield
    assert torch_state() == before


@every_name
@pytest.mark.parametrize("context", CONTEXTS)
def test_contexts_autocast_on_cpu_nest_and_restore_torch_also_when_their_body_raises(name: str, context: str) -> None:
    plugin, a = make(name), torch.ones(2, 2)
    plugin.convert_module(nn.Linear(32, 32))
    assert plugin.autocast_dtype in (torch.float16, torch.bfloat16)
    before = torch_state()
    for divisor, ending in ((1, nullcontext()), (0, pytest.raises(ZeroDivisionError))):
        with ending, getattr(plugin, context)(), getattr(plugin, context)():
            assert (a @ a).dtype == plugin.autocast_dtype or "init" in context
            torch.zeros(1 // divisor)
        assert torch_state() == before
        assert (a @ a).dtype == torch.float32


class DtypeNet(Net):
    """Notes the dtypes that reach ``forward``."""

    def forward(self, x: Tensor, index: Tensor | None = None) -> dict[str, Tensor | None]:
        self.seen = x.dtype, None if index is None else index.dtype
        return {"hidden": self.layers[0](x), "y": self.layers(x), "index": index}


@every_plugin
def test_fabric_casts_float_inputs_and_outputs_only(name: str) -> None:
    plugin = make(name)
    module = fabric_with(plugin).setup(DtypeNet())
    index = torch.tensor([2**31 + 1])
    output = module(torch.ones(4, 32), index=index)
    assert module.module.seen == (plugin.autocast_dtype, torch.int64)
    assert output["hidden"].dtype == output["y"].dtype == torch.float32
    assert output["index"] is index


@every_plugin
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("shape", [(16, 32), (3, 32), (2, 5, 32)], ids=str)
def test_fabric_forward_is_the_same_without_gradients(name: str, mode: type, shape: tuple[int, ...]) -> None:
    module, x = fabric_with(make(name)).setup(net()), torch.ones(shape)
    expected = module(x)
    with mode():
        output = module(x)
    assert same(output, expected)
    assert not output.requires_grad


@every_name
def test_converted_input_keeps_its_structure_and_integers(name: str) -> None:
    plugin = make(name)
    plugin.convert_module(nn.Linear(32, 32))
    tokens, mask, x = torch.tensor([300, 70_000]), torch.tensor([True, False]), torch.ones(3)
    converted = plugin.convert_input({"tokens": tokens, "rest": (mask, x, "text", 7, None)})
    assert converted["tokens"] is tokens
    assert converted["rest"][0] is mask
    assert converted["rest"][1].dtype == plugin.autocast_dtype
    assert converted["rest"][2:] == ("text", 7, None)


@every_name
def test_converted_output_follows_the_default_dtype(name: str) -> None:
    plugin = make(name)
    half = torch.ones(2, dtype=plugin.autocast_dtype)
    assert plugin.convert_output(half).dtype == torch.float32
    torch.set_default_dtype(torch.float64)
    try:
        assert plugin.convert_output(half).dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


class BatchDtypes(Net):
    """Notes the dtype of each batch and of what a layer returns in every kind of step."""

    def step(self, batch: Tensor) -> Tensor:
        self.seen.add((batch.dtype, self.layers[0](batch).dtype))
        return self.layers(batch).float().sum()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.step(batch)

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.step(batch)


class EvaluatedBatchDtypes(BatchDtypes):
    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.step(batch)

    test_step = validation_step


@every_plugin
@pytest.mark.parametrize("entry", ["fit", "validate", "test", "predict"])
def test_trainer_leaves_batches_alone_and_autocasts_every_step(name: str, entry: str) -> None:
    plugin, module = make(name), EvaluatedBatchDtypes() if entry in ("validate", "test") else BatchDtypes()
    module.seen = set()
    options = {} if entry in ("fit", "predict") else {"verbose": False}
    getattr(trainer_with(plugin), entry)(module, random_batches(1), **options)
    assert module.seen == {(torch.float32, plugin.autocast_dtype)}
