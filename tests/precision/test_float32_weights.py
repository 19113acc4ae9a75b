"""Half-precision weights under names that promise float32 weights, and models that another precision has left."""

import copy
import re
from itertools import product

import lightning as L
import pytest
import torch
from torch import nn

from lightning_lowprec import MSAMP, FP8TorchAO, HalfMixed
from tests.precision.weights_left import Net, as_trained, exact_weights, fit, same_bits
from tests.torchao.test_frozen_codes import Unfreezes

FLOAT32 = ["half-auto", "fp8-hybrid", "fp8-rowwise", "msamp-o2", "msamp-o3"]


@pytest.mark.parametrize("early_optimizer", [False, True])
@pytest.mark.parametrize("name", [*FLOAT32, "fp16-master", "bf16-sr"])
def test_a_half_model_trains_as_the_float32_model_with_its_values(name, early_optimizer, caplog):
    dtype = torch.float16 if name == "fp16-master" else torch.bfloat16
    given = Net(dtype, frozen_head=True, early_optimizer=early_optimizer)
    same = Net(dtype, frozen_head=True).float()
    parameters = list(given.parameters())
    trainer = fit(name, given)
    fit(name, same).test(Net(dtype), verbose=False)  # of which no line speaks, because nothing trains
    (said,) = (line for line in caplog.messages if "became float32" in line or "half precision already" in line)
    assert given.losses == same.losses
    assert same_bits(exact_weights(given), exact_weights(same))
    assert all(a is b for a, b in zip(given.parameters(), parameters, strict=True))
    if name not in FLOAT32:  # names with masters take half weights as they are, and say so of one of the two models
        assert said.startswith(f"{name}: 6 trainable parameters of Net were half precision already")
        assert "dtype=torch.float32" in said
        return
    assert given.head.weight.dtype is torch.bfloat16, "frozen weights stay as they are"
    # 2 Linears of 64x64 and a LayerNorm with their biases train: 8448 elements, 2 bytes more each: 16896
    assert said == (
        f"{trainer.precision_plugin.precision}: 6 trainable half-precision parameters became float32, 16.9 kB more,"
        " and start from their rounded values. `weights='keep'` trains them in half precision."
    )


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
@pytest.mark.parametrize("others", [False, True])
def test_the_line_says_which_weights_start_from_masters_and_moments_in_bf16_become_float32(others, caplog):
    layer, stepped = nn.Linear(16, 16), nn.Linear(16, 16).bfloat16()
    set_up = L.Fabric(accelerator="cpu", devices=1, precision="bf16-remainder").setup
    _, _with_masters = set_up(layer, torch.optim.SGD(layer.parameters()))  # which lives until the end
    optimizer = torch.optim.AdamW(stepped.parameters())
    stepped(torch.ones(2, 16).bfloat16()).sum().backward()
    optimizer.step()
    before = [entry["exp_avg"].float() for entry in optimizer.state.values()]
    model = nn.Sequential(layer, *[stepped, nn.LazyLinear(16, dtype=torch.bfloat16)] * others)
    L.Fabric(accelerator="cpu", devices=1, precision="half-auto").setup(model, optimizer)
    count = "6 trainable .* 1.09 kB more" if others else "2 trainable .* 544 bytes more"
    ending = r" \(4 of them from rounded values, without masters\)" if others else ""
    assert re.search(rf"{count}, and start from their masters' values{ending}\. `weights=", caplog.text)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    after = [entry["exp_avg"] for entry in optimizer.state.values()]
    assert {moment.dtype for moment in after} == {torch.float32 if others else torch.bfloat16}
    assert all(map(torch.equal, [moment.float() for moment in after], before))


def test_frozen_weights_that_a_callback_may_unfreeze_become_float32_too():
    module = Net(torch.bfloat16, frozen_head=True)
    fit("half-auto", module, callbacks=[L.Callback(), Unfreezes()])
    assert module.head.weight.dtype is torch.float32


@pytest.mark.parametrize(
    "make", [lambda **o: HalfMixed("bf16", **o), lambda **o: FP8TorchAO(**o), lambda **o: MSAMP("O2", **o)]
)
def test_weights_keep_leaves_them(make, caplog):
    caplog.set_level("INFO")
    module = Net(torch.bfloat16)
    fit(make(weights="keep"), module)
    assert module.norm.weight.dtype is torch.bfloat16
    assert not any("became float32" in line for line in caplog.messages)


def test_float32_shards_of_half_weights_are_said_without_an_option_that_masters_refuse(caplog):
    trainer = fit("bf16-master", Net(torch.bfloat16), strategy="fsdp2")
    trainer.fit(Net(torch.bfloat16))  # and again
    said = [line for line in caplog.messages if "became float32" in line]
    assert [line.endswith(" and start from their rounded values.") for line in said] == [True, True]


@pytest.mark.parametrize("kind", ["batch norm", "parametrized", "hook"])
def test_buffers_that_are_computed_with_a_weight_follow_it(kind):
    layers = {
        "batch norm": lambda: [nn.Linear(16, 16), nn.BatchNorm1d(16)],
        "parametrized": lambda: [nn.utils.parametrizations.spectral_norm(nn.Linear(16, 16))],
        "hook": lambda: [nn.utils.spectral_norm(nn.Linear(16, 16))],
    }[kind]
    torch.manual_seed(0)
    model = nn.Sequential(*layers(), nn.Linear(16, 16)).bfloat16()
    model.append(nn.Sequential(*layers()).bfloat16().requires_grad_(False))
    model.register_buffer("table", torch.ones(3, dtype=torch.bfloat16))
    fabric = L.Fabric(accelerator="cpu", devices=1, precision="half-auto")
    wrapped = fabric.setup(model)
    wrapped(torch.randn(8, 16)).sum().backward()
    dtypes = {name: t.dtype for name, t in model.named_buffers()}
    stay = {name for name in dtypes if name.startswith(("table", f"{len(model) - 1}.")) or "num_batches" in name}
    assert {name for name, dtype in dtypes.items() if dtype is not torch.float32} == stay


FIRST = ["bf16-master", "fp16-master", "bf16-sr", "msamp-o1", "msamp-o2"]
THEN = ["half-auto", "bf16-remainder", "msamp-o3"]


@pytest.mark.parametrize(("first", "then"), [*product(FIRST, THEN), ("bf16-master", "fp16-master")])
def test_the_users_own_optimizer_goes_on(first, then):
    module = Net(early_optimizer=True)
    fit(as_trained(first), module)
    state = copy.deepcopy(module.optimizer.state_dict())
    for entry in state["state"].values():
        entry.pop("master_param", None)
    fresh = Net(early_optimizer=True)
    fresh.load_state_dict(exact_weights(module))
    fresh.optimizer.load_state_dict(state)
    module.losses.clear()
    fit(as_trained(then), module)
    fit(as_trained(then), fresh)
    assert module.losses == fresh.losses
    assert same_bits(exact_weights(module), exact_weights(fresh))
    assert type(module.optimizer) is type(fresh.optimizer)
