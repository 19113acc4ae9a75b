"""Lightning's FSDPStrategy becomes ours: every choice carried over, or an error with the remedy. One process."""

import logging
from datetime import timedelta
from functools import partial

import lightning as L
import pytest
import torch
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.fabric.plugins.precision import FSDPPrecision as FabricFSDPPrecision
from lightning.fabric.strategies import FSDPStrategy as FabricFSDP
from lightning.pytorch.plugins import TorchCheckpointIO
from lightning.pytorch.plugins.precision import FSDPPrecision as TrainerFSDPPrecision
from lightning.pytorch.strategies import FSDPStrategy as TrainerFSDP
from torch import nn
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
)

import lightning_lowprec
from lightning_lowprec import FabricFSDP2Strategy, FP8TorchAO, FSDP2Strategy
from tests.toys import QUIET

CPU = {"accelerator": "cpu", "devices": 2}
ALL = [(a, b) for a in (TrainerFSDP, FabricFSDP) for b in (FSDP2Strategy, FabricFSDP2Strategy)]
SIZE_BASED = partial(size_based_auto_wrap_policy, min_num_params=100)
HYBRID = {"sharding_strategy": "HYBRID_SHARD", "auto_wrap_policy": {nn.Linear}}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)


def model():
    return nn.Sequential(nn.Embedding(4, 4), nn.ModuleList([Block(), Block()]), nn.Dropout(), nn.LayerNorm(4))


def options(source=TrainerFSDP, target=FSDP2Strategy, **choices):
    return target.from_fsdp(source(**choices)).sharding.options


def chosen(choice):
    """Which modules of the model a `wrap` means."""
    fits = choice if callable(choice) else lambda fqn, module: isinstance(module, choice)
    return [fqn for fqn, module in model().named_modules() if fits(fqn, module)]


@pytest.mark.parametrize(("source", "target"), ALL)
def test_every_choice_at_once_in_every_direction(source, target):
    environment = LightningEnvironment()
    ours = target.from_fsdp(
        source(
            auto_wrap_policy={Block},
            activation_checkpointing_policy={nn.Linear},
            cpu_offload=True,
            sharding_strategy="SHARD_GRAD_OP",
            device_mesh=(4,),
            state_dict_type="full",
            mixed_precision=MixedPrecision(torch.bfloat16, torch.float32, torch.float16),
            process_group_backend="gloo",
            timeout=timedelta(seconds=7),
            cluster_environment=environment,
            sync_module_states=True,
        )
    )
    got = ours.sharding.options
    assert type(ours) is target
    assert (got.wrap, got.activation_checkpointing, got.cpu_offload) == ((Block,), (nn.Linear,), True)
    assert (got.reshard_after_forward, got.replicate, got.shards) == (False, 1, 4)
    assert (got.param_dtype, got.reduce_dtype, got.buffer_dtype) == (torch.bfloat16, torch.float32, torch.float16)
    assert got.sync_module_states is True
    assert ours.state_dict_type == "full"
    assert ours.process_group_backend == "gloo"
    assert ours.arguments["timeout"] == timedelta(seconds=7)
    assert ours.cluster_environment is environment


@pytest.mark.parametrize(
    ("choices", "reshard", "sizes"),
    [
        ({"sharding_strategy": "HYBRID_SHARD", "auto_wrap_policy": {nn.Linear}}, None, ("nodes", None)),
        ({"sharding_strategy": ShardingStrategy.HYBRID_SHARD, "auto_wrap_policy": {nn.Linear}}, None, ("nodes", None)),
        ({"sharding_strategy": "_HYBRID_SHARD_ZERO2", "auto_wrap_policy": {nn.Linear}}, False, ("nodes", None)),
        ({"sharding_strategy": "HYBRID_SHARD", "device_mesh": (2, 4)}, None, (2, 4)),
    ],
)
def test_hybrid_sharding_is_within_nodes_or_by_a_mesh(choices, reshard, sizes):
    got = options(**choices)
    assert (got.reshard_after_forward, (got.replicate, got.shards)) == (reshard, sizes)


POLICIES = [
    {Block},
    ModuleWrapPolicy([Block]),
    partial(transformer_auto_wrap_policy, transformer_layer_cls={Block}),
    partial(lambda_auto_wrap_policy, lambda_fn=lambda module: isinstance(module, Block)),
]


@pytest.mark.parametrize("policy", POLICIES)
def test_policies_by_class(policy):
    got = options(auto_wrap_policy=policy, activation_checkpointing_policy=policy)
    assert chosen(got.wrap) == chosen(got.activation_checkpointing) == ["1.0", "1.1"]


def test_gradients_are_reduced_in_the_parameters_dtype_unless_said_otherwise_as_in_fsdp1():
    got = options(mixed_precision=MixedPrecision(param_dtype=torch.bfloat16))
    assert (got.param_dtype, got.reduce_dtype, got.buffer_dtype) == (torch.bfloat16, torch.bfloat16, None)


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"auto_wrap_policy": CustomPolicy(bool)}, "no equal of the policy .*a function .* -> bool by `wrap"),
        ({"activation_checkpointing_policy": SIZE_BASED}, "no equal of the policy .* -> bool by `activation_check"),
        ({"sharding_strategy": "NO_SHARD"}, "shards nothing; use `strategy='ddp'`"),
        ({"device_mesh": (2, 4)}, r"`device_mesh=\(2, 4\)` does not go with `sharding_strategy='FULL_SHARD'`"),
        ({**HYBRID, "device_mesh": (8,)}, r"`device_mesh=\(8,\)` does not go.*\(copies, shards\) with 'HYBRID_SHARD'"),
        ({"mixed_precision": MixedPrecision(keep_low_precision_grads=True)}, "keep_low_precision_grads=True.*dtypes"),
        ({"ignored_modules": [nn.Linear(1, 1)]}, r"ignored_modules=...\)` has no equal in FSDP2: .*parallelize"),
        ({"param_init_fn": print}, r"param_init_fn=.*`reset_parameters\(\)`"),
        ({"process_group": object(), **HYBRID}, r"process_group=.*`replicate=`"),
        ({"surprise": 1}, r"surprise=...\)` has no equal in FSDP2: leave it out"),
        ({"parallel_devices": [torch.device("cpu")]}, "pass `devices=` to Trainer or Fabric"),
    ],
)
def test_what_has_no_equal_raises_and_names_the_remedy(choices, message):
    with pytest.raises(ValueError, match=message):
        options(**choices)


def test_a_precision_inside_the_strategy_is_refused():
    for strategy in (
        TrainerFSDP(precision_plugin=TrainerFSDPPrecision("bf16-mixed")),
        FabricFSDP(precision=FabricFSDPPrecision("bf16-mixed")),
    ):
        with pytest.raises(ValueError, match="pass `precision=` to Trainer or Fabric"):
            FSDP2Strategy.from_fsdp(strategy)


def test_a_checkpoint_io_is_carried_into_the_trainer_and_refused_in_fabric():
    io = TorchCheckpointIO()
    assert FSDP2Strategy.from_fsdp(TrainerFSDP(checkpoint_io=io)).checkpoint_io is io
    with pytest.raises(ValueError, match=r"`checkpoint_io=.*` is not possible in Fabric.*use the Trainer"):
        FabricFSDP2Strategy.from_fsdp(TrainerFSDP(checkpoint_io=io))


def test_it_says_once_what_became_of_it(caplog):
    with caplog.at_level(logging.INFO):
        options(auto_wrap_policy={Block}, limit_all_gathers=True, device_id=0)
        options(cpu_offload=True)
    assert caplog.messages == [
        "FSDPStrategy became FSDP2Strategy(state_dict_type='full', wrap=[Block]); dropped, as FSDP2 has its own way:"
        " device_id, limit_all_gathers.",
        "FSDPStrategy became FSDP2Strategy(state_dict_type='full', cpu_offload=True); without an auto_wrap_policy,"
        " repeated blocks are gathered one by one.",
    ]


@pytest.mark.parametrize("base", [TrainerFSDP, FabricFSDP])
def test_derived_classes_are_refused(base):
    class Mine(base):
        pass

    with pytest.raises(TypeError, match=r"`Mine` is not FSDPStrategy itself.*pass its choices to `lightning_lowprec"):
        L.Trainer(strategy=Mine(), precision="fp8-hybrid", **CPU, **QUIET)


@pytest.mark.parametrize(
    ("source", "own"),
    [(TrainerFSDP, ["_precision_plugin", "kwargs", "_checkpoint_io"]), (FabricFSDP, ["_precision", "_fsdp_kwargs"])],
)
def test_a_lightning_that_has_moved_a_name(source, own):
    for name in ("_state_dict_type", "cpu_offload", "sharding_strategy", *own):
        strategy = source()
        delattr(strategy, name)
        with pytest.raises(
            ImportError, match=rf"has moved .*{name}.* of FSDPStrategy.*write `lightning_lowprec.FSDP2S"
        ):
            FSDP2Strategy.from_fsdp(strategy)


@pytest.mark.parametrize("how", [{"precision": "fp8-hybrid"}, {"plugins": "FP8TorchAO"}, {"precision": "bf16-master"}])
@pytest.mark.parametrize("source", [TrainerFSDP, FabricFSDP])
def test_trainer_and_fabric_turn_the_object_into_ours_on_cpu_too(source, how):
    how = {"plugins": FP8TorchAO()} if "plugins" in how else how
    trainer = L.Trainer(strategy=source(auto_wrap_policy={Block}), **how, **CPU, **QUIET)
    assert type(trainer.strategy) is FSDP2Strategy
    fabric = L.Fabric(strategy=source(auto_wrap_policy={Block}), **how, **CPU)
    assert type(fabric.strategy) is FabricFSDP2Strategy
    assert trainer.strategy.sharding.options.wrap == fabric.strategy.sharding.options.wrap == (Block,)


def test_unregistered_nothing_is_translated():
    lightning_lowprec.unregister()
    try:
        with pytest.raises((ValueError, TypeError, L.fabric.utilities.exceptions.MisconfigurationException)):
            L.Trainer(strategy=TrainerFSDP(), plugins=FP8TorchAO(), **CPU, **QUIET)
    finally:
        lightning_lowprec.register()
