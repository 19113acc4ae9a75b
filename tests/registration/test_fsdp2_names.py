"""`strategy="fsdp2"` and `"fsdp"` by name: the registries, what a precision becomes, what is refused. One process."""

import lightning as L
import lightning.fabric.connector as fabric_connector
import lightning.pytorch.trainer.connectors.accelerator_connector as trainer_connector
import pytest
import torch
from lightning.fabric.plugins.precision import DoublePrecision as FabricDouble
from lightning.fabric.plugins.precision import MixedPrecision as FabricMixed
from lightning.fabric.strategies import ModelParallelStrategy as FabricModelParallel
from lightning.pytorch.plugins.precision import DoublePrecision, MixedPrecision
from lightning.pytorch.strategies import ModelParallelStrategy

import lightning_lowprec
from lightning_lowprec import FabricFSDP2Strategy, FP8TorchAO, FSDP2Strategy, HalfMixed
from tests.toys import QUIET

CPU = {"accelerator": "cpu", "devices": 2}


def both(strategy, **how):
    """The strategies and precision plugins that Trainer and Fabric end up with."""
    trainer = L.Trainer(strategy=strategy, **how, **CPU, **QUIET)
    fabric = L.Fabric(strategy=strategy, **how, **CPU)
    return (trainer.strategy, trainer.precision_plugin), (fabric.strategy, fabric.strategy.precision)


def registries():
    yield trainer_connector.StrategyRegistry, FSDP2Strategy
    yield fabric_connector.STRATEGY_REGISTRY, FabricFSDP2Strategy


def test_fsdp2_is_in_both_registries_and_unregister_removes_it():
    for registry, cls in registries():
        assert registry["fsdp2"]["strategy"] is cls
    lightning_lowprec.unregister()
    try:
        assert all("fsdp2" not in registry for registry, _ in registries())
        for make in (L.Trainer, L.Fabric):
            with pytest.raises(ValueError, match="fsdp2"):
                make(strategy="fsdp2", **CPU)
    finally:
        lightning_lowprec.register()
    assert all(registry["fsdp2"]["strategy"] is cls for registry, cls in registries())


@pytest.mark.parametrize("name", ["fsdp", "fsdp_cpu_offload"])
@pytest.mark.parametrize("how", [{"precision": "fp8-hybrid"}, {"precision": "bf16-sr"}, {"plugins": "FP8TorchAO"}])
def test_fsdp_by_name_becomes_fsdp2_under_our_precisions_on_cpu_too(name, how):
    how = {"plugins": FP8TorchAO()} if "plugins" in how else how
    (trainer, _), (fabric, _) = both(name, **how)
    assert (type(trainer), type(fabric)) == (FSDP2Strategy, FabricFSDP2Strategy)
    offloads = name == "fsdp_cpu_offload"
    assert trainer.sharding.options.cpu_offload is fabric.sharding.options.cpu_offload is offloads
    assert (trainer.state_dict_type, fabric.state_dict_type) == ("full", "sharded"), "what FSDP saves in each"


def test_fsdp_with_lightnings_own_precisions_stays_lightnings():
    for make in (L.Trainer, L.Fabric):
        with pytest.raises((ValueError, L.fabric.utilities.exceptions.MisconfigurationException), match="GPU"):
            make(strategy="fsdp", precision="bf16-mixed", **CPU)


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [("16-mixed", torch.float16), (16, torch.float16), ("bf16-mixed", torch.bfloat16), ("bf16", torch.bfloat16)],
)
@pytest.mark.parametrize("strategy", ["fsdp2", "object"])
def test_lightnings_mixed_precisions_become_our_half_mixed(strategy, precision, dtype):
    for made in ("trainer", "fabric"):
        ours = {"trainer": FSDP2Strategy, "fabric": FabricFSDP2Strategy}[made]
        one = ours() if strategy == "object" else strategy
        for _, plugin in both(one, precision=precision):  # either flavour of the object in either of the two
            assert type(plugin) is HalfMixed
            assert plugin.autocast_dtype is dtype
            assert (plugin.scaler is not None) == (dtype is torch.float16)


def test_the_other_flavour_is_translated_with_all_its_choices():
    choices = {"wrap": [torch.nn.Linear], "cpu_offload": True, "state_dict_type": "full"}
    for precision in ("fp8-hybrid", "32-true", "bf16-mixed"):
        for one in (FSDP2Strategy(**choices), FabricFSDP2Strategy(**choices)):
            (trainer, _), (fabric, _) = both(one, precision=precision)
            assert (type(trainer), type(fabric)) == (FSDP2Strategy, FabricFSDP2Strategy)
            assert trainer.sharding.options == fabric.sharding.options == one.sharding.options
            assert trainer.arguments == fabric.arguments == one.arguments


REFUSED = r"does not run under 'fsdp2'\. Use `precision=` with '32-true', .*`HalfMixed` in place of"


@pytest.mark.parametrize(
    ("make", "plugin"),
    [
        (L.Trainer, DoublePrecision),
        (L.Trainer, lambda: MixedPrecision("bf16-mixed", "cpu")),
        (L.Fabric, FabricDouble),
        (L.Fabric, lambda: FabricMixed("bf16-mixed", "cpu")),
    ],
)
def test_plugins_that_do_not_run_under_fsdp2(make, plugin):
    with pytest.raises(ValueError, match=REFUSED):
        make(strategy="fsdp2", plugins=plugin(), **CPU)


def test_lightnings_model_parallel_strategy_is_accepted_and_left_alone():
    strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    assert L.Trainer(strategy=strategy, precision="fp8-hybrid", **CPU, **QUIET).strategy is strategy
    strategy = FabricModelParallel(lambda model, mesh: model, data_parallel_size=2, tensor_parallel_size=1)
    assert L.Fabric(strategy=strategy, precision="fp8-hybrid", **CPU).strategy is strategy


@pytest.mark.parametrize("option", [{"replicate": 2}, {"shards": 2}])
def test_parallelize_leaves_sizes_to_the_mesh(option):
    with pytest.raises(ValueError, match=r"is not valid in `parallelize`: the mesh says it"):
        lightning_lowprec.parallelize(torch.nn.Linear(1, 1), None, FP8TorchAO(), **option)
