"""`lightning_lowprec.plain(model)`: the model of before, from every precision, with the values of its masters."""

import warnings
from functools import partial

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_lowprec import MSAMP, FP8TorchAO, HalfMixed, MasterConfig, plain
from lightning_lowprec.conversion import backends
from tests.precision.weights_left import WIDTH, Net, as_trained, exact_weights, fit, same_bits, seen
from tests.toys import ON_CPU, Block, Stack, Task

X = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(2))
NAMES = ["fp8-hybrid", "fp8-hybrid-remainder", "msamp-o1", "msamp-o2", "msamp-o3", "bf16-master", "fp16-master"]
NAMES += ["bf16-sr", "bf16-8bit", partial(HalfMixed, "fp16", master_weights=MasterConfig(moments="8bit"))]


class Subject(Net):
    def __init__(self):
        super().__init__(frozen_head=True)
        self.third = nn.Linear(WIDTH, WIDTH, bias=False)
        self.third.weight = self.second.weight
        self.calls = 0
        self.first.register_forward_hook(self.count)

    def count(self, *_):
        self.calls += 1

    def forward(self, x):
        return self.head(self.norm(self.third(self.second(self.first(x).relu()))))


@pytest.mark.parametrize("name", NAMES)
def test_the_model_is_the_one_before_with_the_trained_values(name):
    model = Subject()
    before, parameters = seen(model), list(model.parameters())
    trainer = fit(as_trained(name if isinstance(name, str) else name()), model)
    model.first.eval()
    expected, gradients = exact_weights(model), [p.grad is not None for p in parameters]
    masters = [m.detach().float().clone() for m in trainer.precision_plugin.main_params(trainer.optimizers[0])]
    assert plain(model) is model
    assert seen(model) == before
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert model.third.weight is model.second.weight
    assert (model.training, model.first.training) == (True, False)
    assert same_bits({fqn: p.detach() for fqn, p in model.named_parameters()}, expected)
    assert all(map(torch.equal, (p.detach() for p in parameters if p.requires_grad), masters))
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


def test_weights_that_were_half_precision_before_and_did_not_train_stay():
    model = Net(torch.bfloat16, frozen_head=True)
    kept = Net(torch.bfloat16)
    trainers = fit(as_trained("bf16-remainder"), model), fit(as_trained(FP8TorchAO(weights="keep")), kept)
    assert plain(model).first.weight.dtype is torch.float32
    assert model.head.weight.dtype is torch.bfloat16
    assert {p.dtype for p in plain(kept).parameters()} == {torch.bfloat16}, "the user has asked to keep them"
    trainers[0].test(evaluated := Net(), verbose=False)
    assert {p.dtype for p in evaluated.parameters()} == {torch.float32}, "an evaluation leaves no rounded weights"


@pytest.mark.parametrize("name", ["bf16-master", "msamp-o3"])
def test_a_part_of_what_an_optimizer_trains_is_refused_and_copied(name):
    model = Net()
    trainer = fit(as_trained(name), model)
    expected = exact_weights(model)
    with pytest.raises(RuntimeError, match=r"got a \w*Linear.* trains it together with \d .*`plain\(part, copy="):
        plain(model.first)
    with pytest.raises(TypeError, match=r"`model` is a OrderedDict; expected a torch.nn.Module"):
        plain(model.state_dict())  # type: ignore[arg-type]
    assert torch.equal(plain(model.first, copy=True).weight, expected["first.weight"])
    assert same_bits(exact_weights(model), expected)
    model.first.weight.ds_shape = model.first.weight.shape  # what DeepSpeed's ZeRO-3 says of a weight that it has cut
    with pytest.raises(RuntimeError, match="needs whole weights in float32, and DeepSpeed's ZeRO has cut them"):
        plain(model)
    assert trainer


@pytest.mark.parametrize("wrap", ["fabric", "fabric-compiled", "compiled", "ddp"])
def test_wrappers_are_taken_off(wrap):
    model = Net()
    before = seen(model)
    fabric = L.Fabric(accelerator="cpu", devices=1, plugins=MSAMP("O3"))
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
        wrapped = torch.compile(DistributedDataParallel(torch.compile(model, backend="eager")), backend="eager")
    assert plain(wrapped) is model
    assert seen(model)[1] == before[1]
    assert [type(m) for m in model.modules()] == [type(m) for m in Net().modules()]
    assert same_bits({fqn: p.detach() for fqn, p in model.named_parameters()}, expected)
    model(X).sum().backward()


class Blocks(Task):
    train_dataloader, batch_size = Net.train_dataloader, 8

    def __init__(self):
        super().__init__(Stack(partial(Block, WIDTH, norm=False), seed=0))


@pytest.mark.parametrize("whose", ["the plugin's", "the user's", "the user's, later"])
def test_compiled_blocks(whose):
    model, options = Blocks(), {"backend": "eager"}
    if whose == "the user's":
        for block in model.net.blocks:
            block.compile(**options)
    fit(FP8TorchAO(plain_after_fit=False, compile=options if whose != "the user's" else False), model)
    for block in model.net.blocks if whose == "the user's, later" else ():
        block.compile(**options)
    same = Blocks()
    same.load_state_dict(plain(model).state_dict())
    torch.testing.assert_close(model.net(X), same.net(X), rtol=0, atol=0)
    compiled = [block._compiled_call_impl is not None for block in model.net.blocks]
    assert compiled == [whose != "the plugin's"] * 2
    fit(as_trained(FP8TorchAO()), model)  # and back
    assert backends.owner(model.net.blocks[0].up) is not None
    assert not torch.equal(model.eval().net(X), same.net(X))


@pytest.mark.parametrize("name", ["fp8-hybrid", "int8-mixed", "msamp-o3", "bf16-remainder"])
def test_a_logger_that_would_trace_the_model_is_refused_with_its_option(name):
    net, other, traces = Net(), DummyLogger(), DummyLogger()
    traces._log_graph = True  # as TensorBoardLogger, which needs a package more
    fit(name, net, logger=traces, log_every_n_steps=1)  # nothing is traced without an example
    net.example_input_array = {"fp8-hybrid": X}.get(name, (X,))
    fit(name, net, logger=other, log_every_n_steps=1)  # nor by a logger such as that of `fast_dev_run`
    with pytest.raises(MisconfigurationException, match=r"TensorBoardLogger.*Write `log_graph=False`"):
        fit(name, net, logger=[other, traces], log_every_n_steps=1)
    assert type(net.first) is nn.Linear


STOCK = ["32-true", "bf16-mixed"]
pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers.*")


@pytest.mark.parametrize("stock", STOCK)
@pytest.mark.parametrize(("name", "title"), [("fp8-hybrid", "torchao"), ("msamp-o2", "MS-AMP")])
def test_layers_that_were_left_warn_once(name, title, stock):
    module = Net()
    fit(as_trained(name), module)
    trainer = L.Trainer(precision=stock, **ON_CPU)
    match = rf"2 layers of Net are those of {title}.*`precision='{stock}'`.*lightning_lowprec.plain\(model\)"
    with pytest.warns(UserWarning, match=match) as caught:
        trainer.validate(module, verbose=False)
    assert len([warning for warning in caught if "are those of" in str(warning.message)]) == 1
    module(torch.randn(2, WIDTH))  # warnings are errors: no second one
    plain(module)
    trainer.validate(module, verbose=False)


@pytest.mark.parametrize("stock", STOCK)
@pytest.mark.filterwarnings("default:.*since an earlier run with master weights.*:UserWarning")
def test_weights_that_masters_left_in_half_precision_are_named(stock):
    module = Net()
    fit(as_trained("bf16-master"), module)
    module.head.requires_grad_(False)
    fabric = L.Fabric(accelerator="cpu", devices=1, precision=stock)
    with pytest.warns(UserWarning, match=r"6 parameters of Net are torch.bfloat16 since.*lowprec.plain\(model\)`"):
        fabric.setup(module)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        half = L.Fabric(accelerator="cpu", devices=1, precision="bf16-true")
        wrapped, optimizer = half.setup(module, torch.optim.SGD(module.parameters(), 0.0))
        half.backward(wrapped(X).sum())
        optimizer.step()  # as the user has chosen
        fabric.setup(plain(module))
    values = {fqn: torch.full_like(v, 1 + 2**-12) for fqn, v in module.state_dict().items()}
    L.Fabric(accelerator="cpu", precision="bf16-master").setup(module, torch.optim.SGD(module.parameters(), 0.1))
    module.load_state_dict(values)  # as in the first run, float32 values reach the masters
    assert same_bits(dict(plain(module).state_dict()), values)


def test_an_optimizer_that_meets_codes_of_an_earlier_run_is_told_so():
    module = Net()
    fit(as_trained("msamp-o2"), module)
    with (
        pytest.warns(UserWarning, match="those of MS-AMP"),
        pytest.raises(
            RuntimeError, match=r"If the codes (come from|are of) an earlier run.*lightning_lowprec.plain\(model\)"
        ),
    ):
        fit("32-true", module)
