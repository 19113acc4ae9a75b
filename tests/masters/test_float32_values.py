"""The float32 value of a weight is never lost: {how it arrives} x {how it leaves} x {name}, error 0 or a rounding.

The names of MS-AMP round trained weights to 11 bits, with a scale per weight. All other values are the same bits.
"""

import copy
import gc

import lightning as L
import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from lightning_lowprec import plain
from tests.toys import ON_CPU, Task, adamw

HALF = ["bf16-master", "fp16-master", "bf16-remainder", "bf16-8bit", "fp8-hybrid-8bit"]
MSAMP = ["msamp-o1", "msamp-o2", "msamp-o3"]
NAMES = ["fp8-hybrid", *HALF, *MSAMP]
ARRIVALS = ["set-up", "load", "added group", "unfrozen", "frozen", "loaded frozen", "no optimizer"]
ONE_LAYER = ("frozen", "loaded frozen", "no optimizer")
WIDTH = 64  # 4,096 numbers: moments of 8 bits are coded
pytestmark = [
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch"),
    pytest.mark.filterwarnings("ignore:.*is trainable and in no optimizer"),
]


def layers(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    net[1].weight.data = net[1].weight.data.t()  # whose rows are not one after the other in memory
    return net


def set_up(name: str, net: nn.Sequential, how: str):
    fabric = L.Fabric(accelerator="cpu", devices=1, precision=name)
    net[1].requires_grad_("frozen" not in how)
    late = how in ("added group", "unfrozen", *ONE_LAYER)
    held = net[0].parameters() if late else net.parameters()
    model, optimizer = fabric.setup(net, torch.optim.AdamW(held, lr=0.0, weight_decay=0.0))
    if how in ("added group", "unfrozen"):
        if how == "unfrozen":
            step(fabric, model, optimizer)
            net[1].requires_grad_(True)
        optimizer.add_param_group({"params": list(net[1].parameters())})
    return fabric, model, optimizer


def step(fabric, model, optimizer) -> None:
    fabric.backward(model(torch.randn(16, WIDTH)).float().square().mean())
    optimizer.step()
    model.zero_grad()


def values(model) -> list[torch.Tensor]:
    return [p.detach() for p in plain(model, copy=True).parameters()]


def assert_kept(found, expected, names, frozen: bool) -> None:
    for index, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert a.dtype == torch.float32
        if a.ndim == 2 and any(name in MSAMP for name in names) and not (frozen and index > 1):
            # 11 significant bits; the scale is at least 2**14 / amax, and codes are multiples of 2**-24
            assert bool(((a - b).abs() <= b.abs() * 2.0**-11 + b.abs().max() * 2.0**-38).all())
        else:
            assert torch.equal(a, b), (names, index)


@pytest.mark.parametrize("how", ARRIVALS)
@pytest.mark.parametrize("name", NAMES)
def test_a_value_that_arrives_leaves_again(name, how, tmp_path, caplog):
    expected = [p.detach().clone() for p in layers(0).parameters()]
    net = layers(1 if "load" in how else 0)
    fabric, model, optimizer = set_up(name, net, how)
    if "load" in how:
        torch.save({"model": layers(0).state_dict()}, tmp_path / "plain.ckpt")
        fabric.load(tmp_path / "plain.ckpt", {"model": model})
    step(fabric, model, optimizer)
    frozen = how in ONE_LAYER
    if name not in MSAMP:  # which makes codes of what may train
        widened = how == "no optimizer" or name == "fp8-hybrid"
        assert (net[1].weight.dtype == torch.float32) == widened
        waits = not widened and (frozen or how == "unfrozen")  # 4,160 numbers of 4 bytes
        assert ("float32 values in host memory, 16.6 kB" in caplog.text) == waits
    assert_kept(values(model), expected, [name], frozen and how != "no optimizer")
    if name in HALF:  # a copy has no master
        copied = list(copy.deepcopy(net).parameters())
        assert_kept([p.detach() for p in copied], expected, [name], frozen)
        assert [p.requires_grad for p in copied] == [p.requires_grad for p in net.parameters()]
    fabric.save(tmp_path / "left.ckpt", {"model": model, "optimizer": optimizer})
    for other in ("fp8-hybrid", "bf16-remainder", "fp16-master", "msamp-o1", "msamp-o3"):
        resumed, to, with_optimizer = set_up(other, layers(2), how)
        resumed.load(tmp_path / "left.ckpt", {"model": to, "optimizer": with_optimizer})
        step(resumed, to, with_optimizer)
        names = [name] if how != "no optimizer" and frozen else [name, other]
        assert_kept(values(to), expected, [*names, other], frozen and how != "no optimizer")
    _, taken_over, _ = set_up("bf16-master" if name == "fp16-master" else "fp16-master", net, how)
    assert_kept(values(taken_over), expected, [name], frozen and how != "no optimizer")


@pytest.mark.parametrize("unfreezes", [False, True])
@pytest.mark.parametrize("name", ["bf16-master", "fp16-master", "bf16-remainder"])
def test_a_layer_that_is_frozen_for_a_second_set_up_keeps_its_value(name, unfreezes):
    expected = [p.detach().clone() for p in layers(0).parameters()]
    net = layers(0)
    first = set_up(name, net, "set-up")
    step(*first)
    second = set_up(name, net, "frozen")
    step(*second)
    if unfreezes:
        net[1].requires_grad_(True)
        second[2].add_param_group({"params": list(net[1].parameters())})
    del first  # and with it the optimizer that had the masters of all weights
    gc.collect()
    assert all(map(torch.equal, values(net), expected))
    assert not plain(net)[0]._load_state_dict_pre_hooks, "of both set-ups"


def task(seed: int) -> Task:
    net = nn.Sequential(layers(seed).requires_grad_(False), nn.Linear(WIDTH, WIDTH))
    return Task(net, optimizer=lambda task: adamw(task, lr=1e-2))


class Saves(L.Callback):
    def __init__(self, path=None):
        self.path = path

    def on_train_start(self, trainer, module):
        self.first = values(module)

    def on_train_end(self, trainer, module):
        self.last = values(module)
        if self.path:
            trainer.save_checkpoint(self.path)


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("fp16-master", "bf16-master"),
        ("fp16-master", "bf16-8bit"),
        ("bf16-8bit", "fp8-hybrid"),
        ("bf16-remainder", "half-auto"),
        *[("msamp-o3", other) for other in ("32-true", "fp8-hybrid", "bf16-master", "bf16-remainder", "msamp-o3")],
    ],
)
def test_a_run_of_the_trainer_resumes_under_another_name_with_the_same_values(name, other, tmp_path):
    one, two = Saves(tmp_path / "one.ckpt"), Saves()
    data = torch.utils.data.DataLoader(torch.randn(32, WIDTH), batch_size=16)
    L.Trainer(precision=name, callbacks=[one], **{**ON_CPU, "max_epochs": 1}).fit(task(0), data)
    resumed = L.Trainer(precision=other, callbacks=[two], **{**ON_CPU, "max_epochs": 2})
    resumed.fit(task(1), data, ckpt_path=tmp_path / "one.ckpt")
    assert all(torch.equal(a, b) for a, b in zip(one.last, two.first, strict=True))


@pytest.mark.parametrize("name", ["bf16-remainder", "bf16-master"])
def test_a_frozen_weight_between_two_numbers_of_bf16_is_that_of_its_file(name, tmp_path):
    fabric, net = L.Fabric(accelerator="cpu", devices=1, precision=name), layers(0)
    with torch.no_grad():
        net[0].weight.fill_(1 + 2**-8)
        net[1].weight.fill_(1 + 2**-8).requires_grad_(False)
    model, _ = fabric.setup(net, torch.optim.AdamW(net[0].parameters()))
    assert net[0].weight[0, 0].item() == (1.0 if name == "bf16-master" else 1 + 2**-7), "as its steps round"
    fabric.save(tmp_path / "file", {"model": model})
    other = layers(1).requires_grad_(False)
    fabric.load(tmp_path / "file", {"model": fabric.setup(other)})
    assert float(net[1].weight[0, 0]) == float(other[1].weight[0, 0]) == 1.0
    assert float(model.state_dict()["1.weight"][0, 0]) == 1 + 2**-8


@pytest.mark.parametrize("name", ["bf16-master", "bf16-remainder", "bf16-8bit", "fp16-master"])
def test_what_programs_read_write_and_load_between_steps_changes_no_other_value(name):
    net, fabric = layers(0), L.Fabric(accelerator="cpu", devices=1, precision=name)
    net.register_buffer("count", torch.zeros(1))
    net[1].requires_grad_(False)
    expected = [p.detach().clone() for p in net.parameters()]
    fabric.setup(net)
    dtype, frozen = net[0].weight.dtype, net[1].weight
    assert [net.state_dict()[fqn].dtype for fqn in ("0.weight", "1.weight")] == [dtype, torch.float32]
    assert net.state_dict(keep_vars=True)["1.weight"] is frozen
    expected[2][0] = frozen.data[0] = 3.0
    average, optimizers = AveragedModel(net), []
    for _ in range(3):  # of one weight; the last one counts
        optimizers.append(fabric.setup_optimizers(torch.optim.SGD(net[0].parameters(), lr=2.0**-14)))
        for p, value in zip(net[0].parameters(), expected, strict=False):
            p.grad = torch.ones_like(p)
            value.sub_(2.0**-14)
        optimizers[-1].optimizer.step()  # without a loss, which fp16 would scale
        net.load_state_dict({fqn: value.to(dtype) for fqn, value in net.state_dict().items()})
        assert all(map(torch.equal, values(net), expected))
    loaded = {**layers(5).state_dict(), "0.bias": expected[1]}
    net.load_state_dict({fqn: value for fqn, value in loaded.items() if fqn != "0.bias"}, strict=False)
    optimizers[-1].zero_grad()
    assert all(map(torch.equal, values(net), loaded.values())), "dropped gradients take no value along"
    with pytest.raises(RuntimeError, match=r"size mismatch for 0\.bias"):
        net.load_state_dict({**net.state_dict(), "0.bias": torch.zeros(WIDTH + 1)})
    bare = nn.Linear(4, 4).requires_grad_(False)
    bare.register_state_dict_post_hook(lambda module, state, prefix, _: state.__delitem__(f"{prefix}bias"))
    assert [*fabric.setup(bare).state_dict()] == ["weight"]
    net.count.fill_(5.0)
    average.update_parameters(net)
    assert average.module.count == 5.0
    net.to(torch.float16 if dtype == torch.bfloat16 else torch.bfloat16)  # by the program, which then copies as torch
    assert copy.deepcopy(net)[0].weight.dtype == net[0].weight.dtype


@pytest.mark.parametrize(("name", "other"), [("bf16-remainder", "fp16-master"), ("fp16-master", "bf16-master")])
def test_masters_that_are_loaded_wait_for_weights_of_another_half_precision(name, other):
    _, saved, masters = set_up(other, layers(3), "set-up")
    fabric, model, optimizer = set_up(name, layers(4), "set-up")
    optimizer.load_state_dict(masters.state_dict())
    model.load_state_dict(saved.state_dict())
    step(fabric, model, optimizer)
    assert all(map(torch.equal, values(model), layers(3).parameters()))
