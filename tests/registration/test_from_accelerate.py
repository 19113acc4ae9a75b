"""Accelerate's objects in `plugins=`: the real classes, every value."""

from importlib.util import find_spec

import lightning as L
import pytest
import torch

from tests.toys import ON_CPU

accelerate = pytest.importorskip("accelerate.utils")

with_te = pytest.mark.skipif(find_spec("transformer_engine") is None, reason="`make test-te` is the place")


def plugins(given):
    return L.Trainer(plugins=given, **ON_CPU).precision_plugin, L.Fabric(plugins=[given], accelerator="cpu")._precision


def test_torchaos_config():
    from torchao.float8 import Float8LinearConfig

    config = Float8LinearConfig(round_scales_to_power_of_2=True)
    for plugin in plugins(accelerate.AORecipeKwargs(config=config)):
        assert plugin.config is config
    for plugin in plugins(accelerate.AORecipeKwargs()):
        assert plugin.config.enable_fsdp_float8_all_gather, "Accelerate's default"
    with pytest.raises(ValueError, match=r"`AORecipeKwargs\(module_filter_func=.*has no equal.*`FP8TorchAO\(config="):
        L.Trainer(plugins=accelerate.AORecipeKwargs(module_filter_func=lambda module, fqn: True), **ON_CPU)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_ms_amps_level(level):
    for plugin in plugins(accelerate.MSAMPRecipeKwargs(opt_level=level)):
        assert (type(plugin).__name__, plugin.level) == ("MSAMP", level)


@with_te
def test_transformer_engines_recipe():
    from transformer_engine.common import recipe as te

    given = accelerate.TERecipeKwargs(
        margin=2, fp8_format="E4M3", amax_history_len=16, amax_compute_algo="max", use_autocast_during_eval=True
    )
    for plugin in plugins(given):
        recipe = plugin.recipe
        assert isinstance(recipe, te.DelayedScaling)
        assert (recipe.margin, recipe.fp8_format, recipe.amax_history_len) == (2, te.Format.E4M3, 16)
        assert recipe.amax_compute_algo == "max"
        assert plugin.fp8_eval
    default = L.Trainer(plugins=accelerate.TERecipeKwargs(), **ON_CPU).precision_plugin
    assert default.recipe.amax_compute_algo == "most_recent"
    assert not default.fp8_eval, "Accelerate's default"
    mx = accelerate.TERecipeKwargs(use_mxfp8_block_scaling=True)
    assert isinstance(L.Trainer(plugins=mx, **ON_CPU).precision_plugin.recipe, te.MXFP8BlockScaling)
    with pytest.raises(ValueError, match="`interval` is no field of `recipe='delayed'`"):
        L.Trainer(plugins=accelerate.TERecipeKwargs(interval=4), **ON_CPU)


def test_a_name_beside_such_an_object_raises():
    with pytest.raises(ValueError, match="Received both `precision=fp8-hybrid` and `plugins="):
        L.Trainer(precision="fp8-hybrid", plugins=accelerate.MSAMPRecipeKwargs(), **ON_CPU)


def test_other_objects_stay_lightnings():
    with pytest.raises(L.fabric.utilities.exceptions.MisconfigurationException, match="Found invalid type for plugin"):
        L.Trainer(plugins=torch.nn.Linear(1, 1), **ON_CPU)
