"""Clients that check `precision` by the type in Lightning's connector, as pydantic does, take our words."""

import pytest
from lightning.fabric import connector

import lightning_lowprec
import lightning_lowprec_autoload as autoload
from tests.registration.test_cli import python

pydantic = pytest.importorskip("pydantic")

IN_A_CLIENT = """
import sys
import lightning_lowprec_autoload as autoload
autoload.install()  # as torch does, by the entry point
from pydantic import BaseModel
from FABRIC.connector import _PRECISION_INPUT

class Config(BaseModel):
    precision: _PRECISION_INPUT = "bf16-mixed"

print(Config(precision="bf16-true").precision, Config(precision=16).precision)
assert "lightning_lowprec" not in sys.modules, "nobody asked for it"
print(Config(precision="fp8-hybrid").precision)
"""


@pytest.fixture(scope="module")
def config():
    return pydantic.create_model("Config", precision=(connector._PRECISION_INPUT | None, None))


def test_every_name_is_taken(config):
    offered = [verdict.name for verdict in lightning_lowprec.doctor("cpu").precisions]
    for name in (*offered, "bf16-mixed", 16, None):
        assert config(precision=name).precision == name


@pytest.mark.parametrize("fabric", ["lightning.fabric", "lightning_fabric"])
def test_the_package_is_imported_when_a_word_is_not_lightnings(tmp_path, fabric):
    ran = python("-c", IN_A_CLIENT.replace("FABRIC", fabric), cwd=tmp_path)
    assert ran.stdout == "bf16-true 16\nfp8-hybrid\n"


def test_parsers_that_list_all_choices_list_ours():
    annotation = connector._PRECISION_INPUT
    assert autoload.without_word(annotation | None) == autoload.without_word(annotation) | None
    assert autoload.without_word(annotation) != annotation
    assert autoload.without_word("a string") == "a string"
