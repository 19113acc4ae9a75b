"""DeepSpeed's own config class reads what docs/migration.md quotes."""

import json
import re
from pathlib import Path

import deepspeed
import pytest
from deepspeed.runtime.config import DeepSpeedConfig
from pydantic import ValidationError

from tests.migration.quoted import SOURCES, absent, sections

PAGE = sections()["deepspeed"]
BATCH = {"train_batch_size": 1}
EVERY_FIELD_OF_FP16 = {
    "enabled": True, "loss_scale": 0, "initial_scale_power": 17, "loss_scale_window": 500, "hysteresis": 3,
    "consecutive_hysteresis": True, "min_loss_scale": 2, "auto_cast": True,
}  # fmt: skip


def test_every_name_stands_in_the_installed_version():
    (entry,) = SOURCES["deepspeed"]
    assert deepspeed.__version__ == entry["version"]
    folder = Path(deepspeed.__file__).parents[1]
    assert list(absent(entry, lambda file: (folder / file).read_text())) == []


def test_the_config_of_the_page_is_read():
    (block,) = re.findall(r"^```text\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL)
    read = DeepSpeedConfig(BATCH | json.loads(block))
    assert read.bfloat16_config.enabled
    assert read.zero_config.stage == 3
    assert read.grad_accum_dtype == "fp32"


def test_every_field_of_the_table_is_read():
    quoted = set(re.findall(r"`fp16\.(\w+)", PAGE))
    assert quoted == set(EVERY_FIELD_OF_FP16)
    read = DeepSpeedConfig(BATCH | {"fp16": EVERY_FIELD_OF_FP16}).float16_config
    assert {name: getattr(read, name) for name in quoted} == EVERY_FIELD_OF_FP16
    with pytest.raises(ValidationError, match="fp17"):
        DeepSpeedConfig(BATCH | {"fp16": {"enabled": True, "fp17": True}})
