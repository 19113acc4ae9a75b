"""`strategy="fsdp2"`, `"fsdp"` and Lightning's FSDPStrategy, every choice carried over or refused. One process."""

import logging
import pickle
from datetime import timedelta
from functools import partial

import lightning as L
import lightning.fabric.plugins as fabric_plugins
import lightning.pytorch.plugins as trainer_plugins
import pytest
import torch
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.fabric.strategies import FSDPStrategy as FabricFSDP
from lightning.pytorch.strategies import FSDPStrategy as TrainerFSDP
from torch import nn
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy, wrap

import lightning_lowprec
from lightning_lowprec import FabricFSDP2Strategy, FP8TorchAO, FSDP2Strategy, HalfMixed
from tests.toys import QUIET, Block

CPU = {"accelerator": "cpu", "devices": 2}


def both(strategy, **how):
    trainer = L.Trainer(strategy=strategy, **how, **CPU, **QUIET)
    fabric = L.Fabric(strategy=strategy, **how, **CPU)
    return (trainer.strategy, trainer.precision_plugin), (fabric.strategy, fabric.strategy.precision)


@pytest.mark.parametrize("name", ["fsdp", "FSDP_CPU_OFFLOAD", TrainerFSDP, FabricFSDP])
@pytest.mark.parametrize("how", [{"precision": "fp8-hybrid"}, {"precision": "bf16-sr"}, {"plugins": "FP8TorchAO"}])
def test_fsdp_by_name_or_as_an_object_becomes_fsdp2_under_our_precisions_on_cpu_too(name, how):
    how = {"plugins": FP8TorchAO()} if "plugins" in how else how
    by_name = isinstance(name, str)
    (trainer, _), (fabric, _) = both(name if by_name else name(auto_wrap_policy={nn.Linear}), **how)
    assert (type(trainer), type(fabric)) == (FSDP2Strategy, FabricFSDP2Strategy)
    offloads = name == "FSDP_CPU_OFFLOAD"
    assert trainer.sharding.options.cpu_offload is fabric.sharding.options.cpu_offload is offloads
    if by_name:
        assert (trainer.state_dict_type, fabric.state_dict_type) == ("full", "sharded"), "what FSDP saves in each"
    else:
        assert trainer.sharding.options.wrap == fabric.sharding.options.wrap == (nn.Linear,)


def test_fsdp_with_lightnings_own_precisions_stays_lightnings():
    for make in (L.Trainer, L.Fabric):
        with pytest.raises((ValueError, L.fabric.utilities.exceptions.MisconfigurationException), match="GPU"):
            make(strategy="fsdp", precision="bf16-mixed", **CPU)


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [
        (name, torch.float16 if str(name)[:2] == "16" else torch.bfloat16)
        for name in ("16-mixed", "16", 16, "bf16-mixed", "bf16")
    ],
)
@pytest.mark.parametrize("strategy", ["FSDP2".format, FSDP2Strategy, FabricFSDP2Strategy])
def test_lightnings_mixed_precisions_become_our_half_mixed(strategy, precision, dtype):
    (trainer, one), (fabric, other) = both(strategy(), precision=precision)
    assert (type(trainer), type(fabric)) == (FSDP2Strategy, FabricFSDP2Strategy), "by either flavour of the object"
    for plugin in (one, other):
        assert type(plugin) is HalfMixed
        assert (plugin.autocast_dtype, plugin.weights) == (dtype, None), "the weights stay as they are"
        assert (plugin.scaler is not None) == (dtype is torch.float16)


def test_the_other_flavour_is_translated_with_all_its_choices():
    choices = {"wrap": [torch.nn.Linear], "cpu_offload": True, "state_dict_type": "full"}
    for precision in ("fp8-hybrid", "32-true", "bf16-mixed"):
        for one in (FSDP2Strategy(**choices), FabricFSDP2Strategy(**choices)):
            (trainer, _), (fabric, _) = both(pickle.loads(pickle.dumps(one)), precision=precision)
            assert (type(trainer), type(fabric)) == (FSDP2Strategy, FabricFSDP2Strategy)
            assert trainer.sharding.options == fabric.sharding.options == one.sharding.options
            assert trainer.arguments == fabric.arguments == one.arguments


REFUSED = r"does not run under 'fsdp2'\. Use `precision=` with '32-true', .*`HalfMixed` in place of"


@pytest.mark.parametrize(("make", "plugins"), [(L.Trainer, trainer_plugins), (L.Fabric, fabric_plugins)])
def test_plugins_that_do_not_run_under_fsdp2(make, plugins):
    for plugin in (plugins.DoublePrecision(), plugins.MixedPrecision("bf16-mixed", "cpu")):
        with pytest.raises(ValueError, match=REFUSED):
            make(strategy="fsdp2", plugins=plugin, **CPU)


@pytest.mark.parametrize("option", [{"replicate": 2}, {"shards": 2}])
def test_parallelize_leaves_sizes_to_the_mesh(option):
    with pytest.raises(ValueError, match=r"is not valid in `parallelize`: the mesh says it"):
        lightning_lowprec.parallelize(torch.nn.Linear(1, 1), None, FP8TorchAO(), **option)


ALL = [(a, b) for a in (TrainerFSDP, FabricFSDP) for b in (FSDP2Strategy, FabricFSDP2Strategy)]
SIZE_BASED = partial(wrap.size_based_auto_wrap_policy, min_num_params=100)
HYBRID = {"sharding_strategy": "HYBRID_SHARD", "auto_wrap_policy": {nn.Linear}}


def model():
    return nn.Sequential(nn.Embedding(4, 4), nn.ModuleList([Block(4), Block(4)]), nn.Dropout(), nn.LayerNorm(4))


def options(source=TrainerFSDP, target=FSDP2Strategy, **choices):
    return target.from_fsdp(source(**choices)).sharding.options


def chosen(choice):
    fits = choice if callable(choice) else lambda fqn, module: isinstance(module, choice)
    return [fqn for fqn, module in model().named_modules() if fits(fqn, module)]


@pytest.mark.parametrize(("source", "target"), ALL)
def test_every_choice_at_once_in_every_direction(source, target):
    kept = {"process_group_backend": "gloo", "cluster_environment": LightningEnvironment()}
    ours = target.from_fsdp(
        source(
            auto_wrap_policy={Block},
            activation_checkpointing_policy={nn.Linear},
            cpu_offload=True,
            sharding_strategy="SHARD_GRAD_OP",
            device_mesh=(4,),
            state_dict_type="full",
            sync_module_states=True,
            mixed_precision=MixedPrecision(torch.bfloat16, torch.float32, torch.float16),
            timeout=timedelta(seconds=7),
            **kept,
        )
    )
    got = ours.sharding.options
    assert type(ours) is target
    assert (got.wrap, got.activation_checkpointing, got.cpu_offload) == ((Block,), (nn.Linear,), True)
    assert (got.reshard_after_forward, got.replicate, got.shards) == (False, 1, 4)
    assert (got.param_dtype, got.reduce_dtype, got.buffer_dtype) == (torch.bfloat16, torch.float32, torch.float16)
    assert (got.sync_module_states, ours.state_dict_type) == (True, "full")
    assert ours.arguments["timeout"] == ours._timeout == timedelta(seconds=7)
    assert {name: getattr(ours, name) for name in kept} == kept


@pytest.mark.parametrize(
    ("choices", "expected"),
    [
        (HYBRID, (None, "nodes", None, None)),
        ({**HYBRID, "sharding_strategy": ShardingStrategy.HYBRID_SHARD}, (None, "nodes", None, None)),
        ({**HYBRID, "sharding_strategy": "_HYBRID_SHARD_ZERO2"}, (False, "nodes", None, None)),
        ({"sharding_strategy": "HYBRID_SHARD", "device_mesh": (2, 4)}, (None, 2, 4, None)),
        # gradients are reduced in the parameters' dtype unless it is said otherwise, as in FSDP1
        ({"mixed_precision": MixedPrecision(param_dtype=torch.bfloat16)}, (None, 1, None, torch.bfloat16)),
    ],
)
def test_hybrid_sharding_and_the_dtype_of_the_reduction(choices, expected):
    got = options(**choices)
    assert (got.reshard_after_forward, got.replicate, got.shards, got.reduce_dtype) == expected
    assert (got.param_dtype, got.buffer_dtype) == (got.reduce_dtype, None)


POLICIES = [
    {Block},
    wrap.ModuleWrapPolicy([Block]),
    partial(wrap.transformer_auto_wrap_policy, transformer_layer_cls=frozenset({Block})),
    partial(wrap.lambda_auto_wrap_policy, lambda_fn=lambda module: isinstance(module, Block)),
]


@pytest.mark.parametrize("policy", POLICIES)
def test_policies_by_class(policy):
    got = options(auto_wrap_policy=policy, activation_checkpointing_policy=policy)
    assert chosen(got.wrap) == chosen(got.activation_checkpointing) == ["1.0", "1.1"]


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"auto_wrap_policy": wrap.CustomPolicy(bool)}, "no equal of the policy .*a function .* -> bool by `wrap"),
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
        ({"precision_plugin": trainer_plugins.FSDPPrecision("bf16-mixed")}, "pass `precision=` to Trainer or Fabric"),
        (
            {"source": FabricFSDP, "precision": fabric_plugins.FSDPPrecision("bf16-mixed")},
            "pass `precision=` to Trainer or",
        ),
    ],
)
def test_what_has_no_equal_raises_and_names_the_remedy(choices, message):
    with pytest.raises(ValueError, match=message):
        options(**choices)


def test_a_checkpoint_io_is_carried_into_the_trainer_and_refused_in_fabric():
    io = trainer_plugins.TorchCheckpointIO()
    ours = FSDP2Strategy.from_fsdp(TrainerFSDP(checkpoint_io=io, timeout=None))
    assert (ours.checkpoint_io, ours._timeout) == (io, None)
    with pytest.raises(ValueError, match=r"`checkpoint_io=.*` is not possible in Fabric.*use the Trainer"):
        FabricFSDP2Strategy.from_fsdp(TrainerFSDP(checkpoint_io=io))


def test_it_says_once_what_became_of_it(caplog):
    with caplog.at_level(logging.INFO):
        options(auto_wrap_policy={nn.Linear, Block}, limit_all_gathers=True, device_id=0)
        options(cpu_offload=True)
    assert caplog.messages == [
        "FSDPStrategy became FSDP2Strategy(state_dict_type='full', wrap=[Block, Linear]); dropped, as FSDP2 has its own"
        " way: device_id, limit_all_gathers.",
        "FSDPStrategy became FSDP2Strategy(state_dict_type='full', cpu_offload=True); without an auto_wrap_policy,"
        " repeated blocks are gathered one by one.",
    ]


@pytest.mark.parametrize("base", [TrainerFSDP, FabricFSDP])
def test_derived_classes_are_refused(base):
    mine = type("Mine", (base,), {})()
    with pytest.raises(TypeError, match=r"`Mine` is not FSDPStrategy itself.*pass its choices to `lightning_lowprec"):
        L.Trainer(strategy=mine, precision="fp8-hybrid", **CPU, **QUIET)


@pytest.mark.parametrize(
    ("source", "own"),
    [(TrainerFSDP, ["_precision_plugin", "kwargs", "_checkpoint_io"]), (FabricFSDP, ["_precision", "_fsdp_kwargs"])],
)
def test_a_lightning_that_has_moved_a_name(source, own):
    for name in ("_state_dict_type", "cpu_offload", "sharding_strategy", *own):
        strategy = source()
        delattr(strategy, name)
        with pytest.raises(ImportError, match=rf"has moved .*{name}.* of FSDPStrategy.*write `lightning_l"):
            FSDP2Strategy.from_fsdp(strategy)
