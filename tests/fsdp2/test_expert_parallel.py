"""Two ranks train a Mixtral with transformers' expert parallelism: each rank has half of the experts of every layer.

The reference is the same code with one rank, to the bit where no rounding to bf16 follows a sum in float32 (there the
order of the sum shows). Without expert parallelism the forward is the same, to the bit. The gradients of the tokens are
not: transformers sums them in float32, and without expert parallelism they are summed in bf16.
"""

import pytest
import torch
from lightning.fabric.strategies import ModelParallelStrategy
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from transformers import MixtralConfig, MixtralForCausalLM

from lightning_lowprec import FabricFSDP2Strategy, FP8TorchAO, HalfMixed
from tests.fsdp2.models import same
from tests.fsdp2.ranks import parts, run
from tests.fsdp2.toy import fabric_for, full
from tests.toys import causal_loss, stepped

pytestmark = pytest.mark.slow

PLUGINS = {"half-auto": lambda: HalfMixed("auto"), "rowwise": lambda: FP8TorchAO(recipe="rowwise")}
TOKENS = torch.arange(64).reshape(2, 32)
STEPS = 3


def save(folder):
    torch.manual_seed(0)
    sizes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    config = MixtralConfig(**sizes, num_attention_heads=2, num_key_value_heads=1, num_local_experts=4)
    MixtralForCausalLM(config).save_pretrained(folder)


def load(folder):
    return MixtralForCausalLM.from_pretrained(folder, dtype=torch.float32)


def cut(model, ranks=2):
    from transformers.distributed.expert_parallel import apply_expert_parallelism

    mesh = init_device_mesh("cpu", (2 // ranks, ranks), mesh_dim_names=("copies", "ep"))["ep"]
    apply_expert_parallelism(model, mesh, mesh, model._expand_parallel_plan(model.ep_plan))
    return model


def train(fabric, model, optimizer, steps=STEPS):
    return stepped(fabric, optimizer, (causal_loss(model, TOKENS) for _ in range(steps)))


def gradients(fabric, model, wrapped):
    fabric.backward(causal_loss(wrapped, TOKENS))
    return full({fqn: p.grad for fqn, p in model.named_parameters()})


def relative(got, expected):
    return ((got.double() - expected.double()).norm() / expected.double().norm()).item()


def trained(folder, name, order):
    model = load(folder) if order == "whole" else cut(load(folder), 1 if order == "one rank" else 2)
    fabric = fabric_for(PLUGINS[name]())
    wrapped = fabric.setup(model)
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-3))
    grads = gradients(fabric, model, wrapped)
    optimizer.zero_grad()
    losses = train(fabric, wrapped, optimizer)
    assert (optimizer.param_groups[0]["foreach"] is False) == (order != "whole"), "on CUDA torch's default would raise"
    return losses, grads


def two_ranks_train_as_one_does(rank, folder):
    for name, tolerance in (("half-auto", 1e-4), ("rowwise", 0.0)):
        (losses, grads), (one_losses, one), (whole_losses, whole) = (
            trained(folder, name, order) for order in ("cut", "one rank", "whole")
        )
        assert losses == one_losses
        assert losses[0] == whole_losses[0]
        for fqn, grad in grads.items():
            assert relative(grad, one[fqn]) <= tolerance, fqn  # few elements round to the next bf16
            assert relative(grad, whole[fqn]) < 0.05, fqn


def clipped(folder, name, how, order):
    model = load(folder) if how == "whole" else cut(load(folder))
    fabric = fabric_for(HalfMixed(name))
    wrapped, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=1.0, foreach=False))
    gradients(fabric, model, wrapped)
    if how == "plugin":
        norm = fabric.strategy.precision.clip_gradients(optimizer.optimizer, 0.1)
    else:
        norm = fabric.clip_gradients(wrapped, optimizer, max_norm=0.1, norm_type=order)
    return norm, full({fqn: p.grad for fqn, p in model.named_parameters()})


def gradients_are_clipped_by_the_norm_of_all_experts(rank, folder):
    for name, how, order in (("bf16", "cut", 2), ("bf16", "plugin", 2), ("fp16", "cut", 2), ("bf16", "cut", 1)):
        expected, grads = clipped(folder, "bf16", "whole", order)
        norm, got = clipped(folder, name, how, order)
        assert how == "plugin" or norm.item() == pytest.approx(expected.item(), rel=5e-3)
        total = torch.stack([grad.norm(order) for grad in got.values()]).norm(order).item()
        assert total == pytest.approx(0.1, rel=1e-5), "gradients of experts of the other rank count too"
        assert all(relative(got[fqn], grad) < 0.05 for fqn, grad in grads.items())


def all_ranks_skip_a_step_if_the_experts_of_one_overflow(rank, folder):
    model = cut(load(folder))
    fabric = fabric_for(HalfMixed("fp16"))
    wrapped, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=1.0, foreach=False))
    before = full(dict(model.state_dict()))
    gradients(fabric, model, wrapped)
    if rank == 1:
        model.model.layers[0].mlp.experts.down_proj.grad.to_local()[0, 0, 0] = float("inf")
    optimizer.step()
    assert same(before, full(dict(model.state_dict())))


def lightnings_strategy_cuts_saves_and_resumes(rank, folder):
    strategy = ModelParallelStrategy(lambda model, mesh: cut(model), data_parallel_size=1, tensor_parallel_size=2)
    fabric = fabric_for(PLUGINS["half-auto"](), 2, strategy=strategy)
    model = fabric.setup(load(folder))  # cut after our set-up
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False))
    first, state = train(fabric, model, optimizer, 1), {"model": model, "optimizer": optimizer}
    assert first == trained(folder, "half-auto", "whole")[0][:1]
    fabric.save(folder / "cut", state)
    expected = train(fabric, model, optimizer, 2)
    fabric.load(folder / "cut", state)
    assert train(fabric, model, optimizer, 2) == expected


def fsdp2_beside_expert_parallelism(rank, folder):
    """Refused if the experts are cut already, else the strategy cuts them."""

    def losses(model, **options):
        fabric = fabric_for(PLUGINS["rowwise"](), 2, strategy=FabricFSDP2Strategy(**options))
        wrapped = fabric.setup(model)
        optimizer = fabric.setup_optimizers(torch.optim.AdamW(wrapped.parameters(), lr=1e-3))
        return train(fabric, wrapped, optimizer)

    with pytest.raises(TypeError, match="For FSDP2 and expert parallelism"):
        losses(cut(load(folder)))
    found = losses(load(folder), tensor_parallel=lambda model, mesh: cut(model), tensor_parallel_size=2)
    assert found == pytest.approx(trained(folder, "rowwise", "whole")[0], rel=5e-4)


def refusals(rank, folder):
    fabric = fabric_for(PLUGINS["rowwise"]())
    mesh = init_device_mesh("cpu", (2, 1))
    for place, name, dim in (("mlp.experts", "down_proj", 1), ("self_attn.q_proj", "weight", 0)):
        model = cut(load(folder))
        module = model.model.layers[1].get_submodule(place)
        whole = getattr(module, name)
        whole = whole.full_tensor() if isinstance(whole, DTensor) else whole
        setattr(module, name, torch.nn.Parameter(distribute_tensor(whole.detach(), mesh, [Shard(dim), Shard(0)])))
        with pytest.raises(TypeError, match=f"{place}.{name}.* is a DTensor.*apply_expert_parallelism"):
            fabric.setup(model)


@parts(
    two_ranks_train_as_one_does,
    gradients_are_clipped_by_the_norm_of_all_experts,
    all_ranks_skip_a_step_if_the_experts_of_one_overflow,
    lightnings_strategy_cuts_saves_and_resumes,
    fsdp2_beside_expert_parallelism,
    refusals,
)
def test_two_ranks(part, tmp_path):
    save(tmp_path)
    run(*part, 2, tmp_path, tmp_path)
