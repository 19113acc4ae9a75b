"""Weights of Transformer Engine's layers that FSDP2 gathers as float8: two gloo processes.

The codes are held against Transformer Engine's own reference of current scaling, and trained with through it; that its
kernels take the tensor that is made of them is for ``tests/gpu`` to show.
"""

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh

from tests.fsdp2.ranks import run
from tests.toys import Stack, gelu_block

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor:UserWarning"),
]
FULL = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


class Net(Stack):
    """Without norms, whose weights FSDP2 would gather in bf16."""

    def __init__(self):
        super().__init__(lambda: gelu_block(norm=False), seed=0)


def reference(weight):
    """What Transformer Engine itself makes of a weight, in plain torch: codes and their inverse scale."""
    from transformer_engine.pytorch.custom_recipes.reference_current_scaling import CurrentScalingQuantizerRef

    made = CurrentScalingQuantizerRef(torch.float8_e4m3fn, columnwise=False).quantize(weight)
    return made.data, made.scale


def compare(model) -> list:
    """For every weight, whether what is gathered is what Transformer Engine would make of the whole."""
    whole = {fqn: p.full_tensor() for fqn, p in model.named_parameters() if p.ndim == 2}
    found = []
    for i, block in enumerate(model.blocks):
        block.unshard()
        for j in (0, 2):
            weight = block[j].weight
            codes, inv_scale = reference(whole[f"blocks.{i}.{j}.weight"])
            equal = torch.equal(weight.codes.view(torch.uint8), codes.view(torch.uint8))
            found.append((equal, torch.equal(weight.inv_scale, inv_scale), weight.dtype))
        block.reshard()
    return found


def gather(rank, kind):
    """Gathered, written to, gathered again; with scales that every weight reduces itself, and with those of a step."""
    from lightning_lowprec import FP8TE, FabricFSDP2Strategy
    from tests.te.reference import run_on_cpu

    run_on_cpu(pytest.MonkeyPatch())
    plugin = FP8TE(kind)
    fabric = L.Fabric(accelerator="cpu", devices=2, strategy=FabricFSDP2Strategy(), plugins=plugin)
    fabric.launch()
    model = Net()
    _, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    scales = model.blocks[0][0].weight._local_tensor._scales
    found = {"at first": compare(model), "stale": scales.stale}
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    found["after a step"] = compare(model)
    scales.refresh()
    found["refreshed"] = compare(model), scales.stale, scales.reductions
    with torch.no_grad():
        model.blocks[0][0].weight.to_local()[0].mul_(100)  # by a view of the shard
    found["a row"] = scales.stale, compare(model)
    scales.refresh()
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    found["keys"] = {fqn: value.dtype for fqn, value in state.items()}
    set_model_state_dict(model, {fqn: 3 * value for fqn, value in state.items()}, options=FULL)
    found["loaded"] = scales.stale, compare(model)
    return found


def taken_by_transformer_engine(rank):
    """The tensor for its GEMM: its class, the same memory, and a way back for the gradient."""
    from transformer_engine.pytorch import DType, Float8CurrentScalingQuantizer, Float8Quantizer, Float8Tensor

    from lightning_lowprec.te.fp8_weight import TEWireFormat, for_gemm

    values = torch.randn(32, 16)
    wire = TEWireFormat()
    scale = wire.scales(values.abs().amax())
    gathered = wire.whole(wire.encode(values, scale), scale, torch.bfloat16).requires_grad_()
    found = []
    for quantizer in (
        Float8CurrentScalingQuantizer(DType.kFloat8E4M3, torch.device("cpu")),
        Float8Quantizer(torch.ones(1), torch.zeros(1), DType.kFloat8E4M3),
    ):
        taken = for_gemm(gathered, quantizer)
        (grad,) = torch.autograd.grad(taken, gathered, torch.full((32, 16), 2.0, dtype=torch.bfloat16))
        found.append(
            (
                type(taken) is Float8Tensor,
                taken._data.data_ptr() == gathered.codes.data_ptr(),
                taken._scale_inv is gathered.inv_scale,
                taken._transpose is None,
                type(taken._quantizer) is type(quantizer),
                bool((grad == 2).all()),
            )
        )
    torch.testing.assert_close(quantizer.amax, values.abs().amax().reshape(1))  # in delayed scaling's history
    plain = for_gemm(gathered, None)
    found.append(torch.equal(plain, gathered.codes.float() * gathered.inv_scale))
    with pytest.raises(RuntimeError, match="Write to the shards"):
        gathered.detach().zero_()
    found.append(torch.equal(F.linear(torch.eye(16), gathered.float()), plain.T))
    return found


BF16 = frozenset({"forward", "grad_input", "grad_weight"})
SWITCHED = (frozenset(), BF16, BF16, frozenset())


def train(rank, sharded, phases=(frozenset(),) * 4):
    """Losses of a few steps through Transformer Engine's forward and backward, by its reference quantizers."""
    import transformer_engine.pytorch as te

    from lightning_lowprec.conversion.plan import Plan
    from lightning_lowprec.fsdp2.options import ShardOptions
    from lightning_lowprec.fsdp2.shard import shard
    from lightning_lowprec.te.fp8_weight import TEWireFormat
    from lightning_lowprec.te.hooks import note_recipes, set_phase
    from lightning_lowprec.te.layer import convert_linears, te_linears
    from tests.te.reference import current_scaling, run_on_cpu

    run_on_cpu(pytest.MonkeyPatch())
    model = Net()
    fqns = [fqn for fqn, module in model.named_modules() if isinstance(module, nn.Linear)]
    options = {"fp8_eval": True, "token_alignment": 16, "weight_cache": True, "custom": True}
    convert_linears(model, fqns, **options, wire_format=TEWireFormat())
    note_recipes(model, current_scaling(), Plan(()), None)
    traffic = None
    if sharded:
        mesh = init_device_mesh("cpu", (2,))
        cpu = torch.device("cpu")
        made = shard(model, mesh, ShardOptions(), device=cpu, param_dtype=torch.bfloat16, fp8_all_gather=True)
        traffic = made.traffic.gathers["blocks.0"]
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    # bf16 as FSDP2 would make it of the inputs of blocks: Transformer Engine quantises what it is given
    inputs = torch.randn(4, 24, 32, generator=torch.Generator().manual_seed(1)).bfloat16()
    for x, gemms in zip(inputs, phases, strict=True):
        for layer in te_linears(model):
            set_phase(layer, gemms)
        with torch.autocast("cpu", torch.bfloat16), te.autocast(enabled=True, recipe=current_scaling()):
            output = model(x)
        loss = F.mse_loss(output.float(), x.float().flip(-1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, None if traffic is None else dict(traffic.sent)


def kept_after_a_life_without_fsdp2(rank):
    """How many whole weights layers keep behind a step, of a model that has computed before it was sharded."""
    from lightning_lowprec import FP8TE, FabricFSDP2Strategy
    from lightning_lowprec.te.layer import te_linears
    from tests.te.reference import current_scaling, run_on_cpu

    run_on_cpu(pytest.MonkeyPatch())
    model, x = Net(), torch.ones(16, 32)
    with torch.no_grad():
        L.Fabric(accelerator="cpu", devices=1, plugins=FP8TE(current_scaling())).setup(model)(x)
    strategy = FabricFSDP2Strategy()  # these weights are gathered in bf16
    fabric = L.Fabric(accelerator="cpu", devices=2, strategy=strategy, plugins=FP8TE(current_scaling()))
    fabric.launch()
    wrapped = fabric.setup(model)
    for _ in range(3):  # micro-batches
        fabric.backward(wrapped(x).square().mean())
    return sum(len(layer._fp8_workspaces) for layer in te_linears(model))


def cut_by_tensor_parallelism(rank):
    from torch.distributed.tensor.parallel import ColwiseParallel

    from lightning_lowprec import FP8TE, FabricFSDP2Strategy

    plan = {"blocks.0.0": ColwiseParallel()}
    strategy = FabricFSDP2Strategy(tensor_parallel=plan, tensor_parallel_size=2)
    fabric = L.Fabric(accelerator="cpu", devices=2, strategy=strategy, plugins=FP8TE("current"))
    fabric.launch()
    try:
        fabric.setup(Net())
    except ValueError as error:
        return str(error)


def work(rank, folder):
    return {
        "current": gather(rank, "current"),
        "cut": cut_by_tensor_parallelism(rank),
        "delayed": gather(rank, "delayed"),
        "kept": kept_after_a_life_without_fsdp2(rank),
        "taken": taken_by_transformer_engine(rank),
        "sharded": train(rank, sharded=True),
        "whole": train(rank, sharded=False),
        "switched": train(rank, sharded=True, phases=SWITCHED),
        "switched whole": train(rank, sharded=False, phases=SWITCHED),
    }


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gathered")
    return run(work, 2, folder, folder)


RIGHT = [(True, True, torch.bfloat16)] * 4


@pytest.mark.parametrize("kind", ["current", "delayed"])
def test_codes_are_those_of_transformer_engine(results, kind):
    for rank in results:
        found = rank[kind]
        assert found["at first"] == found["after a step"] == RIGHT
        assert found["refreshed"] == (RIGHT, False, 1)
        assert found["a row"] == found["loaded"] == (True, RIGHT)
        assert set(found["keys"].values()) <= {torch.float32}
    assert results[0][kind]["keys"].keys() == Net().state_dict().keys()


def test_its_gemm_takes_the_memory_that_was_gathered(results):
    assert results[0]["taken"] == [(True,) * 6] * 2 + [True, True]


def test_no_whole_weight_is_kept_after_a_life_without_fsdp2(results):
    assert [rank["kept"] for rank in results] == [0, 0]


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated:FutureWarning")
def test_a_weight_that_is_computed_at_each_forward_is_not_gathered(monkeypatch):
    from lightning_lowprec.fsdp2.fp8_gather import Fp8GatherShard, gather_in_fp8
    from lightning_lowprec.te.fp8_weight import TEWireFormat
    from lightning_lowprec.te.layer import convert_linears
    from tests.te.reference import run_on_cpu

    run_on_cpu(monkeypatch)
    model = Net()
    torch.nn.utils.weight_norm(model.blocks[0][0])
    options = {"fp8_eval": True, "token_alignment": 16, "weight_cache": True}
    convert_linears(model, ["blocks.0.0", "blocks.0.2"], **options, wire_format=TEWireFormat())
    gather_in_fp8(model)
    assert {name for name, p in model.named_parameters() if isinstance(p.data, Fp8GatherShard)} == {"blocks.0.2.weight"}


def test_tensor_parallelism_is_refused(results):
    for rank in results:
        assert "cuts 'blocks.0.0', a layer of Transformer Engine" in rank["cut"]
        assert "'fp8-hybrid'" in rank["cut"]


def test_training_is_that_of_one_process(results):
    losses, sent = results[0]["sharded"]
    assert losses == pytest.approx(results[0]["whole"][0], rel=2**-18)  # scales of scaled values: a bit of float32
    assert losses[-1] < losses[0]
    weights, biases = 2 * 32 * 64, 32 + 64
    gathers = 4 * 2  # steps, forward and backward
    assert sent == {torch.uint8: gathers * (weights + 2 * biases) // 2}  # bytes; half of them on each rank


def test_layers_that_switch_to_bf16_and_back_train_as_in_one_process(results):
    losses, sent = results[0]["switched"]
    assert losses == pytest.approx(results[0]["switched whole"][0], rel=2**-18)
    assert losses != results[0]["sharded"][0]
    weights, biases = 2 * 32 * 64, 32 + 64
    gathers = 2 * 2  # steps in FP8 and steps in bf16, forward and backward
    assert sent == {
        torch.uint8: gathers * (weights + 2 * biases) // 2,
        torch.bfloat16: gathers * 2 * (weights + biases) // 2,
    }
