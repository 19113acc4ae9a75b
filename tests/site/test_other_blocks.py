"""The YAML of the docs makes objects, and what the docs show as output is what the commands print."""

import logging
from importlib import import_module

import lightning as L
import pytest
import yaml

from lightning_lowprec.tools import cli
from lightning_lowprec.tools.demo import ByteGPT
from tests.site.pages import Block, blocks

TEXT = [block for block in blocks("text") if block.page in ("README.md", "docs/getting-started.md")]
LOG = [block for block in TEXT if block.code.startswith("fp8-hybrid: ")]


@pytest.mark.parametrize("block", blocks("yaml"), ids=lambda block: block.name)
def test_the_yaml_makes_an_object(block: Block):
    entry = yaml.safe_load(block.code)["trainer"]["plugins"]
    module, _, name = entry["class_path"].rpartition(".")
    assert getattr(import_module(module), name)(**entry["init_args"])


def test_the_log_line_is_what_a_set_up_says(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.INFO):
        L.Fabric(accelerator="cpu", precision="fp8-hybrid").setup_module(ByteGPT())
    assert len(LOG) == 2
    assert {block.code.strip() for block in LOG} <= set(caplog.messages)


def test_the_excerpt_of_plan_is_what_the_command_prints(capsys: pytest.CaptureFixture[str]):
    assert cli.main(["plan", "llama"]) == 0
    printed = capsys.readouterr().out.splitlines()
    (excerpt,) = [block.code for block in TEXT if block.code.startswith("layer ")]
    assert set(excerpt.splitlines()) <= set(printed)
