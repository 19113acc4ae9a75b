"""What happens to a sharded model in its life: optimizers early and late, evaluation, accumulation, loading."""

import itertools
from contextlib import nullcontext

import lightning as L
import pytest
import torch
from torch import distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict

from lightning_lowprec import FabricFSDP2Strategy, FP8TorchAO, plain
from lightning_lowprec.callbacks import NumericsMonitor
from lightning_lowprec.fsdp2.traffic import gathered_line
from tests.fsdp2.gathers import count_gathers, scales_of
from tests.fsdp2.models import Block, LlamaBlock, Net, batch, full, loss_of
from tests.fsdp2.ranks import run
from tests.toys import in_e4m3

pytestmark = [pytest.mark.slow, pytest.mark.distributed]
MONITORED = ("fp8-hybrid", "fp8-rowwise", "msamp-o3")


def fabric_for(precision="fp8-hybrid", **options):
    fabric = L.Fabric(accelerator="cpu", devices=2, strategy=FabricFSDP2Strategy(**options), precision=precision)
    fabric.launch()
    return fabric


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def set_up(fabric, **options):
    model = Net(**options)
    return fabric.setup(model, adamw(model))


def step(fabric, model, optimizer, number, rank, **kwargs):
    loss = loss_of(model, batch(number, rank))
    fabric.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def trained(fabric, model, optimizer, rank, steps=4):
    losses = [step(fabric, model, optimizer, number, rank) for number in range(steps)]
    return full(model), losses


def optimizers(rank):
    """Built with the model's set-up, before it, and after it; with state from before it."""
    weights = {}
    fabric = fabric_for()
    model, optimizer = set_up(fabric)
    weights["joint"] = trained(fabric, model, optimizer, rank)[0]

    model = Net()
    early = adamw(model)
    model = fabric.setup_module(model)
    weights["early"] = trained(fabric, model, fabric.setup_optimizers(early), rank)[0]

    model = fabric.setup_module(Net())
    weights["late"] = trained(fabric, model, fabric.setup_optimizers(adamw(model)), rank)[0]

    model = Net()
    stepped = adamw(model)
    loss_of(model, batch(50, 0)).backward()
    stepped.step()
    before = {i: {k: v.clone() for k, v in stepped.state[p].items()} for i, p in enumerate(model.parameters())}
    model, stepped = fabric.setup(model, stepped)
    after = {i: dict(stepped.state[p].items()) for i, p in enumerate(model.parameters())}
    moved = all(
        torch.equal(value, whole(after[i][name])) for i, entry in before.items() for name, value in entry.items()
    )
    return weights, moved


def whole(value):
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def evaluation(rank):
    """Inference mode before and between training steps, as Lightning enters it under nccl."""
    fabric = fabric_for()
    results = []
    for evaluate in (nullcontext, torch.inference_mode):
        model, optimizer = set_up(fabric)
        losses = []
        for number in range(3):
            with torch.no_grad(), evaluate():
                losses.append(loss_of(model.eval(), batch(90, rank)).item())
            model.train()
            losses.append(step(fabric, model, optimizer, number, rank))
        results.append((losses, full(model)))
    return results


def scale_reductions(rank):
    """How often scales are reduced: per real step, not per micro-batch, nor after a skipped step."""
    counts = {}
    fabric = fabric_for()
    model, optimizer = set_up(fabric)
    scales = scales_of(model)
    for number in range(6):  # three steps of two micro-batches
        with fabric.no_backward_sync(model, enabled=number % 2 == 0):
            fabric.backward(loss_of(model, batch(number, rank)))
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
    counts["accumulated"] = scales.reductions
    with torch.no_grad():
        for _ in range(3):
            loss_of(model, batch(0, rank))
    counts["after the last step, and three evaluations"] = scales.reductions

    fabric = fabric_for("fp8-hybrid-fp16")
    model, optimizer = set_up(fabric)
    scales = scales_of(model)
    scaler = fabric.strategy.precision.scaler
    step(fabric, model, optimizer, 0, rank)
    loss = loss_of(model, batch(1, rank))
    fabric.backward(loss * (float("inf") if rank == 1 else 1.0))  # on one rank only
    before = full(model)
    optimizer.step()
    optimizer.zero_grad()
    counts["skipped"] = scaler.skipped_steps, scaler.scale
    counts["unchanged"] = all(torch.equal(before[name], weight) for name, weight in full(model).items())
    reduced = scales.reductions
    loss_of(model, batch(2, rank))
    counts["after a skipped step"] = scales.reductions - reduced
    return counts


def skipping(rank):
    """`skip_nonfinite=True`: weights of a run in which one shard of one rank is not finite, and of one without this."""
    found = {}
    for masters, bad in itertools.product((False, "remainder"), (1, None)):
        plugin = FP8TorchAO(master_weights=masters, skip_nonfinite=True)
        fabric = L.Fabric(accelerator="cpu", devices=2, strategy=FabricFSDP2Strategy(), plugins=plugin)
        fabric.launch()
        model, optimizer = set_up(fabric)
        for number in range(3):
            if number == 1 and bad is None:
                continue
            fabric.backward(loss_of(model, batch(number, rank)))
            if number == bad and rank == 1:
                next(model.parameters()).grad.to_local().view(-1)[0] = float("nan")
            optimizer.step()
            optimizer.zero_grad()
        found[masters, bad] = full(model), plugin.skipped_steps
    return found


def loading(rank):
    """Weights that are loaded, or edited, after their scales were computed."""
    fabric = fabric_for()
    other = Net(seed=7)
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(3.0)  # another amax
    fresh = fabric.setup_module(other)
    want = loss_of(fresh, batch(0, rank)).item()
    fresh.module.reshard()  # after a forward without its backward FSDP2 keeps the root gathered
    state = full(fresh)

    model = fabric.setup_module(Net())
    with torch.no_grad():
        loss_of(model, batch(0, rank))
    set_model_state_dict(model.module, state, options=StateDictOptions(full_state_dict=True))
    got = loss_of(model, batch(0, rank)).item()

    edited = fabric.setup_module(Net(seed=7))
    with torch.no_grad():
        loss_of(edited, batch(0, rank))
        for p in edited.parameters():
            p.mul_(3.0)
    return want, got, loss_of(edited, batch(0, rank)).item()


def variants(rank):
    """Options that change where and when things are computed, not what."""
    losses = {}
    for name, options in {
        "plain": {},
        "recomputed": {"activation_checkpointing": True},
        "recomputed by class": {"activation_checkpointing": {Block}, "wrap": [Block]},
        "kept after forward": {"reshard_after_forward": False},
        "offloaded": {"cpu_offload": True},
        "the whole model compiled": {},
        "by predicate": {"wrap": lambda fqn, module: fqn.endswith(("up", "down"))},
    }.items():
        fabric = fabric_for(**options)
        model = Net()
        if "compiled" in name:
            torch._dynamo.reset()
            model = torch.compile(model, backend="aot_eager")
        model, optimizer = fabric.setup(model, adamw(model))
        losses[name] = trained(fabric, model, optimizer, rank)[1]
    return losses


def without_bias(rank):
    """Groups of float8 weights alone, which gloo would refuse."""
    fabric = fabric_for(wrap=[torch.nn.Linear])
    model, optimizer = set_up(fabric, bias=False)
    gathers = count_gathers(model)
    losses = trained(fabric, model, optimizer, rank)[1]
    return losses, {fqn: dict(gather.sent) for fqn, gather in gathers.items()}


def llama_bytes(rank):
    """What two Llama-shaped blocks put on the wire in one forward pass."""
    sent = {}
    for precision in ("fp8-hybrid", "bf16-mixed"):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 256), torch.nn.Sequential(LlamaBlock(), LlamaBlock()))
        model = fabric_for(precision).setup_module(model)
        gathers = count_gathers(model)
        assert gathered_line(model.module, 2) is None, "nothing was gathered"
        with torch.no_grad():
            model(torch.ones(1, 4, 8))
        sent[precision] = {fqn: gather.sent.total() for fqn, gather in gathers.items()}
        sent[f"{precision} line"] = gathered_line(model.module, 2)
    return sent


def origins(rank):
    """Weights that only rank 0 has, that nobody has, and that a block cannot make."""
    fabric = fabric_for()
    real = full(fabric.setup_module(Net()))
    with nullcontext() if rank == 0 else torch.device("meta"):
        model = Net()
    sent = full(fabric.setup_module(model))
    with torch.device("meta"):
        model = Net()
    torch.manual_seed(3)
    made = fabric.setup_module(model)
    loss = loss_of(made, batch(0, rank)).item()
    dist.barrier()
    return {name: torch.equal(real[name], sent[name]) for name in real}, loss, full(made)


def monitored(rank):
    """Two steps with and without a monitor of all rows; what it read of one layer, and the same by hand."""
    return {
        precision: {watch: _monitored(precision, rank, watch) for watch in (False, True)} for precision in MONITORED
    }


def _monitored(precision, rank, watch):
    fabric = fabric_for(precision)
    net = Net()
    with torch.no_grad():
        for block in net.blocks:
            block.up.weight.mul_(torch.exp(4 * torch.randn_like(block.up.weight)))
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=1e-3))
    monitor, kept = NumericsMonitor(every=1, rows=1.0), {}
    up = net.blocks[0].up
    for number in range(2):
        weight, bias = (full(net)[f"blocks.0.up.{name}"] for name in ("weight", "bias"))
        handle = up.register_forward_hook(lambda _, args, output: kept.update(input=args[0], output=output))
        if watch:
            monitor.step(model, number)
        step(fabric, model, optimizer, number, rank)
        handle.remove()
    readings = monitor.finish()
    rows, output = (kept[name].detach().flatten(0, -2).bfloat16() for name in ("input", "output"))
    part = slice(64 * rank, 64 * rank + 64) if precision == "fp8-hybrid" else slice(None)
    exact = (rows @ weight.bfloat16().t())[:, part].float()
    error = output[:, part].float() - exact - bias.bfloat16().float()[part]
    powers = torch.stack([exact.square().sum(), error.square().sum()])
    largest = rows.abs().max().float()
    dist.all_reduce(powers)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return full(net), readings, weight, largest.item(), 10 * (powers[0] / powers[1]).log10().item()


def plain_of_shards(rank):
    """`plain` of a sharded model raises; the way out that the message names gives a whole model its weights."""
    found = {}
    for precision in ("fp8-hybrid", "msamp-o3"):
        fabric = fabric_for(precision)
        wrapped, optimizer = fabric.setup(model := Net(), adamw(model))
        weights, _ = trained(fabric, wrapped, optimizer, rank, steps=2)
        messages = []
        for options in ({}, {"copy": True}):
            with pytest.raises(RuntimeError, match="are sharded") as caught:
                plain(wrapped, **options)
            messages.append(str(caught.value))
        state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        fresh = Net(seed=1)
        if rank == 0:
            fresh.load_state_dict(state)
        found[precision] = messages, weights, fresh.state_dict(), len(list(model.parameters()))
    return found


def worker(rank):
    parts = (
        optimizers, evaluation, scale_reductions, skipping, loading, variants, without_bias, llama_bytes, origins,
        monitored, plain_of_shards,
    )  # fmt: skip
    return {part.__name__: part(rank) for part in parts}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return run(worker, 2, tmp_path_factory.mktemp("ranks"))


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_optimizers_built_early_late_or_jointly_train_alike(results):
    weights, moved = results[0]["optimizers"]
    untrained = Net().state_dict()
    assert not any(torch.equal(untrained[name], weight) for name, weight in weights["joint"].items())
    assert same(weights["joint"], weights["early"])
    assert same(weights["joint"], weights["late"])
    assert moved, "state from before the set-up is sharded with its parameter"


def test_inference_mode_changes_nothing(results):
    plain, inferred = results[0]["evaluation"]
    assert plain[0] == inferred[0]
    assert same(plain[1], inferred[1])


def test_scales_are_reduced_once_per_real_step(results):
    counts = results[0]["scale_reductions"]
    assert counts["accumulated"] == 3
    assert counts["after the last step, and three evaluations"] == 4
    assert counts["skipped"] == (1, 2.0**15)
    assert results[1]["scale_reductions"]["skipped"] == (1, 2.0**15), "the rank with finite gradients skips too"
    assert counts["unchanged"]
    assert counts["after a skipped step"] == 0


def test_a_value_that_is_not_finite_on_one_rank_costs_all_ranks_the_step(results):
    for rank, masters in itertools.product(range(2), (False, "remainder")):
        (weights, skipped), (wanted, none) = (results[rank]["skipping"][masters, bad] for bad in (1, None))
        assert (skipped, none) == (1, 0)
        assert same(weights, wanted)


def test_loaded_and_edited_weights_get_scales_of_their_own(results):
    want, loaded, edited = results[0]["loading"]
    assert loaded == want
    assert edited == want


def test_options_change_where_not_what(results):
    losses = results[0]["variants"]
    for name, values in losses.items():
        assert values == losses["plain"], name


def test_groups_of_float8_alone_travel_as_uint8(results):
    losses, sent = results[0]["without_bias"]
    assert all(0 < loss < 10 for loss in losses)
    assert sent["blocks.0.up"] == {torch.uint8: 4 * 2 * (64 * 128 // 2)}, "4 steps, forward and backward"


def test_float8_is_half_of_bf16_on_a_llama_block(results):
    sent = results[0]["llama_bytes"]
    weights = 2 * 256 * 256 + 2 * 256 * 64 + 3 * 256 * 896
    assert sent["bf16-mixed"]["1.0"] == (weights + 2 * 256) * 2 // 2, "half of the elements, two bytes each"
    assert sent["fp8-hybrid"]["1.0"] == (weights + 2 * 256 * 2) // 2
    assert sent["fp8-hybrid"]["1.0"] <= 0.51 * sent["bf16-mixed"]["1.0"]
    for name, dtype, ratio in (("fp8-hybrid", "float8", "0.50"), ("bf16-mixed", "bfloat16", "1.00")):
        size = f"{sent[name]['1.0'] / 1e3:.3g} kB"
        assert sent[f"{name} line"] == f"all-gather: {dtype}, {size} per block and rank, {ratio}x of bf16"


def test_weights_from_rank_0_from_nowhere(results):
    (sent, _, made), (also_sent, _, also_made) = (results[rank]["origins"] for rank in range(2))
    assert all(sent.values())
    assert all(also_sent.values())
    assert same(made, also_made)
    assert results[0]["origins"][1] < 10
    assert made["blocks.0.up.weight"].std() > 0.01, "initialised by the modules themselves"


@pytest.mark.parametrize("precision", MONITORED)
def test_a_monitor_reads_the_whole_weight_from_shards(results, precision):
    """Gathered as float8, gathered in high precision, and codes; the same readings on both ranks."""
    plain, watched = results[0]["monitored"][precision].values()
    assert same(plain[0], watched[0])
    _, readings, weight, largest, output_db = watched
    assert repr(readings) == repr(results[1]["monitored"][precision][True][1])
    assert [r.tensor for r in readings] == ["input", "weight", "gradient"] * 4
    of = {r.tensor: r for r in readings if r.fqn == "blocks.0.up"}
    assert of["input"].amax == largest
    rows = precision == "fp8-rowwise"
    if precision != "fp8-hybrid":  # as it is gathered; the state dict of O3 has the masters, the layer their codes
        weight = weight.bfloat16().float() if rows else in_e4m3(weight)
    assert of["weight"].amax == weight.abs().max().item()
    scale = 448 / (weight.abs().amax(1, keepdim=True) if rows else weight.abs().amax())
    scale = scale if precision == "fp8-hybrid" else scale.log2().floor().exp2()
    assert of["weight"].scale == pytest.approx(scale.min().item(), rel=1e-6)
    lost = ((weight * scale).to(torch.float8_e4m3fn).float() == 0) & (weight != 0)
    assert of["weight"].underflow == pytest.approx(lost.sum().item() / (weight != 0).sum().item(), abs=1e-9)
    assert lost.any() or precision == "msamp-o3"  # whose codes under FSDP2 are the values
    if precision != "msamp-o3":
        assert of["weight"].output_db == pytest.approx(output_db, abs=0.01)


@pytest.mark.parametrize("precision", ["fp8-hybrid", "msamp-o3"])
def test_plain_of_a_sharded_model_names_a_way_out_that_works(results, precision):
    messages, weights, fresh, count = results[0]["plain_of_shards"][precision]
    for message in messages:
        assert message.startswith(f"`plain(model)` needs whole weights, and {count} parameters of FSDPNet are sharded.")
        assert (
            "get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))" in message
        )
    assert same(weights, fresh)
