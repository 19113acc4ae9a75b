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
    zero = {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
    read = DeepSpeedConfig(
        {"zero_optimization": zero, "communication_data_type": "fp32", "gradient_clipping": 0.5, "torch_autocast":
         {"enabled": True, "dtype": "bfloat16"}, "bf16": {"enabled": False, "immediate_grad_update": True},
         "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 4}
    )  # fmt: skip
    assert (read.zero_config.offload_optimizer.device, read.zero_config.offload_param.device) == ("cpu", "cpu")
    assert (read.gradient_clipping, read.gradient_accumulation_steps) == (0.5, 4)
    assert str(read.communication_data_type) == "torch.float32"
    assert str(read.torch_autocast_dtype) == "torch.bfloat16"
    assert read.bfloat16_config.immediate_grad_update
