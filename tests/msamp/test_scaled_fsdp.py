"""Weights of codes (MS-AMP's O3) under FSDP2 on gloo processes, against the same training in one process."""

import pytest
import torch
import torch.utils._pytree as pytree
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers.pytorch_utils import Conv1D

from lightning_lowprec import MSAMP
from lightning_lowprec.checkpoints import optimizer_state
from lightning_lowprec.checkpoints.load import StoredFile, load
from lightning_lowprec.fsdp2.options import ShardOptions
from lightning_lowprec.msamp import ScaledAdamW, scale_linears, set_values_, values_of
from lightning_lowprec.msamp import adamw as msamp_step
from lightning_lowprec.msamp.fsdp2 import shard_codes
from lightning_lowprec.msamp.layer import ScaledLayer
from lightning_lowprec.private.torch import with_local_tensor
from tests.fsdp2 import toy
from tests.fsdp2.ranks import run
from tests.toys import Block, Stack

pytestmark = [pytest.mark.slow, pytest.mark.distributed]
STEPS = 20
GRAPHS = {"backend": "aot_eager"}
OF_STRATEGY = ShardOptions()
COMPILED = {"eager": False, "compiled": True}
"""The step of the optimizer, which has the same bits."""


def conv1d_of(linear):
    """The layer of GPT-2 that computes the same."""
    conv = Conv1D(linear.out_features, linear.in_features)
    with torch.no_grad():
        conv.weight.copy_(linear.weight.t())
        conv.bias.copy_(linear.bias)
    return conv


class Net(Stack):
    def __init__(self, seed=0, width=32):
        super().__init__(lambda: Block(width, activation=torch.relu), seed=seed)
        last = self.blocks[1]
        last.up, last.down = conv1d_of(last.up), conv1d_of(last.down)
        self.head = nn.Linear(width, 5)
        scale_linears(self, [fqn for fqn, _ in self.named_modules() if fqn.endswith(("up", "down"))], "O3")

    def forward(self, x):
        return self.head(super().forward(x))


def adamw(model, kind):
    return ScaledAdamW(model.parameters(), lr=1e-2, level="O3", compile=COMPILED[kind])


def sharded(kind="eager", seed=0):
    msamp_step._BACKEND = "eager"
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    model = Net(seed)
    collect = shard_codes(model, mesh.size(), OF_STRATEGY)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    collect(mesh)
    return model, adamw(model, kind)


def train(model, optimizer, steps, after=lambda: None):
    for step in steps:
        y = model(torch.randn(32, 32, generator=torch.Generator().manual_seed(step)))
        (y.square().mean() + y.abs().mean()).backward()
        after()
        optimizer.step()
        optimizer.zero_grad()


def alone(seed=0):
    """The same in one process, with the float32 gradients that FSDP2 reduces."""
    model = Net(seed)
    for layer in model.modules():
        if isinstance(layer, ScaledLayer):
            layer.float32_gradients = True
    return model, adamw(model, "eager")


def saved(model, optimizer):
    """Whole tensors, on rank 0."""
    weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    state = {"model": weights, "optimizer": optimizer_state.collect(model, optimizer, full=True)}
    return pytree.tree_map_only(torch.Tensor, torch.clone, state)  # counts of steps are those of the optimizer


def decoded(model, optimizer):
    """What ``saved`` gives, of one process."""
    state = {}
    for name, p in model.named_parameters():
        entry = optimizer.state[p]
        state[name] = {"step": float(entry["step"])}
        for key in ("exp_avg", "exp_avg_sq"):
            state[name][key] = entry[key].float() / entry.get(f"{key}_scale", 1.0)
    return {"model": model.state_dict(), "optimizer": {"state": state}}


def same(a, b):
    """Bit for bit."""
    a, b = ({"weights": dict(found["model"]), **found["optimizer"]["state"]} for found in (a, b))
    return not toy.differences(a, b)


def scales(model):
    return [
        (p.msamp_state.scale.item(), p.msamp_state.e4m3_scale.item())
        for p in model.parameters()
        if hasattr(p, "msamp_state")
    ]


def same_batches():
    """Every rank has the whole batch, so the mean of the gradients is exactly that of one process."""
    model, optimizer = sharded()
    train(model, optimizer, range(STEPS))
    state = saved(model, optimizer)
    train(model, optimizer, range(STEPS, STEPS + 3))
    return {"state": state, "end": saved(model, optimizer), "scales": scales(model)}


def resumed(kind, state):
    """From the whole tensors that another number of ranks (or these) saved, with other weights to begin with."""
    model, optimizer = sharded(kind, seed=1)
    load(StoredFile(dict(state)), model, "model", {"optimizer": optimizer}, strict=True)
    at_start = saved(model, optimizer)
    train(model, optimizer, range(STEPS, STEPS + 3))
    return {"start": at_start, "end": saved(model, optimizer)}


def overflow(rank):
    """A gradient of one rank's shard is inf, and another's NaN."""
    model, optimizer = sharded()
    train(model, optimizer, [0])

    def spoil():
        if rank == 1:
            model.blocks[0].up.weight.grad._local_tensor[0, 0] = float("inf")
            model.blocks[1].up.weight.grad._local_tensor[0, 0] = float("nan")

    train(model, optimizer, [1], after=spoil)
    return scales(model), saved(model, optimizer)["model"]


def stochastic():
    """Which of the larger weights one small step has moved, where both ranks have the same weights and gradients."""
    model, _ = sharded()
    optimizer = ScaledAdamW(model.parameters(), lr=1e-5, level="O3", stochastic_rounding=True)
    coded = [p for p in model.parameters() if hasattr(p, "msamp_state")]
    for p in coded:
        alike = torch.rand(p.to_local().shape, generator=torch.Generator().manual_seed(0)) / 4
        set_values_(p, with_local_tensor(alike, p))
    before = [values_of(p).to_local() for p in coded]
    train(model, optimizer, [0], after=lambda: [p.grad._local_tensor.fill_(1.0) for p in coded])
    moved = [(old != values_of(p).to_local())[old.abs() > 2**-4] for old, p in zip(before, coded, strict=True)]
    return scales(model), torch.cat(moved)


def compiled():
    """Trained with compiled blocks, by the strategy's option and by the precision's, and without."""
    found = []
    for options, precision in (({}, {"compile": False}), ({"compile": GRAPHS}, {}), ({}, {"compile": GRAPHS})):
        fabric, model, optimizer = toy.setup(MSAMP("O3", **precision), 2, **options)
        toy.train(fabric, model, optimizer, range(2), 2)
        found.append(toy.everything(model, optimizer, fabric.strategy.precision))
    return [toy.differences(found[0], other) for other in found[1:]]


def refused():
    for option in ("cpu_offload", "sync_module_states"):
        with pytest.raises(ValueError, match=f"^`{option}=True` does not go with weights that are kept as codes"):
            toy.setup("msamp-o3", 2, **{option: True})
    with pytest.raises(ValueError, match=r"`fp8_all_gather=False` is not possible: .* gathered as they are"):
        toy.setup("msamp-o3", 2, fp8_all_gather=False)


def written(rank):
    """Writes to a sharded weight by code that does not know codes: each is a collective."""
    model, _ = sharded()
    weight = model.blocks[0].up.weight
    before = values_of(weight).full_tensor()
    found = {"read": torch.equal(weight.detach().full_tensor(), before)}
    with torch.no_grad():
        weight.mul_(2.0)
        found["doubled"] = torch.equal(values_of(weight).full_tensor(), 2 * before)
        weight.to_local()[0] = float(rank + 1)
        found["row"] = values_of(weight).full_tensor()[[0, 32]]
        found["scale"] = weight.msamp_state.e4m3_scale.item()
        with pytest.raises(RuntimeError, match="would be lost") as error:
            weight.mul_(1 + 1e-6 * rank)  # one rank's values are lost: all ranks raise
        found["lost"] = str(error.value)
    return found


def worker(rank, state):
    found = {"eager": same_batches()}
    sent = [found["eager"]["state"]]
    torch.distributed.broadcast_object_list(sent)
    found["resumed"] = resumed("compiled", sent[0])
    found["from one"] = resumed("eager", torch.load(state))
    found["overflow"], found["stochastic"], found["compiled"] = overflow(rank), stochastic(), compiled()
    found["written"] = written(rank)
    refused()
    return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scaled-fsdp")
    model, optimizer = alone()
    train(model, optimizer, range(STEPS))
    plain, names = optimizer.state_dict(), [name for name, _ in model.named_parameters()]
    named = {
        "state": {names[i]: entry for i, entry in plain["state"].items()},
        "param_groups": [{**g, "params": [names[i] for i in g["params"]]} for g in plain["param_groups"]],
    }
    torch.save({"model": model.state_dict(), "optimizer": named}, folder / "state.pt")
    found = {"state": pytree.tree_map_only(torch.Tensor, torch.clone, decoded(model, optimizer))}
    train(model, optimizer, range(STEPS, STEPS + 3))
    found |= {"end": decoded(model, optimizer), "scales": scales(model)}
    return found, run(worker, 2, folder, folder / "state.pt")


def test_training_is_bit_for_bit_that_of_one_process(runs):
    one, ranks = runs[0], [rank["eager"] for rank in runs[1]]
    assert same(ranks[0]["state"], one["state"])
    assert same(ranks[0]["end"], one["end"])
    assert ranks[0]["scales"] == ranks[1]["scales"] == one["scales"]


@pytest.mark.parametrize("origin", ["resumed", "from one"])
def test_resume_is_bit_exact_from_these_ranks_and_from_one(runs, origin):
    one, found = runs[0], runs[1][0][origin]
    assert same(found["start"], one["state"])
    assert same(found["end"], one["end"])


def test_what_is_not_finite_on_one_rank_leaves_the_scales_finite_and_equal(runs):
    (scales, weights), (other, _) = (rank["overflow"] for rank in runs[1])
    assert scales == other
    assert all(0 < value < float("inf") for pair in scales for value in pair)
    assert bool(weights["blocks.0.up.weight"][32, 0].isnan())  # the first row of rank 1
    assert bool(weights["blocks.0.up.weight"][:32].isfinite().all())
    assert bool(weights["blocks.0.down.weight"].isfinite().all())


def test_stochastic_rounding_moves_weights_on_every_rank_with_common_scales(runs):
    (scales, moved), (other, moved_too) = (rank["stochastic"] for rank in runs[1])
    assert scales == other
    # float16 numbers are 2**-14 (or twice that) apart there, and the first step of AdamW is 1e-5 long
    for part in (moved, moved_too):
        assert 0.8 * 1e-5 * 2**13 < part.float().mean().item() < 1.2 * 1e-5 * 2**14
    assert (moved & moved_too).float().mean().item() < 0.05  # the ranks do not share random bits: about 0.1**2


def test_what_does_not_run_is_said_before_anything_is_sharded():
    model = nn.Sequential(nn.Linear(32, 32))
    scale_linears(model, ["0"], "O3")
    with pytest.raises(ValueError, match="'0' has 32 output features, which do not divide into 3 equal shards"):
        shard_codes(model, 3, OF_STRATEGY)


def test_compiled_blocks_train_to_the_same_bits(runs):
    assert not any(found for rank in runs[1] for found in rank["compiled"])


def test_a_shard_shows_values_and_takes_writes_with_a_common_scale(runs):
    for rank in runs[1]:
        found = rank["written"]
        assert found["read"]
        assert found["doubled"]
        assert torch.equal(found["row"], torch.tensor([[1.0], [2.0]]).expand(2, 32))
        assert found["scale"] == 2.0**7  # 448 / 2 = 224, rounded down to a power of two
        assert "keep=[...]" in found["lost"]
