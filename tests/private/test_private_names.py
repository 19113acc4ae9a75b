"""Private names of other libraries are there, or listed as lost, and set-up fails without those of 'fsdp2'."""

from functools import partial
from types import SimpleNamespace
from typing import get_args

import lightning as L
import pytest
import torch
from lightning.fabric.plugins import Precision as FabricPrecision
from lightning.pytorch import Callback, strategies
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import _dtensor_spec
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import CheckpointPolicy

from lightning_lowprec import FabricFSDP2Strategy, FSDP2Strategy, HalfMixed
from lightning_lowprec.extras import missing
from lightning_lowprec.names import OF_LIGHTNING
from lightning_lowprec.private import lightning as of_lightning
from lightning_lowprec.private import torch as of_torch
from lightning_lowprec.private import torch_inductor as of_inductor
from lightning_lowprec.private import torchao as of_torchao
from lightning_lowprec.private import transformers as of_transformers
from lightning_lowprec.private.either import MAIN
from tests.toys import ON_CPU

LINEAR = "torch.nn.modules.linear.Linear"


def test_names_that_are_gone():
    gone = ["torch.no_such_module.f", "torch.nn.NoSuchClass", f"{LINEAR}.in_features", f"{LINEAR}().no_such_attribute"]
    there = ["torch.nn", "torch.nn.Module._compiled_call_impl", f"{LINEAR}.forward", f"{LINEAR}().in_features"]
    assert missing([*gone, *there]) == gone


def test_the_layers_of_transformers_that_are_taken_for_linears_compute_what_a_linear_does():
    falcon = pytest.importorskip("transformers.models.falcon.modeling_falcon").FalconLinear(5, 7)
    conv = pytest.importorskip("transformers.pytorch_utils").Conv1D(7, 5)
    assert of_transformers.is_falcon_linear(type(falcon))
    assert of_transformers.is_conv1d(type(conv))
    for layer, transposed in ((falcon, False), (conv, True)):
        layer = layer.double()
        nn.init.normal_(layer.bias)
        x = torch.randn(2, 3, 5, dtype=torch.double)
        expected = nn.functional.linear(x, layer.weight.t() if transposed else layer.weight, layer.bias)
        torch.testing.assert_close(layer(x), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("ours", "module", "name"),
    [
        (of_torchao, "torchao.float8.float8_training_tensor", "Float8TrainingTensor._scale"),
        (of_transformers, "transformers.models.mixtral.modeling_mixtral", "MixtralExperts._apply_gate"),
    ],
)
def test_a_lost_name(ours, module, name, monkeypatch):
    owner, _, attribute = name.partition(".")
    owner = getattr(pytest.importorskip(module), owner)
    assert ours.moved() == []
    monkeypatch.delattr(owner, attribute)
    assert ours.moved() == [f"{module}.{name}"]


def test_the_names_of_lightning_are_those_of_lightning():
    theirs = MAIN.module("fabric.plugins.precision.precision")
    inputs = theirs._PRECISION_INPUT_STR, theirs._PRECISION_INPUT_INT, theirs._PRECISION_INPUT_STR_ALIAS
    assert set(OF_LIGHTNING) == {name for group in inputs for name in get_args(group)}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("way", ["setup", "setup_module", "fit"])
def test_a_model_that_the_user_compiled_is_known_as_such_while_it_is_set_up(way, compiled):
    class Recorder(Precision if way == "fit" else FabricPrecision):
        def convert_module(self, module):
            self.seen = of_lightning.is_compiled_whole(module)
            return module

    plugin, model = Recorder(), BoringModel()
    given = torch.compile(model, backend="eager") if compiled else model
    if way == "fit":
        L.Trainer(plugins=plugin, max_steps=0, **ON_CPU).fit(given)
    else:
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1)] if way == "setup" else []
        getattr(L.Fabric(accelerator="cpu", devices=1, plugins=plugin), way)(given, *optimizers)
        assert not of_lightning.is_compiled_whole(model), "Fabric notes it while it sets up only"
    assert plugin.seen == compiled


@pytest.mark.parametrize(
    ("owner", "hook", "place"),
    [(BoringModel, "configure_gradient_clipping", 0), (Callback, "on_before_optimizer_step", 2)],
)
def test_a_hook_that_looks_at_gradients_sees_none_that_wait_for_the_step(owner, hook, place, monkeypatch):
    """On a GPU they are multiplied by the step alone, where nobody looks."""
    monkeypatch.setattr("lightning_lowprec.masters.step.DEVICES", {"cpu"})
    seen = []
    for scale in (1.0, 2.0**10):
        noting = type("Noting", (owner,), {hook: lambda *args, **_: seen.append(args[place].layer.weight.grad)})()
        model, callbacks = (noting, []) if owner is BoringModel else (BoringModel(), [Callback(), noting])
        model.layer.load_state_dict({"weight": torch.ones(2, 32), "bias": torch.ones(2)})
        plugin = HalfMixed("fp16", master_weights=True, loss_scale=scale)
        L.Trainer(plugins=plugin, callbacks=callbacks, max_steps=1, **ON_CPU).fit(model, torch.ones(1, 1, 32))
    assert torch.equal(*seen)


def test_this_torch_and_this_lightning_have_them_and_a_lost_variable_is_listed(monkeypatch):
    assert of_torch.moved() == of_lightning.moved() == []
    monkeypatch.setattr(of_lightning, "UNWRAPPED_NAME", "renamed")
    assert of_lightning.moved() == ["Fabric.setup, variable renamed", "Fabric.setup_module, variable renamed"]
    connector = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)._signal_connector
    assert all(hasattr(connector, name) for name in of_lightning.SIGNAL_NAMES)


@pytest.mark.parametrize(
    ("owner", "name"), [(FSDPModule, "_get_fsdp_state"), (_dtensor_spec, "TensorMeta"), (torch, "_foreach_norm")]
)
def test_a_torch_without_a_name_fails_at_set_up(monkeypatch, owner, name):
    monkeypatch.delattr(owner, name)
    assert [missing for missing in of_torch.moved() if f"{name}, needed for 'fsdp2'" in missing]
    for build, strategy in ((L.Fabric, FabricFSDP2Strategy()), (L.Trainer, FSDP2Strategy())):
        with pytest.raises(ImportError, match=rf"torch {torch.__version__[:4]}.* no longer has .*{name}"):
            build(accelerator="cpu", devices=1, strategy=strategy, precision="fp8-hybrid")
    monkeypatch.undo()
    monkeypatch.setattr(of_torch, "PARAM_GROUPS", ("_groups_of_old", "_groups_of_today"))
    name = "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState()._groups_of_old"
    assert of_torch.moved() == [f"{name}, needed for 'fsdp2'"]


@pytest.mark.parametrize("name", of_lightning.MODEL_PARALLEL_NAMES)
def test_a_lightning_without_a_name_fails_at_set_up(monkeypatch, name):
    original = strategies.ModelParallelStrategy.__init__
    renamed = [f"{other}_moved" if other == name else other for other in original.__code__.co_names]
    monkeypatch.setattr(original, "__code__", original.__code__.replace(co_names=tuple(renamed)))
    assert of_lightning.moved() == [f"ModelParallelStrategy.{name}"]
    with pytest.raises(ImportError, match=rf"lightning {L.__version__} has moved {name} of ModelParallelStrategy"):
        FSDP2Strategy()


def test_a_sigterm_is_noted_once_and_passed_on_and_moved_names_leave_lightnings_own_handler(monkeypatch):
    of_lightning.note_sigterm(SimpleNamespace(_signal_connector=SimpleNamespace()))
    monkeypatch.delattr(_SignalConnector, "_sigterm_notifier_fn")
    assert of_lightning.moved() == ["_SignalConnector._sigterm_notifier_fn"]
    killed = []
    for launcher in (None, SimpleNamespace(kill=killed.append)):
        connector = SimpleNamespace(received_sigterm=False, _sigterm_notifier_fn=None)
        strategy = SimpleNamespace(launcher=launcher)
        of_lightning.note_sigterm(SimpleNamespace(_signal_connector=connector, strategy=strategy))
        connector._sigterm_notifier_fn(15, None)
        connector._sigterm_notifier_fn(15, None)
        assert connector.received_sigterm
    assert killed == [15]


def test_a_largest_value_is_found_with_the_sum_of_a_bias_and_before_a_rotation_with_the_same_bits():
    def codes_of(x, turn):
        """What a backward does with the gradient of a rotated query: (T, D), (T, 1) -> codes, scale, bias."""
        a, b = x.chunk(2, -1)
        y = torch.cat([a * turn - b, b * turn + a], -1).permute(1, 0).clone().permute(1, 0)
        scale = y.abs().max()
        return (y / scale).to(torch.float8_e5m2).float(), scale, y.sum([0]), y.sum([1])

    x, turn = torch.randn(6, 16).bfloat16(), torch.randn(6, 1).bfloat16()
    for value in (1.0, float("nan"), float("inf")):
        x[4, 5] = value
        graph = make_fx(codes_of, tracing_mode="real")(x, turn)
        before = graph(x, turn)
        of_inductor._find_largest(graph.graph)
        graph.recompile()
        found = [str(node.target) for node in graph.graph.nodes]
        assert (found.count("aten.cat.default"), found.count("aten.amax.default")) == (3, 2)
        assert "aten.max.default" not in found
        for ours, expected in zip(graph(x, turn), before, strict=True):
            torch.testing.assert_close(ours, expected, rtol=0, atol=0, equal_nan=True)
    wide = make_fx(lambda x, y: codes_of(x * y + x / y, x[:, :1]))(x, x)  # made of three times as many bytes
    dynamic = make_fx(codes_of, tracing_mode="symbolic")(x, turn)
    guards = len(dynamic.shape_env.guards)
    for left_alone in (wide, dynamic):
        of_inductor._find_largest(left_alone.graph)
        assert [str(node.target) for node in left_alone.graph.nodes].count("aten.cat.default") == 1
    assert len(dynamic.shape_env.guards) == guards, "which the code would be compiled again for"


RESIDUALS = [(torch.bfloat16, None, True), (torch.float32, ((), ()), True), (torch.float32, ((16, 1), (1, 16)), False)]


@pytest.mark.parametrize(("residual", "scales", "is_kept"), RESIDUALS)
def test_a_residual_sum_of_a_product_is_kept_and_no_other(residual, scales, is_kept):
    def block(x, w, bias):
        def product():
            if scales is None:
                return x @ w
            codes = x.to(torch.float8_e4m3fn), w.to(torch.float8_e4m3fn).t()
            return torch._scaled_mm(*codes, *map(torch.ones, scales), out_dtype=torch.bfloat16)

        first = x + (product() + bias).view(x.shape)
        return first.relu(), first.exp(), (x + x.exp()).relu(), x + product()

    graph = make_fx(block)(torch.randn(16, 16, dtype=residual), *(torch.randn(s).bfloat16() for s in ((16, 16), 16)))
    of_inductor._save_sums(graph.graph)
    kept = [node for node in graph.graph.nodes if node.meta.get("recompute") == CheckpointPolicy.MUST_SAVE]
    readers = [[str(user.target).split(".")[1] for user in node.users] for node in kept]
    assert readers == is_kept * [["relu", "exp"]]


def test_products_in_fp8_add_a_bias_and_end_in_float32_where_that_saves_a_kernel():
    def step(a, b, one, rows, columns, bias, eye):
        def product(*scales):
            return torch._scaled_mm(a, b, *scales, out_dtype=torch.bfloat16)

        read = [(product(one, one).view(2, 8, 32) + bias).view(16, 32) @ eye, (product(rows, columns) + bias) @ eye]
        cast = partial(torch.ops.prims.convert_element_type.default, dtype=torch.float32)  # as inductor writes it
        computed_from = [(product(one, one) + bias).relu(), cast(product(one, one)) + 1]
        in_float32 = (product(one, one) + cast(bias)) @ cast(eye)
        return *read, *computed_from, in_float32, cast(product(one, one)), cast(product(rows, columns))

    a, b = (torch.randint(-15, 16, shape).to(torch.float8_e4m3fn) for shape in ((16, 16), (32, 16)))
    rows, columns = (2.0 ** torch.randint(-2, 3, shape) for shape in ((16, 1), (1, 32)))
    bias, one = torch.randn(32).bfloat16(), torch.tensor(0.5)
    given = a, b.t(), one, rows, columns, bias, torch.eye(32).bfloat16()
    graph = make_fx(step)(*given)
    of_inductor._add_in_products(graph.graph)
    of_inductor._end_in_float32(graph.graph)
    graph.graph.lint()
    graph.recompile()
    sums = a.double() @ b.double().t()
    exact, by_row = sums * 0.25, sums * rows * columns
    twice = exact.bfloat16() + bias
    once = [(values + bias.double()).bfloat16() for values in (exact, by_row)]
    assert not twice.equal(once[0])
    rounded = exact.bfloat16().float()
    expected = *once, twice.relu(), rounded + 1, rounded + bias, exact.float(), by_row.bfloat16().float()
    for ours, value in zip(graph(*given), expected, strict=True):
        torch.testing.assert_close(ours, value, rtol=0, atol=0)
