"""What cannot be sharded says so, before any collective runs; one process."""

import re
from contextlib import nullcontext
from functools import partial

import lightning as L
import pytest
import torch
from lightning.fabric.strategies import ModelParallelStrategy
from torch import distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore
from torchao import optim
from transformers import MixtralConfig, MixtralModel
from transformers.pytorch_utils import Conv1D

from lightning_lowprec import (
    MSAMP,
    FabricFSDP2Strategy,
    FP8TorchAO,
    FSDP2Strategy,
    HalfMixed,
    Int8TorchAO,
    parallelize,
    plain,
)
from tests.fsdp2 import toy
from tests.fsdp2.models import Net, batch, loss_of
from tests.masters.test_float32_accumulation import TERMS, Terms

SMALL = MixtralConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_local_experts=4, vocab_size=64)
pytestmark = [
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor:UserWarning"),  # torch's advice
    pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`:UserWarning"),
]


@pytest.fixture
def six():
    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=6)
    return init_device_mesh("cpu", (3, 2), mesh_dim_names=("data_parallel", "tensor_parallel"))


def launched(precision, strategy="fsdp2"):
    return toy.fabric_for(precision, strategy=strategy)


IN_PARTS, GRAPHS = {"reshard_after_forward": 2}, {"backend": "aot_eager"}


@pytest.mark.parametrize(
    ("plugin", "options", "reason"),
    [
        (FP8TorchAO(recipe="rowwise"), {}, r"`recipe='rowwise'` encodes a weight for the forward and once more"),
        (Int8TorchAO(), {}, "`recipe='int8'` encodes a weight for the forward and once more for the backward"),
        (FP8TorchAO(fp8_eval=False), {}, r"`fp8_eval=False` evaluates with the weights in high precision"),
        ("bf16-mixed", {}, r"`precision='bf16-mixed'` has no FP8 weights"),
        ("32-true", {}, r"`precision='32-true'` has no FP8 weights"),
        (FP8TorchAO(), IN_PARTS, r"`reshard_after_forward=2` goes with weights in high precision only"),
    ],
)
def test_fp8_all_gather_that_cannot_be(plugin, options, reason):
    with pytest.raises(ValueError, match=rf"`fp8_all_gather=True` is not possible: {reason}"):
        launched(plugin, FabricFSDP2Strategy(fp8_all_gather=True, **options))
    assert not dist.is_initialized()


def test_what_the_strategy_cannot_do_with_sizes_parts_and_half_shards():
    for strategy in (FSDP2Strategy, FabricFSDP2Strategy):
        with pytest.raises(ValueError, match=r"`tensor_parallel_size=2` with `tensor_parallel=None`: .* needs both"):
            strategy(tensor_parallel_size=2)
        with pytest.raises(ValueError, match=r"`tensor_parallel_size=1` with .* needs both"):
            strategy(tensor_parallel={"up": 1})
    FabricFSDP2Strategy(**IN_PARTS).sharding.check(FP8TorchAO())
    with pytest.raises(ValueError, match=r"gathers its weights as codes, and `reshard_after_forward=2`"):
        launched(MSAMP("O3"), FabricFSDP2Strategy(**IN_PARTS))
    with pytest.raises(ValueError, match=r"`replicate=2` times `tensor_parallel_size=1` does not divide .* \(1\)"):
        launched("bf16-mixed", FabricFSDP2Strategy(replicate=2))
    strategy = FabricFSDP2Strategy(replicate="nodes", shards=4, tensor_parallel=print, tensor_parallel_size=2)
    with pytest.raises(ValueError, match=r"`shards=4` with `replicate=3` .* needs 24 processes, and there are 6\."):
        L.Fabric(accelerator="cpu", strategy=strategy, devices=2, num_nodes=3).strategy.setup_environment()
    plugin = HalfMixed("bf16", master_weights="remainder", grad_accumulation_dtype=torch.float32)
    with pytest.raises(ValueError, match=r"`grad_accumulation_dtype=torch.float32` with half-precision shards is not"):
        launched(plugin)
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("plugin", "refused", "said"),
    [
        (Int8TorchAO(), True, "CodedLinear does not run with tensor parallelism.* Use 'fp8-hybrid'"),
        (FP8TorchAO(emulate="hopper"), False, "`emulate='hopper'` does not run with tensor.* Use `emulate=True`"),
        (FP8TorchAO(pad_inner_dim=True), False, "features are padded does not run with.*, or `keep=.* the layer"),
        (FP8TorchAO({"*": {"forward": "bf16"}}), False, "GEMMs in bf16 does not run with tensor.* Choose all GEMMs"),
    ],
    ids=["int8", "hopper", "padded", "products"],
)
def test_layers_that_tensor_parallelism_may_not_cut(six, plugin, refused, said):
    """Some are refused, and all say so when they are called: a user's own plan may have cut them."""
    model, fqn = Net(), "blocks.0.up"
    model.blocks[0].up = nn.Linear(64, 72 if "padded" in said else 64)
    message = rf"`tensor_parallel` cuts '{fqn}', a layer of torchao whose kernels take no DTensors"
    options = {"tensor_parallel_size": 2, "fp8_all_gather": False}
    with pytest.raises(ValueError, match=message) if refused else nullcontext():
        parallelize(model, six, plugin, tensor_parallel={fqn: ColwiseParallel()}, **options)
    with pytest.raises(RuntimeError, match=said):
        model.blocks[0].up(torch.ones(2, 64))
    with pytest.raises(ValueError, match="left every parameter as it was"):
        parallelize(Net(), six, plugin, tensor_parallel=lambda model, mesh: None, **options)

    def without_head(model, mesh):
        model.lm_head = nn.Sequential(parallelize_module(model.lm_head, mesh, ColwiseParallel()))

    with pytest.raises(RuntimeError, match=r"renamed or removed parameters of \w*Net \(lm_head.bias, lm_head.weight\)"):
        parallelize(Net(), six, HalfMixed("bf16"), tensor_parallel=without_head, tensor_parallel_size=2)


def only(*fqns):
    return lambda fqn, module: fqn in fqns


def tied():
    model = Net()
    model.lm_head.weight = model.embedding.weight
    model.blocks[1].up.weight = model.blocks[0].up.weight
    return model


def tied_in_a_block():
    model = Net()
    model.blocks[0].down.bias = model.blocks[0].norm.bias
    return model


def pairs(count=2):
    return nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.GELU()) for _ in range(count)])


def mixed():
    model = Net()
    model.register_buffer("table", torch.ones(4, device="meta"))
    return model


def without_reset():
    scale = type("Scale", (nn.Module,), {})()
    scale.scale = nn.Parameter(torch.ones(4, device="meta"))
    return nn.Sequential(scale)


@pytest.mark.parametrize(
    ("make", "options", "error", "message"),
    [
        (Net, {"wrap": [nn.Conv2d]}, ValueError,
         r"`wrap=\['Conv2d'\]` matches no module of Net; .* Block, Embedding, "),
        (Net, {"activation_checkpointing": lambda fqn, module: False}, ValueError,
         "`activation_checkpointing=<function .*>` matches no module of Net"),
        (lambda: pairs(1)[0], {"activation_checkpointing": True}, ValueError,
         "`activation_checkpointing=True` takes the modules of `wrap`"),
        (tied, {"wrap": only("lm_head")}, ValueError,
         r"lm_head.weight and embedding.weight are one parameter, .* \('the root' and 'lm_head'\)"),
        (tied_in_a_block, {"wrap": only("blocks.0", "blocks.0.norm")}, ValueError,
         r"0.norm.bias and blocks.0.down.bias are one parameter, .* \('blocks.0' and 'blocks.0.norm'\)"),
        (lambda: nn.Sequential(FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu"))), {}, TypeError,
         r"'0' is wrapped by `FullyShardedDataParallel` \(FSDP1\), which does not mix"),
        (mixed, {}, RuntimeError, r"Net has 1 of 16 parameters and buffers on the meta device here.*mixed"),
        (without_reset, {}, RuntimeError, r"Scale have parameters or buffers but no `reset_parameters\(\)`"),
    ],
    ids=["wrap", "predicate", "recomputed", "tied", "nested", "fsdp1", "mixed", "without-reset"],
)  # fmt: skip
def test_models_and_options_that_cannot_be_sharded(alone, make, options, error, message):
    for keep in ((), ["blocks.1.up"]):
        model = parallelize(tied(), alone, FP8TorchAO(keep=keep), wrap=[nn.LayerNorm])  # all in the root
        assert model.blocks[1].up.weight is model.blocks[0].up.weight
    parallelize(tied_in_a_block(), alone, HalfMixed("bf16"), wrap=only("blocks.0", "blocks.0.up"))
    with pytest.raises(error, match=message):
        parallelize(make(), alone, HalfMixed("bf16"), **options)


def test_models_that_are_sharded_already(alone):
    by_hand = Net()
    for part, name in ((by_hand.blocks[1], "blocks.1"), (by_hand, "the model itself")):
        fully_shard(part, mesh=alone)
        with pytest.raises(TypeError, match=rf"Net is sharded already \('{name}'\).*parallelize\(model, mesh, plu"):
            launched("32-true").setup_module(by_hand)
    with pytest.raises(TypeError, match=r"`precision='fp8-hybrid'`: FSDPNet is sharded already \('blocks.0.norm"):
        FP8TorchAO().convert_module(by_hand)


def test_what_does_not_go_with_weights_of_codes(alone):
    offload, sync, cut = {"cpu_offload": True}, {"sync_module_states": True}, {"tensor_parallel": {"up": 1}}
    for options in (offload, sync, {**cut, "tensor_parallel_size": 2}):
        (name, value), *_ = options.items()
        with pytest.raises(ValueError, match=f"^`{name}={value}` does not go with weights that are kept as codes"):
            parallelize(Net(), alone, MSAMP("O3"), **options)
    with pytest.raises(ValueError, match=r"`fp8_all_gather=False` is not possible: .* gathered as they are"):
        parallelize(Net(), alone, MSAMP("O3"), fp8_all_gather=False)
    with torch.device("meta"), pytest.raises(ValueError, match=r"^Net is on the meta device, where weights have no"):
        parallelize(Net(), alone, MSAMP("O3"))


def test_scalar_parameters_have_a_way_out_that_the_error_names():
    def scaled():
        clip = nn.Module()
        clip.logit_scale = nn.Parameter(torch.tensor(2.5))
        model = Net()
        model.clip = clip
        return model

    fabric = launched("32-true")
    with pytest.raises(ValueError, match=r"the model has 'clip.logit_scale'") as caught:
        fabric.setup_module(scaled())
    (line,) = re.findall("`(.*?)`", str(caught.value))
    model = scaled()
    exec(line, {"model": model, "nn": nn})
    assert model.clip.logit_scale.tolist() == [2.5]
    fabric.setup_module(model)


def test_half_weights_sharded_by_hand_in_fabric(alone):
    def by_hand(model, mesh):
        fully_shard(model, mesh=mesh["data_parallel"])
        return model

    fabric = launched("bf16-remainder", ModelParallelStrategy(by_hand, 1, 1))
    model = fabric.setup_module(Net())
    optimizer = fabric.setup_optimizers(torch.optim.SGD(model.parameters(), lr=0.1))
    fabric.backward(loss_of(model, batch(0, 0)))
    with pytest.raises(RuntimeError, match=r"`precision='bf16-remainder'` .* sharded without it. Use `strategy='fsdp2"):
        optimizer.step()


def test_a_model_that_parallelize_has_sharded_is_set_up_by_one_fabric_and_by_the_next(alone):
    model = Net()
    model.lm_head.requires_grad_(False)
    for _ in range(2):
        plugin = HalfMixed("bf16", master_weights="remainder")
        fabric = launched(plugin, ModelParallelStrategy(lambda model, mesh: model, 1, 1))
        parallelize(model, alone, plugin)
        wrapped = fabric.setup_module(model)
        optimizer = fabric.setup_optimizers(torch.optim.SGD(model.parameters(), lr=0.1))
        before = model.blocks[0].up.weight.full_tensor().clone()
        fabric.backward(loss_of(wrapped, batch(0, 0)))
        optimizer.step()
        assert not torch.equal(model.blocks[0].up.weight.full_tensor(), before)
        assert not any(p.requires_grad for p in model.lm_head.parameters())


def test_a_sharded_model_goes_on_only_with_the_choices_it_was_built_for(alone):
    both = {"keep": ["up"], "fp8_eval": False, "emulate": True}
    others = {**both, "keep_fp32": ["norm"], "head": "fp8", "fp8_format": "e4m3", "weight_codes": "per_gemm"}
    per_layer = partial(FP8TorchAO, recipe={"*": "tensorwise"})
    for make, choices in ((FP8TorchAO, others), (per_layer, others), (partial(MSAMP, "O3"), both)):
        model = parallelize(Net(), alone, make())
        assert parallelize(model, alone, make()) is model, "a second call changes nothing"
        for name, value in choices.items():
            with pytest.raises(TypeError, match="sharded already"):
                parallelize(model, alone, make(**{name: value}))


def test_what_is_gathered_and_compiled_as_one(alone):
    """Also blocks of torch's own classes."""
    leaves, activations = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), [nn.Sequential(nn.GELU()) for _ in range(2)]
    of_many_kinds = nn.Sequential(nn.Sequential(pairs(), pairs()), pairs(1), leaves, nn.Sequential(*activations))
    graphs = []
    for model, wrap, groups in (
        (of_many_kinds, "auto", ["", "0.0", "0.1"]),
        (pairs(1), [nn.Sequential], ["", "0"]),
        (pairs(1)[0], "auto", [""]),
    ):
        strategy = FabricFSDP2Strategy(wrap=wrap, compile={"backend": lambda *made: graphs.append(made) or made[0]})
        launched("32-true", strategy).setup_module(model)
        assert [fqn for fqn, module in model.named_modules() if isinstance(module, FSDPModule)] == groups
        model(torch.ones(2, 4))
        assert graphs
        graphs.clear()


def test_meshes_of_copies_and_a_mesh_without_a_dimension_for_data(six):
    by_hand = init_device_mesh("cpu", (3, 2), mesh_dim_names=("a", "b"))
    parallelize(model := Net(), by_hand, FP8TorchAO(), fp8_all_gather=True)
    assert model.blocks[0].up.weight.to_local().shape == (64, 64), "128 rows in 2 shards, however many copies"
    fabric = L.Fabric(accelerator="cpu", strategy=FabricFSDP2Strategy(replicate="nodes"), devices=2, num_nodes=3)
    fabric.strategy.setup_environment()
    assert fabric.strategy.distributed_sampler_kwargs == {"num_replicas": 6, "rank": 3}
    three = init_device_mesh("cpu", (1, 2, 3), mesh_dim_names=("a", "b", "c"))
    with pytest.raises(ValueError, match=r"the dimensions \('a', 'b', 'c'\) has none named 'data_parallel'"):
        parallelize(Net(), three, FP8TorchAO())


@pytest.mark.parametrize("name", ["bf16-master", "bf16-remainder"])
def test_dtypes_of_buffers_norms_and_outputs(alone, name):
    def rotary():
        model = Net()
        for buffer, dtype in (("table", torch.float32), ("exact", torch.float64), ("count", torch.int32)):
            model.register_buffer(buffer, torch.ones(64, dtype=dtype))
        return model

    form = True if name == "bf16-master" else "remainder"
    for kept, asked, dtype in ((), None, torch.float16), ((), torch.bfloat16, torch.bfloat16), (["table"], None, None):
        plugin = HalfMixed("bf16", master_weights=form, buffer_dtype=torch.float16, keep_fp32=kept)
        model = launched(plugin, FabricFSDP2Strategy(buffer_dtype=asked, shards=1)).setup_module(rotary())
        dtypes = [buffer.dtype for buffer in model.module.buffers()]
        assert dtypes == [dtype or torch.float32, torch.float64, torch.int32]
    fabric, net = launched(name, FabricFSDP2Strategy(output_dtype=torch.float64)), rotary()
    model, _ = fabric.setup(net, torch.optim.SGD(net.lm_head.parameters()))
    model(batch(0, 0)[:, 1:])  # what no optimizer holds stays in the dtype of its group
    assert model.module.table.dtype == torch.float32
    assert model.module(batch(0, 0)[:, 1:]).dtype == torch.float64
    seen, block = [], (net := Net()).blocks[0]
    block.norm.register_forward_hook(lambda norm, args, output: output.float())  # as on CUDA
    block.up.register_forward_pre_hook(lambda up, args: seen.append(args[0].dtype))
    launched(FP8TorchAO(master_weights=form)).setup_module(net)(batch(0, 0))
    assert seen == [torch.bfloat16]


def test_plain_of_a_sharded_model_names_a_way_out_that_works():
    wrapped, model = launched("fp8-hybrid").setup_module(model := Net()), model
    for options in ({}, {"copy": True}):
        with pytest.raises(RuntimeError, match=r"and 15 parameters of FSDPNet are sharded\.") as caught:
            plain(wrapped, **options)
    call = "get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))"
    assert call in str(caught.value)
    fresh = Net(seed=1)
    fresh.load_state_dict(eval(call, {**vars(state_dict), "model": model}))
    assert all(torch.equal(p.full_tensor(), q) for p, q in zip(model.parameters(), fresh.parameters(), strict=True))


@pytest.mark.parametrize(
    ("plugin", "make", "what"),
    [
        (FP8TorchAO(), Net, "'blocks.0.up' has 128 output features"),
        (FP8TorchAO(), lambda: nn.Sequential(Conv1D(32, 64)), "'0' has 64 input features"),
        (FP8TorchAO(), lambda: MixtralModel(SMALL).layers[0].mlp, "'experts.gate_up_proj' has 4 experts"),
        (MSAMP("O3"), Net, "'blocks.0.up' has 128 output features"),
        (MSAMP("O3"), lambda: nn.Sequential(Conv1D(32, 64)), "'0' has 64 input features"),
    ],
)
def test_uneven_shards_are_found_before_any_collective(six, monkeypatch, plugin, make, what):
    monkeypatch.setattr(dist, "all_gather_object", lambda *args, **kwargs: pytest.fail("a collective ran first"))
    with pytest.raises(ValueError, match=f"{what}, which do not divide into 3 equal"):
        parallelize(make(), six["data_parallel"], plugin, fp8_all_gather=plugin.keeps_codes or True)


@pytest.mark.parametrize(
    ("first", "second", "kept"),
    [
        ({}, {}, None),
        ({"wrap": (nn.Linear, nn.LayerNorm)}, {"wrap": [nn.LayerNorm, nn.Linear]}, None),
        ({"wrap": only("lm_head")}, {"wrap": only("lm_head")}, None),
        ({"sync_module_states": True}, {}, None),
        ({}, {"activation_checkpointing": True}, "activation_checkpointing=False"),
        ({"wrap": [nn.Linear]}, {"wrap": "auto"}, r"wrap=\[<class 'torch.nn.modules.linear.Linear'>\]"),
        ({"compile": GRAPHS}, {"compile": {"backend": "eager"}}, "compile={'backend': 'aot_eager'}"),
        ({"reshard_after_forward": True, "param_dtype": torch.bfloat16}, {}, "reshard_after_forward=True, param_dtype"),
    ],
)
def test_a_second_set_up_warns_of_other_options(alone, first, second, kept):
    model = parallelize(Net(), alone, HalfMixed("bf16"), **first)
    said = (
        nullcontext() if kept is None else pytest.warns(UserWarning, match=f"Net stays sharded as it was, with {kept}")
    )
    with said:
        parallelize(model, alone, HalfMixed("bf16"), **second)


@pytest.mark.parametrize("name", ["AdamW8bit", "AdamW4bit", "AdamWFp8", "Adam8bit", "_AdamW"])
def test_optimizers_of_torchao_that_keep_their_state_as_codes(name):
    optimizer = type("Own", (getattr(optim, name),), {})(nn.Linear(4, 4).parameters())
    refused = pytest.raises(ValueError, match=r"`Own` of torchao does not run under 'fsdp2'.*`precision='bf16-8bit'`")
    with nullcontext() if name == "_AdamW" else refused:  # its state is float32
        FSDP2Strategy().sharding.follow(optimizer)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_an_optimizer_of_torchao_that_offloads(dtype):
    optimizer = optim.CPUOffloadOptimizer.__new__(optim.CPUOffloadOptimizer)  # its constructor asks for a GPU
    groups = [{"params": list(nn.Linear(4, 4, dtype=each).parameters())} for each in (torch.float32, dtype)]
    optimizer.optim_dict, optimizer.d_param_groups = {}, groups
    message = "does not run under 'fsdp2', where it does not update half-precision weights"
    with nullcontext() if dtype is torch.float32 else pytest.raises(ValueError, match=message):
        FSDP2Strategy().sharding.follow(optimizer)


def test_micro_batches_add_up_in_float32_before_their_reduction(alone):
    fabric = launched("bf16-mixed")
    model = fabric.setup_module(Terms())
    for number, term in enumerate(TERMS, start=1):
        with fabric.no_backward_sync(model, enabled=number < len(TERMS)):
            fabric.backward(model(torch.full((16,), term)))
    assert model.weight.grad.full_tensor().eq(sum(TERMS)).all()


def test_a_torch_that_gathers_a_module_in_one_dtype_and_weights_that_some_ranks_have(alone, monkeypatch):
    monkeypatch.setattr("lightning_lowprec.fsdp2.shard.has_several_groups", lambda: False)
    model = Net()
    model.embedding.weight = model.lm_head.weight  # by its second name
    with pytest.warns(UserWarning, match=r"2 parameters that are to stay float32 are gathered as torch\.bfloat16"):
        parallelize(model, alone, HalfMixed("bf16", keep_fp32=["embedding", "lm_head.bias"]))
    monkeypatch.setattr("lightning_lowprec.fsdp2.shard.gathered", lambda here: [here, "meta", "real"])
    with pytest.raises(RuntimeError, match=r"Net has 0 of 15 .*the ranks have: real, meta, real\."):
        parallelize(Net(), alone, HalfMixed("bf16"))
