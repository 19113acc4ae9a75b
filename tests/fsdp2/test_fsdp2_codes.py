"""The codes of float8 shards, which one all-gather leaves for the next: made once per write, seen by nobody."""

import copy
import gc
import weakref

import pytest
import torch
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torchao.float8 import Float8LinearConfig, convert_to_float8_training, precompute_float8_dynamic_scale_for_fsdp

from lightning_lowprec import FP8TorchAO, parallelize
from lightning_lowprec.fsdp2.strategy import gathered_line
from lightning_lowprec.private.fsdp2 import gathered_parameters
from lightning_lowprec.torchao.wire_format import TorchAOWire
from tests.fsdp2.models import Net, batch, full, loss_of, same
from tests.fsdp2.ranks import run

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
LAYERS = 4  # of Net, with FP8 weights


def sharded(mesh, fp8_all_gather, **options):
    model, plugin = Net(), FP8TorchAO(emulate=True, **options)
    parallelize(model, mesh, plugin, fp8_all_gather=fp8_all_gather, param_dtype=torch.float32)
    shards = [parameter.to_local() for parameter in model.parameters()]
    return model, next((shard._scales for shard in shards if hasattr(shard, "_scales")), None)


@pytest.fixture
def encoded(monkeypatch):
    shapes, encode = [], TorchAOWire.encode

    def counting(self, values, scale, **options):
        shapes.append(tuple(values.shape))
        return encode(self, values, scale, **options)

    monkeypatch.setattr(TorchAOWire, "encode", counting)
    return shapes


def loss(model, number=0):
    value = loss_of(model, batch(number, 0)).item()
    model.reshard()  # without a backward pass FSDP2 keeps the root gathered
    return value


def shards_of(scales):
    return [weight._local_tensor for weight in scales.weights]


@pytest.mark.parametrize(("choice", "per_step"), [("auto", 1), ("per_forward", 1), ("per_gemm", 2 * 8)])
def test_eight_micro_batches_encode_each_shard_once(alone, encoded, choice, per_step):
    """Or at every gather: blocks are gathered in forward and in backward."""
    model, scales = sharded(alone, True, weight_codes=choice)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        for micro_batch in range(8):
            loss_of(model, batch(8 * step + micro_batch, 0)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert len(encoded) == 2 * LAYERS * per_step
    kept = [shard._kept.codes for shard in shards_of(scales) if shard._kept is not None]
    held = sum(codes.untyped_storage().nbytes() for codes in kept)
    assert held == (sum(weight.numel() for weight in scales.weights) if per_step == 1 else 0)


def torch_optimizer(**options):
    def change(model, scales):
        loss_of(model, batch(1, 0)).backward()
        torch.optim.AdamW(model.parameters(), lr=0.1, **options).step()

    return change


def other(model):
    made = {**Net(seed=7).state_dict(), "blocks.1.down.weight": torch.zeros(64, 128)}
    return {name: 3 * made[name] for name, _ in model.named_parameters()}


def distributed_like(model):
    state = other(model)
    return {n: DTensor.from_local(state[n], p.device_mesh, p.placements) for n, p in model.named_parameters()}


def copy_into_data(model, scales):
    values = distributed_like(model)
    for name, p in model.named_parameters():
        p.data.copy_(values[name])


def copy_into_local_views(model, scales):
    values = other(model)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.to_local()[:8].copy_(values[name][:8])


def averaged(model):
    average = {name: p.detach().clone() for name, p in model.named_parameters()}
    values = distributed_like(model)
    torch._foreach_lerp_(list(average.values()), [values[name] for name in average], 0.5)
    loss(model, 2)  # the scales are made anew; the average is no weight of the model
    return average


def swap_tensors_with_an_average(model, scales):
    """FSDP2 sees a swap of weights with an extension such as ours, but not of others."""
    average = averaged(model)
    for name, p in model.named_parameters():
        if any(p is weight for weight in scales.weights):
            torch.utils.swap_tensors(p, torch.nn.Parameter(average[name]))


def kernel(model, scales):
    values = other(model)
    names = {id(p): name for name, p in model.named_parameters()}
    for weight in scales.weights:
        shard = weight.to_local()
        memory = torch.from_numpy(shard._tensor.detach().numpy())
        memory.copy_(values[names[id(weight)]])
        shard.note_written()


def negate_the_state_dict(model, scales):
    """As `torch.distributed.checkpoint.load` does with other values; the largest absolute value stays the same."""
    for value in model.state_dict().values():
        value.to_local().data.neg_()


def multiply_a_shown_state_dict(model, scales):
    """The state dict is older than a training step, and larger values need another scale."""
    shown = model.state_dict()
    torch_optimizer(foreach=True)(model, scales)
    loss(model)
    for value in shown.values():
        value.mul_(4)


def load_larger_values_from_a_checkpoint(model, scales):
    """`torch.distributed.checkpoint.load` writes to the local tensors of a state dict; copies of shards follow."""
    for value in model.state_dict().values():
        value.to_local().detach().mul_(4)
    for weight in scales.weights:
        torch.utils.swap_tensors(weight, torch.nn.Parameter(weight.detach().clone()))


WRITES = (
    copy_into_data, copy_into_local_views, swap_tensors_with_an_average, kernel, negate_the_state_dict,
    load_larger_values_from_a_checkpoint, multiply_a_shown_state_dict,
)  # fmt: skip
WAYS = {"AdamW": torch_optimizer(foreach=False), "AdamW, foreach": torch_optimizer(foreach=True)}
WAYS |= {change.__name__: change for change in WRITES}


@pytest.mark.parametrize("change", WAYS.values(), ids=WAYS)
def test_a_changed_weight_is_encoded_again(alone, encoded, change):
    model, scales = sharded(alone, True)
    before = loss(model)
    assert (loss(model), len(encoded)) == (before, LAYERS)
    change(model, scales)
    with torch.no_grad():
        by_hand = model.blocks[0](torch.ones(64))  # gathered before any forward of the model has made scales
    got, made = loss(model), len(encoded)
    assert (loss(model), len(encoded)) == (got, made), "once"
    fresh, _ = sharded(alone, True, weight_codes="per_gemm")
    fresh.load_state_dict(model.state_dict())
    assert got == loss(fresh) != before
    assert torch.equal(by_hand, fresh.blocks[0](torch.ones(64)))


def test_copies_pickles_and_state_dicts_have_no_codes(alone, tmp_path):
    model, scales = sharded(alone, True)
    loss_of(model, batch(0, 0)).backward()
    model.zero_grad()  # torch cannot copy a DTensor with its gradient
    state = model.state_dict()
    assert set(state) == set(Net().state_dict())
    assert all(type(value._local_tensor) is torch.Tensor for value in state.values())
    for weight, shard in zip(scales.weights, shards_of(scales), strict=True):
        assert shard._kept is not None
        for copied in (copy.deepcopy(weight), copy.deepcopy(shard), weight.clone(), shard.detach()):
            local = getattr(copied, "_local_tensor", copied)
            assert local._kept is None
            assert torch.equal(local._tensor, shard._tensor)
        torch.save([weight, shard], tmp_path / "saved")
        whole, part = torch.load(tmp_path / "saved", weights_only=False)
        for loaded in (whole._local_tensor, part):
            assert type(loaded) is torch.Tensor
            assert torch.equal(loaded, shard._tensor)
    up = copy.deepcopy(model.blocks[0].up)
    assert up.weight._local_tensor._kept is None
    assert up.weight._local_tensor.data_ptr() != model.blocks[0].up.weight._local_tensor.data_ptr()


def test_weights_that_were_sent_in_bf16_raise(alone):
    model, _ = sharded(alone, True)
    loss_of(model, batch(0, 0))
    recipe = {"0": {"grad_weight": "bf16"}, "1": {"forward": "bf16"}, "2": {"grad_input": "bf16"}, "*": "tensorwise"}
    one, two, three, padded = (torch.nn.Linear(64, size) for size in (64, 64, 64, 8))  # the first one sends codes
    net = torch.nn.Sequential(one, two, three, torch.nn.BatchNorm1d(64), padded)
    small = parallelize(net, alone, FP8TorchAO(recipe, pad_inner_dim=True, keep_fp32=["0.bias"]))
    small(torch.ones(2, 64))
    assert gathered_line(model, 1) is None
    assert gathered_line(small, 2) == "all-gather: float8, 5.64 kB per gather and rank, 0.43x of bf16"
    assert gathered_line(model, 2) == "all-gather: float8, 8.83 kB per block and rank, 0.26x of bf16"
    for net, fqn, name in ((model, "blocks.0", "blocks.0"), (small, "", "the root")):
        coded = next(one for one in gathered_parameters(net.get_submodule(fqn)) if one.sharded_param.ndim == 2)
        coded.all_gather_outputs = [torch.empty(64 * 128, dtype=torch.bfloat16)]
        with pytest.raises(RuntimeError, match=f"'{name}' were to be gathered as float8, but bfloat16 was sent"):
            gathered_line(net, 2)


def watched(model, scales):
    loss_of(model, batch(0, 0)).backward()
    model.zero_grad()
    return [weakref.ref(t) for shard in shards_of(scales) for t in (shard, shard._tensor, shard._kept.codes)]


def test_replaced_and_deleted_shards_are_freed_with_their_codes(alone):
    model, scales = sharded(alone, True)
    old = watched(model, scales)
    model.to(torch.float64)
    gc.collect()
    assert [ref() for ref in old] == [None] * 3 * LAYERS
    model.to(torch.float32)
    old = watched(model, scales)
    del model, scales
    for _ in range(2):  # one round frees what held the others
        gc.collect()
    assert [ref() for ref in old] == [None] * 3 * LAYERS


# ---- FP8 all-gather changes nothing but the bytes: against torchao by hand; two gloo ranks


STEPS = 20


def train(model, rank, after_step=lambda: None):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        loss_of(model, batch(step, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
        after_step()
    return full(model)


def by_hand(mesh):
    """What a torchao user writes: convert with FP8 all-gather, shard blocks and root."""
    config = Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True)
    model = convert_to_float8_training(Net(), config=config, module_filter_fn=lambda m, fqn: "lm_head" not in fqn)
    for part in (*model.blocks, model):
        fully_shard(part, mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
    return model


def every_way_of_gathering_gives_the_same_bits(rank):
    mesh = init_device_mesh("cpu", (2,))
    model, scales = sharded(mesh, True)
    ours = train(model, rank)
    untrained = Net().state_dict()
    assert all(not torch.equal(ours[name], untrained[name]) for name in ours)
    assert scales.reductions == STEPS, "one reduction of scales per step"
    model, scales = sharded(mesh, True)
    scales.weights = []  # nothing to refresh: every weight reduces its own scale
    assert same(ours, train(model, rank)), "a scale reduced per weight"
    assert same(ours, train(sharded(mesh, False)[0], rank)), "float32 gathered"
    model = by_hand(mesh)
    precompute_float8_dynamic_scale_for_fsdp(model)
    assert same(ours, train(model, rank, lambda: precompute_float8_dynamic_scale_for_fsdp(model))), "torchao by hand"
    weights = [None, None]
    dist.all_gather_object(weights, ours)
    assert same(*weights)


@pytest.mark.slow
@pytest.mark.distributed
def test_two_ranks(tmp_path):
    run(every_way_of_gathering_gives_the_same_bits, 2, tmp_path)
