"""`FP8TE(schedule=[...])`: layers of the real Transformer Engine that switch to bf16 and back."""

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_lowprec import FP8TE, HalfMixed
from lightning_lowprec.callbacks import PrecisionSchedule
from lightning_lowprec.conversion import backends
from lightning_lowprec.te.layer import te_linears
from tests.te import reference
from tests.te.subjects import QUIET, Lit, Net, fabric_for

SCHEDULE = [{"until": 2, "gemms": "bf16"}, {"until": 4}, {"gemms": "bf16"}]
BACKWARD = {"grad_input": "bf16", "grad_weight": "bf16"}


class Steps(Lit):
    """One batch per epoch."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.data = torch.randn(1, 16, 32)

    def train_dataloader(self):
        return DataLoader(self.data, batch_size=None)

    def on_train_epoch_end(self):
        if self.trainer.default_root_dir != ".":
            self.trainer.save_checkpoint(f"{self.trainer.default_root_dir}/{self.trainer.global_step}.ckpt")


def fit(plugin, steps=6, ckpt_path=None, folder=".", **options):
    model = Steps()
    given = {**QUIET, "max_epochs": steps, "enable_checkpointing": False, "default_root_dir": folder, **options}
    L.Trainer(plugins=plugin, **given).fit(model, ckpt_path=ckpt_path)
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def plugin(schedule=None, **options):
    return FP8TE(reference.current_scaling(), norms=False, schedule=schedule, **options)


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_bf16_is_bf16_mixed_one_phase_is_the_plain_plugin_and_a_run_resumes_anywhere(reference_te, tmp_path):
    plain, mixed = fit(plugin()), fit(HalfMixed("bf16"))
    assert same(fit(plugin([{}])), plain)
    assert same(fit(plugin([{"gemms": "bf16"}])), mixed)
    assert not same(plain, mixed)
    whole = fit(plugin(SCHEDULE, fp8_params=True), folder=str(tmp_path))
    for step in (1, 2, 3, 4, 5):
        assert same(fit(plugin(SCHEDULE, fp8_params=True), ckpt_path=tmp_path / f"{step}.ckpt"), whole), step
    assert same(fit(HalfMixed("bf16"), ckpt_path=tmp_path / "4.ckpt"), whole)
    callback = PrecisionSchedule(SCHEDULE)
    assert same(fit(plugin(), callbacks=[callback]), whole)


def gradients(given, layers=None):
    model = Net()
    wrapped = fabric_for(given).setup(model)
    for layer in te_linears(model):
        if layers is not None:
            layers(layer)
    if given.phases is not None:
        given.set_step(0)
    output = wrapped(torch.randn(13, 32, generator=torch.Generator().manual_seed(1)))
    output.square().mean().backward()
    return {"output": output, **{name: p.grad for name, p in model.named_parameters()}}


def test_some_layers_are_kept_in_a_phase_or_reconfigured(reference_te):
    kept = gradients(FP8TE(reference.current_scaling(), norms=False, keep=["blocks.1"]))
    assert same(gradients(plugin([{"keep": ["blocks.1"]}])), kept)
    switched = iter([False, False, True, True, False, False])
    demoted = gradients(plugin(), lambda layer: backends.reconfigure(layer, "bf16") if next(switched) else None)
    assert same(demoted, kept)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"schedule": [{"gemms": {"forward": "bf16"}}]},
            r"no layer with forward in bf16 and the rest in FP8.*FP8TorchAO",
        ),
        ({"schedule": [{"gemms": {"grad_input": "bf16"}}]}, r"`schedule\[0\]\['gemms'\]` is not possible"),
        ({"schedule": [{"gemms": BACKWARD}]}, "delayed scaling has no backward GEMMs in high precision"),
        (
            {"recipe": {"recipe": "current", "backward_override": "high_precision"}, "schedule": [{"gemms": "fp8"}]},
            "asks for 'grad_input' in 'fp8'",
        ),
    ],
)
def test_phases_that_transformer_engine_cannot_compute(pretend_gpu, options, message):
    with pytest.raises(ValueError, match=message):
        FP8TE(**options)


PER_LAYER = {"*blocks.0.*": "bf16", "*.3": reference.nvfp4(), "*": reference.current_scaling()}


def test_fp32_runs_a_layer_in_float32_with_a_float32_weight(reference_te):
    torch.manual_seed(0)
    model, seen = nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 16)), []
    plugin = FP8TE({"2": "fp32", "0": reference.current_scaling()}, norms=False, master_weights=True)
    wrapped = fabric_for(plugin).setup(model)
    model[2].register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    output = wrapped(torch.randn(16, 32))
    assert [p.dtype for p in model.parameters()] == [torch.bfloat16] * 2 + [torch.float32] * 2
    assert plugin.plan.converted == ("0",)
    assert torch.equal(output, nn.functional.linear(seen[0].float(), model[2].weight, model[2].bias))


def test_recipes_per_layer(reference_te):
    """Each layer computes as under one recipe for all; the kept ones as under bf16."""
    mixed = FP8TE(PER_LAYER, norms=False)
    model = Net()
    wrapped = fabric_for(mixed).setup(model)
    seen = {}
    for name, layer in model.named_modules():
        layer.register_forward_hook(lambda layer, args, output, name=name: seen.update({name: (args[0], output)}))
    wrapped(torch.randn(32, 32))
    assert [row.recipe or row.kept_because for row in mixed.plan.rows] == [
        *["'bf16' in `recipe` ('*blocks.0.*')"] * 2,
        *["custom (2)", "custom"] * 2,
        "output head (by name)",
    ]
    for name, recipe in (("blocks.1.1", PER_LAYER["*"]), ("blocks.1.3", PER_LAYER["*.3"]), ("blocks.0.1", None)):
        alone = Net()
        plugin = FP8TE(recipe, norms=False) if recipe is not None else HalfMixed("bf16")
        fabric_for(plugin).setup(alone)
        given, output = seen[name]
        with torch.no_grad(), plugin.forward_context():
            assert torch.equal(alone.get_submodule(name)(given), output), name
    trained = fit(FP8TE(PER_LAYER, norms=False))
    assert same(fit(FP8TE(PER_LAYER, norms=False, schedule=[{}])), trained)
    assert same(fit(FP8TE(PER_LAYER, norms=False, schedule=[{"gemms": "bf16"}])), fit(HalfMixed("bf16")))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"recipe": {"*.1": "delayed", "*": "current"}}, "`recipe` mixes delayed scaling with 'current'"),
        ({"recipe": {"*": {"forward": "bf16"}}}, r"`recipe\['\*'\]` is not possible: Transformer Engine has no layer"),
        ({"recipe": {"*": BACKWARD}}, "delayed scaling has no backward GEMMs.*'backward_override'"),
        ({"recipe": {"*": "current"}, "margin": 1}, "`margin=1` is not valid with recipes per layer"),
        ({"recipe": {"*": "bf16"}}, "computes nothing in FP8"),
        ({"recipe": {"*": "current", "*.1": "curent"}}, r"`recipe='curent'` is not valid; expected one of"),
    ],
)
def test_maps_that_transformer_engine_cannot_compute(pretend_gpu, options, message):
    with pytest.raises(ValueError, match=message):
        FP8TE(**options)


def test_a_map_is_a_name_a_plan_and_an_alignment(pretend_gpu):
    plugin = FP8TE({"blocks.0.*": "bf16", "*.1": "mxfp8", "*": {"recipe": "current", "fp8_format": "e4m3"}})
    model = Net()
    fabric_for(plugin).setup(model)
    assert plugin.precision == "fp8-te-per-layer"
    assert [layer.token_alignment for layer in te_linears(model)] == [32, 16, 32, 16]
    assert [row.recipe for row in plugin.plan.rows if row.recipe] == ["mxfp8", "current"] * 2
    assert plugin.gathers(None) is None
    assert [layer.wire_format is None for layer in te_linears(model)] == [True, False, True, False]
    assert FP8TE({"blocks.0.*": "bf16", "*": "delayed"}).scales is not None


def test_layers_that_cannot_be_reconfigured_so(pretend_gpu):
    model = Net()
    fabric_for(FP8TE("delayed")).setup(model)
    layer = te_linears(model)[0]
    for recipe, message in (
        ({"forward": "bf16"}, "no layer with forward in bf16"),
        (BACKWARD, "delayed scaling has no backward"),
        ("delayed", "its scales need a history"),
    ):
        with pytest.raises(ValueError, match=message):
            backends.reconfigure(layer, recipe)
