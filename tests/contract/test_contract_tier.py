"""The plugins of which `make test` runs the contract stand for all plugins."""

from plugins_under_test import DISTINCT, SHOWN_BY_OTHERS, UNDER_TEST, make

from tests import tiers
from tests.representatives import TABLE
from tools import torch_versions


def traits(plugin):
    """What a contract can see of a plugin."""
    return {
        "scales the loss": plugin.scaler is not None,
        "masters": plugin.masters and plugin.masters.config.form,
        "codes": plugin.keeps_codes,
        "dtype": plugin.autocast_dtype,
        "backend": plugin.backend,
    }


def test_they_have_every_trait_of_the_others():
    def seen(names):
        return {trait for name in names for trait in traits(make(name)).items()}

    assert set(tiers.CONTRACT) <= set(DISTINCT)
    assert seen(name for name in DISTINCT if not name.startswith("FP8TE")) == seen(tiers.CONTRACT)


def test_what_others_show_has_no_trait_and_no_recipe_of_its_own():
    def recipe(name):
        plugin = make(name)
        return type(plugin), *(getattr(plugin, option, None) for option in ("recipe", "fp8_format", "weight_codes"))

    shown = {recipe(name) for name in UNDER_TEST}
    together = {tuple(traits(make(name)).items()) for name in UNDER_TEST}
    for name in SHOWN_BY_OTHERS:
        assert tuple(traits(make(name)).items()) in together, name
        assert recipe(name) in shown, name


def test_formats_that_make_test_versions_adds_are_names():
    assert set(torch_versions.FORMATS) <= {*TABLE} - {*tiers.CONTRACT}
