"""What cannot be sharded says so, before any collective runs; one process."""

import re
from contextlib import nullcontext

import lightning as L
import pytest
import torch
from lightning.fabric.strategies import ModelParallelStrategy
from torch import distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel
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
from lightning_lowprec.fsdp2 import shard
from lightning_lowprec.fsdp2.meshes import make_mesh, shards
from lightning_lowprec.fsdp2.options import ShardOptions
from lightning_lowprec.fsdp2.shard import _parallelize, check_model, check_shared, origin
from lightning_lowprec.fsdp2.strategy import Sharding, gathered_line, gathers_fp8
from lightning_lowprec.private.fsdp2 import gathered_parameters
from tests.fsdp2.models import Net, batch, loss_of

CPU = torch.device("cpu")
SMALL = MixtralConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_local_experts=4, vocab_size=64)
pytestmark = [
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor:UserWarning"),  # torch's advice
    pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`:UserWarning"),
]


@pytest.fixture
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield make_mesh(CPU, 1, 1, 1)
    dist.destroy_process_group()


def shard_alone(model, mesh, fp8_all_gather=False, **options):
    return shard.shard(
        model, mesh, ShardOptions(**options), device=CPU, param_dtype=torch.bfloat16, fp8_all_gather=fp8_all_gather
    )


def converted(model, plugin):
    plugin.bind_device(CPU)
    plugin.convert_module(model)
    return model


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"replicate": 0}, r"`replicate=0` is not valid; expected an integer of at least 1"),
        ({"replicate": 1.5}, r"`replicate=1.5` is not valid"),
        ({"replicate": "node"}, r"`replicate='node'` is not valid; expected an integer of at least 1 or 'nodes'"),
        ({"shards": 0}, r"`shards=0` is not valid; expected None or an integer of at least 1"),
        ({"wrap": "blocks"}, r"`wrap='blocks'` is not valid; expected 'auto', a collection of nn.Module classes"),
        ({"wrap": []}, r"`wrap=\[\]` is not valid"),
        ({"wrap": nn.Linear}, r"`wrap=<class .*Linear'>` is not valid"),
        ({"wrap": [int]}, r"is not valid; expected 'auto', a collection"),
        ({"activation_checkpointing": "yes"}, r"`activation_checkpointing='yes'` is not valid; expected True, False"),
        ({"compile": "auto"}, r"`compile='auto'` is not valid; expected True, False or a mapping"),
        ({"fp8_all_gather": None}, r"`fp8_all_gather=None` is not valid; expected 'auto', True or False"),
        ({"param_dtype": "bf16"}, r"`param_dtype='bf16'` is not valid; expected None or a floating-point torch.dtype"),
        ({"reduce_dtype": torch.int8}, r"`reduce_dtype=torch.int8` is not valid"),
        ({"tensor_parallel_size": 2}, r"`tensor_parallel_size=2` with `tensor_parallel=None`: .* needs both"),
        ({"tensor_parallel": {"up": 1}}, r"`tensor_parallel_size=1` with .* needs both"),
        ({"state_dict_type": "half"}, r"`state_dict_type='half'` is not valid; expected one of: sharded, full"),
    ],
)
def test_options_are_checked_when_given(options, message):
    for strategy in (FSDP2Strategy, FabricFSDP2Strategy):
        with pytest.raises(ValueError, match=message):
            strategy(**options)


@pytest.mark.parametrize(
    ("plugin", "reason"),
    [
        (FP8TorchAO(recipe="rowwise"), r"`recipe='rowwise'` encodes a weight for the forward and once more"),
        (Int8TorchAO(), "`recipe='int8'` encodes a weight for the forward and once more for the backward"),
        (FP8TorchAO(fp8_eval=False), r"`fp8_eval=False` evaluates with the weights in high precision"),
        ("bf16-mixed", r"`precision='bf16-mixed'` has no FP8 weights"),
        ("32-true", r"`precision='32-true'` has no FP8 weights"),
    ],
)
def test_fp8_all_gather_that_cannot_be(plugin, reason):
    kwargs = {"precision": plugin} if isinstance(plugin, str) else {"plugins": plugin}
    with pytest.raises(ValueError, match=rf"`fp8_all_gather=True` is not possible: {reason}"):
        L.Fabric(accelerator="cpu", devices=1, strategy=FabricFSDP2Strategy(fp8_all_gather=True), **kwargs)
    assert not dist.is_initialized()


def test_parts_of_gathered_weights_are_kept_in_high_precision_only():
    plugin, some = FP8TorchAO("tensorwise", emulate=True), {"reshard_after_forward": 2}
    assert gathers_fp8(plugin, ShardOptions())
    assert not gathers_fp8(plugin, ShardOptions(**some))
    with pytest.raises(ValueError, match=r"`reshard_after_forward=2` goes with weights in high precision only"):
        gathers_fp8(plugin, ShardOptions(**some, fp8_all_gather=True))
    with pytest.raises(ValueError, match=r"gathers its weights as codes, and `reshard_after_forward=2`"):
        gathers_fp8(MSAMP("O3"), ShardOptions(**some))


def test_sizes_must_divide_the_world():
    assert [shards(8, 1, 1), shards(8, 2, 1), shards(8, 2, 2)] == [8, 4, 2]
    with pytest.raises(ValueError, match=r"`replicate=3` times `tensor_parallel_size=1` does not divide .* \(4\)"):
        shards(4, 3, 1)
    fabric = L.Fabric(accelerator="cpu", devices=1, strategy=FabricFSDP2Strategy(replicate=2), precision="bf16-mixed")
    with pytest.raises(ValueError, match=r"does not divide the number of processes \(1\)"):
        fabric.launch()
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("plugin", "refused", "said"),
    [
        (Int8TorchAO(), True, "CodedLinear does not run with tensor parallelism.* Use 'fp8-hybrid'"),
        (FP8TorchAO(emulate="hopper"), False, "`emulate='hopper'` does not run with tensor.* Use `emulate=True`"),
    ],
    ids=["int8", "hopper"],
)
def test_layers_that_tensor_parallelism_may_not_cut(alone, plugin, refused, said):
    """Some are refused, and all say so when they are called: a user's own plan may have cut them."""
    model = converted(Net(), plugin)
    fqn = plugin.plan.linears[0]
    options = ShardOptions(tensor_parallel={fqn: ColwiseParallel()}, tensor_parallel_size=2)
    message = rf"`tensor_parallel` cuts '{fqn}', a layer of torchao whose kernels take no DTensors"
    with pytest.raises(ValueError, match=message) if refused else nullcontext():
        _parallelize(model, alone["tensor_parallel"], options)
    layer = model.get_submodule(fqn)
    with pytest.raises(RuntimeError, match=said):
        layer(torch.ones(2, layer.in_features))


def test_wraps_that_match_nothing(alone):
    with pytest.raises(ValueError, match=r"`wrap=\['Conv2d'\]` matches no module of Net; .* Block, Embedding, "):
        shard_alone(Net(), alone, wrap=[nn.Conv2d])
    with pytest.raises(ValueError, match=r"`activation_checkpointing=<function .*>` matches no module of Net"):
        shard_alone(Net(), alone, activation_checkpointing=lambda fqn, module: False)
    with pytest.raises(ValueError, match=r"`activation_checkpointing=True` takes the modules of `wrap`"):
        shard_alone(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), alone, activation_checkpointing=True)


def test_a_wrap_that_would_untie_weights(alone):
    model = Net()
    model.lm_head.weight = model.embedding.weight
    shard_alone(model, alone)  # both in the root
    tied = Net()
    tied.lm_head.weight = tied.embedding.weight
    message = r"lm_head.weight and embedding.weight are one parameter, .* \('the root' and 'lm_head'\)"
    with pytest.raises(ValueError, match=message):
        shard_alone(tied, alone, wrap=lambda fqn, module: fqn == "lm_head")
    check_shared(tied, {"blocks.0": tied.blocks[0]})


def test_models_that_are_sharded_already(alone):
    model = nn.Sequential(FullyShardedDataParallel(nn.Linear(4, 4), device_id=CPU))
    with pytest.raises(TypeError, match=r"'0' is wrapped by `FullyShardedDataParallel` \(FSDP1\), which does not mix"):
        check_model(model)
    by_hand = Net()
    fully_shard(by_hand.blocks[1], mesh=alone["data_parallel"])
    with pytest.raises(TypeError, match=r"Net is sharded already \('blocks.1'\).*parallelize\(model, mesh, plugin\)"):
        shard_alone(by_hand, alone)
    with pytest.raises(TypeError, match=r"`precision='fp8-hybrid'`: Net is sharded already \('blocks.1.norm"):
        FP8TorchAO().convert_module(by_hand)


def test_scalar_parameters_have_a_way_out_that_the_error_names():
    def scaled():
        clip = nn.Module()
        clip.logit_scale = nn.Parameter(torch.tensor(2.5))
        model = Net()
        model.clip = clip
        return model

    fabric = L.Fabric(accelerator="cpu", devices=1, strategy="fsdp2", precision="32-true")
    fabric.launch()
    with pytest.raises(ValueError, match=r"the model has 'clip.logit_scale'") as caught:
        fabric.setup_module(scaled())
    (line,) = re.findall("`(.*?)`", str(caught.value))
    model = scaled()
    exec(line, {"model": model, "nn": nn})
    assert model.clip.logit_scale.tolist() == [2.5]
    fabric.setup_module(model)
    dist.destroy_process_group()


def test_models_in_part_on_meta(alone):
    model = Net()
    model.lm_head.to("meta")
    with pytest.raises(RuntimeError, match=r"Net has 2 of 15 parameters and buffers on the meta device here.*mixed"):
        origin(model)

    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4))

    with torch.device("meta"):
        model = nn.Sequential(Scale())
    with pytest.raises(RuntimeError, match=r"Scale have parameters or buffers but no `reset_parameters\(\)`"):
        shard_alone(model, alone)


def test_fp8_weights_that_were_sent_in_bf16_raise(alone):
    model = converted(Net(), FP8TorchAO())
    shard_alone(model, alone, fp8_all_gather=True)
    loss_of(model, batch(0, 0))
    assert gathered_line(model, 1) is None
    assert gathered_line(model, 2).startswith("all-gather: float8, ")
    coded = next(one for one in gathered_parameters(model.blocks[0]) if one.sharded_param.ndim == 2)
    coded.all_gather_outputs = [torch.empty(64 * 128, dtype=torch.bfloat16)]
    with pytest.raises(RuntimeError, match=r"'blocks.0' were to be gathered as float8, but bfloat16 was sent"):
        gathered_line(model, 2)


def test_a_tensor_parallel_plan_that_does_nothing(alone):
    options = ShardOptions(tensor_parallel=lambda model, mesh: None, tensor_parallel_size=2)
    with pytest.raises(ValueError, match="left every parameter as it was"):
        _parallelize(Net(), alone["tensor_parallel"], options)


def test_half_weights_sharded_by_hand_in_fabric(alone):
    def by_hand(model, mesh):
        fully_shard(model, mesh=mesh["data_parallel"])
        return model

    fabric = L.Fabric(
        accelerator="cpu", devices=1, precision="bf16-remainder", strategy=ModelParallelStrategy(by_hand, 1, 1)
    )
    fabric.launch()
    model = fabric.setup_module(Net())
    optimizer = fabric.setup_optimizers(torch.optim.SGD(model.parameters(), lr=0.1))
    fabric.backward(loss_of(model, batch(0, 0)))
    with pytest.raises(RuntimeError, match=r"`precision='bf16-remainder'` .* sharded without it. Use `strategy='fsdp2"):
        optimizer.step()


def test_a_model_that_parallelize_has_sharded_is_set_up_by_one_fabric_and_by_the_next(alone):
    model = Net()
    for _ in range(2):
        plugin = HalfMixed("bf16", master_weights="remainder")
        as_it_is = ModelParallelStrategy(lambda model, mesh: model, 1, 1)
        fabric = L.Fabric(accelerator="cpu", devices=1, plugins=plugin, strategy=as_it_is)
        fabric.launch()
        parallelize(model, alone, plugin)
        wrapped = fabric.setup_module(model)
        optimizer = fabric.setup_optimizers(torch.optim.SGD(model.parameters(), lr=0.1))
        before = model.blocks[0].up.weight.full_tensor().clone()
        fabric.backward(loss_of(wrapped, batch(0, 0)))
        optimizer.step()
        assert not torch.equal(model.blocks[0].up.weight.full_tensor(), before)


def test_a_sharded_model_goes_on_only_with_the_choices_it_was_built_for(alone):
    model = parallelize(Net(), alone, FP8TorchAO())
    sharding = Sharding(ShardOptions())
    assert sharding.knows(model, FP8TorchAO())
    more = [FP8TorchAO(weight_codes="per_gemm")]
    for other in (FP8TorchAO(keep=["up"]), FP8TorchAO(fp8_eval=False), FP8TorchAO(fp8_format="e4m3"), *more):
        assert not sharding.knows(model, other)
        with pytest.raises(TypeError, match="sharded already"):
            parallelize(model, alone, other)


def test_parallelize_on_a_mesh_of_ones_own(alone):
    plugin, model = FP8TorchAO(), Net()
    assert parallelize(model, dist.device_mesh.init_device_mesh("cpu", (1,)), plugin) is model
    assert parallelize(model, alone, plugin) is model, "a second call changes nothing"
    three = dist.device_mesh.init_device_mesh("cpu", (1, 1, 1), mesh_dim_names=("a", "b", "c"))
    with pytest.raises(ValueError, match=r"the dimensions \('a', 'b', 'c'\) has none named 'data_parallel'"):
        parallelize(Net(), three, FP8TorchAO())


@pytest.mark.parametrize("name", ["bf16-master", "bf16-remainder"])
def test_dtypes_of_buffers_and_outputs(alone, name):
    class Rotary(Net):
        def __init__(self):
            super().__init__()
            self.register_buffer("table", torch.ones(64))

    form = True if name == "bf16-master" else "remainder"
    plugin = HalfMixed("bf16", master_weights=form, buffer_dtype=torch.float16)
    fabric = L.Fabric(accelerator="cpu", devices=1, plugins=plugin, strategy="fsdp2")
    fabric.launch()
    model = fabric.setup_module(Rotary())
    assert model.module.table.dtype == torch.float16
    fabric = L.Fabric(
        accelerator="cpu", devices=1, precision=name, strategy=FabricFSDP2Strategy(output_dtype=torch.float64)
    )
    fabric.launch()
    model = fabric.setup_module(Rotary())
    assert model.module.table.dtype == torch.float32
    assert model.module(batch(0, 0)[:, 1:]).dtype == torch.float64


def test_float32_accumulation_of_half_shards(alone):
    plugin = HalfMixed("bf16", master_weights="remainder", grad_accumulation_dtype=torch.float32)
    fabric = L.Fabric(accelerator="cpu", devices=1, plugins=plugin, strategy="fsdp2")
    with pytest.raises(ValueError, match=r"`grad_accumulation_dtype=torch.float32` with half-precision shards is not"):
        fabric.launch()


def test_plain_of_a_sharded_model_names_a_way_out_that_works():
    fabric = L.Fabric(accelerator="cpu", devices=1, strategy="fsdp2", precision="fp8-hybrid")
    fabric.launch()
    wrapped, model = fabric.setup_module(model := Net()), model
    for options in ({}, {"copy": True}):
        with pytest.raises(RuntimeError, match=r"and 15 parameters of FSDPNet are sharded\.") as caught:
            plain(wrapped, **options)
    call = "get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))"
    assert call in str(caught.value)
    fresh = Net(seed=1)
    fresh.load_state_dict(eval(call, {**vars(state_dict), "model": model}))
    assert all(torch.equal(p.full_tensor(), q) for p, q in zip(model.parameters(), fresh.parameters(), strict=True))
    dist.destroy_process_group()


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
def test_uneven_shards_are_found_before_any_collective(alone, monkeypatch, plugin, make, what):
    class Three:
        """A mesh of which nothing but its size is known: whoever asks it for more fails."""

        ndim = 1

        def size(self, dim):
            return 3

    monkeypatch.setattr(shard, "shard_mesh", lambda mesh: Three())
    monkeypatch.setattr(shard, "origin", lambda model: pytest.fail("a collective ran first"))
    with pytest.raises(ValueError, match=f"{what}, which do not divide into 3 equal"):
        shard_alone(converted(make(), plugin), alone, fp8_all_gather=not plugin.keeps_codes)


@pytest.mark.parametrize(
    ("first", "second", "kept"),
    [
        ({}, {}, None),
        ({"wrap": (nn.Linear, nn.LayerNorm)}, {"wrap": [nn.LayerNorm, nn.Linear]}, None),
        ({"wrap": lambda fqn, module: fqn == "lm_head"}, {"wrap": lambda fqn, module: fqn == "lm_head"}, None),
        ({"sync_module_states": True}, {}, None),
        ({}, {"activation_checkpointing": True}, "activation_checkpointing=False"),
        ({"wrap": [nn.Linear]}, {"wrap": "auto"}, r"wrap=\[<class 'torch.nn.modules.linear.Linear'>\]"),
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
    optimizer.optim_dict, optimizer.d_param_groups = {}, [{"params": list(nn.Linear(4, 4, dtype=dtype).parameters())}]
    message = "does not run under 'fsdp2', where it does not update half-precision weights"
    with nullcontext() if dtype is torch.float32 else pytest.raises(ValueError, match=message):
        FSDP2Strategy().sharding.follow(optimizer)


def test_a_torch_that_gathers_a_module_in_one_dtype_says_so(alone, monkeypatch):
    monkeypatch.setattr(shard, "has_several_groups", lambda: False)
    with pytest.warns(UserWarning, match=r"2 parameters that are to stay float32 are gathered as torch\.bfloat16"):
        assert shard._kept_apart(Net(), {"lm_head.weight", "lm_head.bias"}, torch.bfloat16) == set()
