"""`lightning_lowprec.plain(model)`: the model of before, from every precision, with the values of its masters."""

import lightning as L
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_lowprec import MSAMP, FP8TorchAO, HalfMixed, plain
from lightning_lowprec.conversion import backends
from tests.precision.weights_left import Net, as_trained, exact_weights, fit, same_bits

X = torch.randn(8, 32, generator=torch.Generator().manual_seed(2))
BY_LIGHTNING, BY_TORCH = {"_hparams"}, {"_dynamo_static_input_type"}
PLUGINS = {
    "torchao": FP8TorchAO,
    "torchao-recipes": lambda: FP8TorchAO(recipe={"first": "rowwise", "*": "tensorwise"}),
    "torchao-master": lambda: FP8TorchAO(master_weights=True),
    "msamp-o1": lambda: MSAMP("O1"),
    "msamp-o2": lambda: MSAMP("O2"),
    "msamp-o3": lambda: MSAMP("O3"),
    "bf16-master": lambda: HalfMixed("bf16", master_weights=True),
    "fp16-master": lambda: HalfMixed("fp16", master_weights=True),
    "bf16-remainder": lambda: HalfMixed("bf16", master_weights="remainder", grad_accumulation_dtype=torch.float32),
    "bf16-sr": lambda: HalfMixed("bf16", master_weights="stochastic"),
    "bf16-8bit": lambda: "bf16-8bit",
}


class Subject(Net):
    """A Net with a hook, tied Linears and a frozen head."""

    def __init__(self):
        super().__init__(frozen_head=True)
        self.third = nn.Linear(32, 32, bias=False)
        self.third.weight = self.second.weight
        self.calls = 0
        self.first.register_forward_hook(self.count)

    def count(self, *_):
        self.calls += 1

    def forward(self, x):
        return self.head(self.norm(self.third(self.second(self.first(x).relu()))))


def seen(model):
    """Everything that a precision might leave at a model: classes, attributes, hooks; of Parameters also dtypes."""
    modules = {
        fqn: (type(m), vars(m).keys() - BY_LIGHTNING, {k: len(v) for k, v in vars(m).items() if k.endswith("_hooks")})
        for fqn, m in model.named_modules()
    }
    tensors = {
        fqn: (
            type(p),
            type(p.data),
            p.dtype,
            p.grad_dtype,
            p.requires_grad,
            vars(p).keys() - BY_TORCH,
            bool(p._backward_hooks),
        )
        for fqn, p in model.named_parameters(remove_duplicate=False)
    }
    return modules, tensors


@pytest.mark.parametrize("name", PLUGINS)
def test_the_model_is_the_one_before_with_the_trained_values(name):
    model = Subject()
    before, parameters = seen(model), list(model.parameters())
    trainer = fit(as_trained(PLUGINS[name]()), model)
    model.first.eval()
    expected, gradients = exact_weights(model), [p.grad is not None for p in parameters]
    assert plain(model) is model
    assert seen(model) == before
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert model.third.weight is model.second.weight
    assert (model.training, model.first.training) == (True, False)
    assert same_bits({fqn: p.detach() for fqn, p in model.named_parameters()}, expected)
    assert [p.grad is not None for p in parameters] == gradients
    calls = model.calls
    model(X).square().mean().backward()  # float32, without any context
    assert model.calls == calls + 1, "the user's hook runs"
    optimizer = trainer.optimizers[0]
    assert type(optimizer) is torch.optim.AdamW
    assert {v.dtype for s in optimizer.state.values() for v in s.values()} == {torch.float32}
    optimizer.step()
    assert not torch.equal(model.second.weight, expected["second.weight"])
    assert torch.equal(model.head.weight, expected["head.weight"])


@pytest.mark.parametrize("name", PLUGINS)
def test_a_copy_is_plain_and_the_model_trains_on_as_if_none_was_made(name):
    models = Subject(), Subject()
    trainers = [fit(as_trained(PLUGINS[name]()), model) for model in models]
    expected, state = exact_weights(models[0]), seen(models[0])
    made = plain(models[0], copy=True)
    assert seen(models[0]) == state
    assert {type(m) for m in made.modules()} == {type(m) for m in Subject().modules()}
    assert made.third.weight is made.second.weight
    assert same_bits({fqn: p.detach() for fqn, p in made.named_parameters()}, expected)
    for model, trainer in zip(models, trainers, strict=True):
        trainer.fit_loop.epoch_progress.reset()
        trainer.fit_loop.max_epochs = 2
        trainer.fit(model)
    assert same_bits(exact_weights(models[0]), exact_weights(models[1]))
    assert same_bits({fqn: p.detach() for fqn, p in made.named_parameters()}, expected)


def test_weights_that_were_half_precision_before_and_did_not_train_stay():
    model = Net(torch.bfloat16, frozen_head=True)
    kept = Net(torch.bfloat16)
    trainers = fit(as_trained("bf16-remainder"), model), fit(as_trained(FP8TorchAO(weights="keep")), kept)
    assert plain(model).first.weight.dtype is torch.float32
    assert model.head.weight.dtype is torch.bfloat16
    assert {p.dtype for p in plain(kept).parameters()} == {torch.bfloat16}, "the user has asked to keep them"
    assert trainers


@pytest.mark.parametrize("name", ["bf16-master", "msamp-o3"])
def test_a_part_of_what_an_optimizer_trains_is_refused_and_copied(name):
    model = Net()
    trainer = fit(as_trained(name), model)
    expected = exact_weights(model)
    with pytest.raises(
        RuntimeError, match=r"got a \w*Linear.* trains it together with \d .*`plain\(part, copy=True\)`"
    ):
        plain(model.first)
    assert torch.equal(plain(model.first, copy=True).weight, expected["first.weight"])
    assert same_bits(exact_weights(model), expected)
    assert trainer


@pytest.mark.parametrize("level", ["O1", "O3"])
@pytest.mark.parametrize("wrap", ["fabric", "fabric-compiled", "compiled", "ddp"])
def test_wrappers_are_taken_off(wrap, level):
    model = Net()
    before = seen(model)
    fabric = L.Fabric(accelerator="cpu", devices=1, plugins=MSAMP(level))
    given = torch.compile(model, backend="eager") if wrap == "fabric-compiled" else model
    wrapped, optimizer = fabric.setup(given, torch.optim.AdamW(model.parameters()))
    fabric.backward(wrapped(X).square().mean())
    optimizer.step()
    expected = exact_weights(model)
    if wrap == "compiled":
        wrapped = torch.compile(model, backend="eager")
        wrapped(X)
    if wrap == "ddp":
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        wrapped = DistributedDataParallel(model)
    assert plain(wrapped) is model
    assert seen(model)[1] == before[1]
    assert [type(m) for m in model.modules()] == [type(m) for m in Net().modules()]
    assert same_bits({fqn: p.detach() for fqn, p in model.named_parameters()}, expected)
    model(X).sum().backward()


class Blocks(L.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x

    def training_step(self, batch, _):
        return self(batch).square().mean()

    train_dataloader = Net.train_dataloader
    batch_size = 8

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


@pytest.mark.parametrize("whose", ["the plugin's", "the user's"])
def test_compiled_blocks(whose):
    model, options = Blocks(), {"backend": "eager"}
    if whose == "the user's":
        for block in model.blocks:
            block.compile(**options)
    fit(FP8TorchAO(plain_after_fit=False, compile=options if whose == "the plugin's" else False), model)
    same = Blocks()
    same.load_state_dict(plain(model).state_dict())
    torch.testing.assert_close(model(X), same(X), rtol=0, atol=0)
    compiled = [block._compiled_call_impl is not None for block in model.blocks]
    assert compiled == [whose == "the user's"] * 2
    fit(as_trained(FP8TorchAO()), model)  # and back
    assert backends.owner(model.blocks[0][0]) is not None
    assert not torch.equal(model.eval()(X), same(X))


def test_what_cannot_be_plain_says_so():
    with pytest.raises(TypeError, match=r"`model` is a OrderedDict; expected a torch.nn.Module"):
        plain(Net().state_dict())  # type: ignore[arg-type]
