"""What Trainer and Fabric refuse, and what they tell DeepSpeed, before any process starts."""

import pytest
import torch
from lightning import Fabric, Trainer
from lightning.fabric.strategies import DeepSpeedStrategy as FabricStrategy
from lightning.pytorch.strategies import DeepSpeedStrategy

import lightning_lowprec as lp

ON_CPU = {"accelerator": "cpu", "devices": 1}
MAKERS = [(Trainer, DeepSpeedStrategy, {**ON_CPU, "logger": False, "enable_checkpointing": False})]
MAKERS.append((Fabric, FabricStrategy, ON_CPU))
makers = pytest.mark.parametrize(("maker", "cls", "how"), MAKERS, ids=["Trainer", "Fabric"])


@makers
@pytest.mark.parametrize("strategy", ["", "_stage_1", "_stage_2", "_stage_3"])
def test_names_of_the_strategy(maker, cls, how, strategy):
    made = maker(strategy=f"deepspeed{strategy}", precision="fp8-rowwise", **how)
    assert made.strategy.config["bf16"] == {"enabled": True}
    assert "fp16" not in made.strategy.config
    assert isinstance(made.strategy.precision if maker is Fabric else made.precision_plugin, lp.FP8TorchAO)


@makers
def test_offloading_by_name_and_a_strategy_without_zero(maker, cls, how):
    config = maker(strategy="deepspeed_stage_3_offload", precision="fp16-master", **how).strategy.config
    assert config["fp16"]["enabled"] is True
    assert config["zero_optimization"]["offload_param"]["device"] == "cpu"
    with pytest.raises(
        ValueError, match=r"stages 1, 2 and 3 of ZeRO, got `stage=0` .* Without ZeRO use `strategy='ddp'`"
    ):
        maker(strategy=cls(zero_optimization=False), precision="fp8-hybrid", **how)


def test_compiled_blocks_are_refused_where_weights_are_freed_and_a_base_that_is_stored_as_codes():
    for plugin in (lp.FP8TorchAO, lp.Int8TorchAO):
        with pytest.raises(ValueError, match=r"DeepSpeed ZeRO-3: `compile=True` compiles blocks .* use stage 2"):
            Fabric(strategy="deepspeed_stage_3", plugins=plugin(compile=True), **ON_CPU)
    with pytest.raises(ValueError, match=r"casts weights, and `frozen='codes'` has none\. Use 'ddp' or 'fsdp2'"):
        Fabric(strategy="deepspeed_stage_2", plugins=lp.FP8TorchAO(frozen="codes"), **ON_CPU)


def test_a_plugin_of_an_engine_is_refused_elsewhere():
    plugin = lp.FP8TorchAO(master_weights=True, buffer_dtype=torch.float32)
    Fabric(strategy="deepspeed_stage_2", plugins=plugin, **ON_CPU)
    with pytest.raises(ValueError, match=r"has left its options to DeepSpeed ZeRO-2, .* Make a new plugin"):
        Fabric(strategy="ddp", plugins=plugin, **ON_CPU)
    again = Fabric(strategy="deepspeed_stage_3", plugins=plugin, **ON_CPU)
    assert again.strategy.config["bf16"]["enabled"] is True
    assert again.strategy.config["data_types"] == {"buffer_dtype": "fp32"}


def test_an_old_deepspeed_is_refused(monkeypatch):
    monkeypatch.setattr("lightning_lowprec.private.deepspeed.installed_version", lambda name: "0.16.4")
    with pytest.raises(ImportError, match=r"deepspeed 0.16.4 is older than 0.19.8"):
        Fabric(strategy="deepspeed_stage_2", precision="fp8-hybrid", **ON_CPU)
