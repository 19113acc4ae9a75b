"""MSAMP: options, refusals, what it computes, gradients, strategies, checkpoints."""

import copy
import pickle

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_lowprec import MSAMP, plain, plan
from lightning_lowprec.msamp import ScaledAdamW, scale_linears, values_of
from tests.msamp.msamp_runs import CHATTER, Batches, Net, coded, every_level, fit, in_fabric
from tests.quality import sqnr
from tests.toys import in_e4m3

pytestmark = pytest.mark.filterwarnings(CHATTER)


def test_a_gpu_without_fp8_is_refused_unless_told_to_emulate(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "GPU X")
    assert "`plugins=MSAMP('O3', emulate=True)` to emulate" in MSAMP("O3").refusal(torch.device("cuda"))
    assert MSAMP(emulate=True).refusal(torch.device("cuda")) is None


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated:FutureWarning")
def test_a_weight_that_a_hook_computes_is_kept_and_trains():
    module = Net()
    nn.utils.weight_norm(module.first)
    before = {name: p.detach().clone() for name, p in module.first.named_parameters()}
    planned = plan(module, "msamp-o2")
    assert "its weight is computed at each forward (weight_norm," in planned.summary()
    _, trainer = fit(MSAMP("O2"), module)
    assert (coded(module), trainer.precision_plugin.plan) == (["second"], planned)
    assert all(not torch.equal(p, before[name]) for name, p in module.first.named_parameters())
    with pytest.raises(TypeError, match=r"the weight of 'first' is computed at each forward .*Leave it out"):
        scale_linears(module, ["first"], "O2")


def tied_linears():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32))
    model[1].weight = model[0].weight
    return model


@every_level
def test_tied_layers_share_their_codes(level):
    fabric = L.Fabric(accelerator="cpu", devices=1, plugins=MSAMP(level))
    model, x = tied_linears(), torch.randn(16, 32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    wrapped, optimizer = fabric.setup(model, optimizer)
    fabric.backward(wrapped(x).float().square().sum())
    codes = model[0].weight.msamp_state
    L.Fabric(accelerator="cpu", devices=1, plugins=MSAMP(level)).setup(model)
    assert codes is model[0].weight.msamp_state, "a second set-up does not round again"
    assert model[0].weight is model[1].weight
    plain = tied_linears()
    plain(x).square().sum().backward()
    assert sqnr(plain[0].weight.grad, model[0].weight.grad + 0) >= 20, "of one use alone: below 10"
    optimizer.step()
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert twin[0].weight is twin[1].weight
        assert twin[0].weight.requires_grad
        assert torch.equal(twin(x), model(x))
    plain.load_state_dict(model.state_dict())
    assert torch.equal(plain[1].weight, values_of(model[0].weight))


def test_a_tie_of_a_layer_that_is_kept_is_refused_with_both_names():
    with pytest.raises(ValueError, match=r"the weight of '1' is that of '0' too.*`MSAMP\(\.\.\., keep=\['1', '0'\]\)`"):
        MSAMP(keep=["0"]).convert_module(tied_linears())
    model = tied_linears()
    MSAMP(keep=["1", "0"]).convert_module(model)
    assert coded(model) == ["2"]


@every_level
def test_the_state_dict_gives_the_same_outputs_in_the_plain_model(level):
    module, _ = fit(MSAMP(level, fp8_eval=False))
    plain = Net()
    plain.load_state_dict(module.state_dict(), strict=True)
    module.eval(), plain.eval()
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        if level == "O3":  # whose state dict holds the masters; the layer computes with their codes
            exact = plain.first.weight.clone()
            for part in (plain.first, plain.second):
                part.weight.copy_(in_e4m3(part.weight))
            assert not torch.equal(plain.first.weight, exact)
        assert torch.equal(module(Batches()[0]), plain(Batches()[0]))


@pytest.mark.parametrize("strategy", ["fsdp2", "fsdp", "deepspeed"])
def test_what_shards_is_refused_with_what_works(strategy):
    for make in (L.Trainer, L.Fabric):
        with pytest.raises(ValueError, match=r"does not run under .* It runs under one device, 'ddp'") as error:
            make(accelerator="cpu", devices=1, strategy=strategy, precision="msamp-o2")
        assert "or 'fsdp'" not in str(error.value)
        assert "under 'fsdp2', 'msamp-o3' does" in str(error.value)
    with pytest.raises(ValueError, match=r"`precision='msamp-o2'` does not run sharded. .* 'msamp-o3' runs under"):
        MSAMP().bind_shards(reshard=lambda module: None)
    MSAMP("O3").bind_shards(reshard=lambda module: None)


@pytest.mark.parametrize(
    "callback", [EMAWeightAveraging(decay=0.9), StochasticWeightAveraging(swa_lrs=1e-2)], ids=["ema", "swa"]
)
def test_callbacks_that_average_weights_are_refused(callback):
    with pytest.raises(MisconfigurationException, match=r"`\w+Averaging` averages the weights.*average state dicts"):
        fit(MSAMP(), callbacks=callback)
    with pytest.raises(MisconfigurationException, match=r"`\w+Averaging` copies the model.*not run under 'fsdp2'"):
        fit("bf16-mixed", strategy="fsdp2", callbacks=callback)


def test_masters_in_older_checkpoints_of_o3_count_and_a_stale_one_is_ignored(tmp_path):
    fit(MSAMP("O3"))[1].save_checkpoint(tmp_path / "O3.ckpt")
    checkpoint = torch.load(tmp_path / "O3.ckpt", weights_only=True)
    entry = checkpoint["optimizer_states"][0]["state"][0]
    assert "master_param" not in entry
    master = checkpoint["state_dict"]["first.weight"]
    checkpoint["state_dict"]["first.weight"] = in_e4m3(master)
    assert not torch.equal(in_e4m3(master), master)
    for stale, optimizer_first in ((False, True), (True, True), (False, False), (True, False)):
        module = Net()
        _, wrapped, optimizer = in_fabric(module, torch.optim.AdamW(module.parameters()), MSAMP("O3"))
        entry["master_param"] = master + 1 if stale else master
        loads = [
            lambda to=optimizer: to.load_state_dict(checkpoint["optimizer_states"][0]),
            lambda to=wrapped: to.load_state_dict(checkpoint["state_dict"]),
        ]
        for load in loads if optimizer_first else reversed(loads):
            load()
        expected = checkpoint["state_dict"]["first.weight"] if stale else master
        assert torch.equal(values_of(module.first.weight), expected)


def test_plain_of_a_part_lets_ddp_train_it_in_the_whole_again():
    whole = nn.Sequential(Net(), Net(), nn.LayerNorm(4))
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(whole, ["2.bias"])  # the user's own
    plugin = MSAMP("O2")
    plugin.bind_device(torch.device("cpu"))
    plugin.convert_module(whole)
    coded = {"0.first.weight", "0.second.weight", "1.first.weight", "1.second.weight"}
    assert set(whole._ddp_params_and_buffers_to_ignore) == coded | {"2.bias"}
    assert plain(whole[0]) is whole[0]
    assert set(whole._ddp_params_and_buffers_to_ignore) == {"1.first.weight", "1.second.weight", "2.bias"}
    assert not hasattr(whole[0].first.weight, "_ddp_ignored")
    plain(whole[1])
    assert whole._ddp_params_and_buffers_to_ignore == ["2.bias"]


def test_other_levels_and_layers_take_over_the_values_and_lightnings_own_precisions_raise():
    module, _ = fit(MSAMP("O2"))
    values = values_of(module.second.weight)
    fit(MSAMP("O2", keep=["second"]), module, epochs=0)
    assert type(module.second) is torch.nn.Linear
    assert torch.equal(module.second.weight, values)
    fit(MSAMP("O2"), module)
    for precision in ("32-true", "bf16-mixed"):  # Lightning's own do not convert, and the optimizer finds out
        with (
            pytest.warns(UserWarning, match="2 layers of Net are those of MS-AMP"),
            pytest.raises(RuntimeError, match=r"kept as codes with a scale .*would be lost: .* precision of MS-AMP"),
        ):  # the first decay is noticed
            fit(precision, module)
    assert type(fit(MSAMP("O1"), module)[0].first) is not torch.nn.Linear  # the weights of O1 are those of O2


# ---- which optimizers are taken, in place, and which are refused


def test_an_optimizer_is_taken_in_place_with_scheduler_hooks_groups_and_state():
    module = Net()
    groups = [{"params": [module.first.weight, module.second.weight], "weight_decay": 0.1}]
    groups.append({"params": [p for p in module.parameters() if p.ndim == 1], "lr": 1e-3})
    optimizer = torch.optim.AdamW([*groups, {"params": [module.head.weight]}], lr=1e-2, betas=(0.8, 0.9))
    for p in module.parameters():  # it has stepped before
        p.grad = torch.ones_like(p)
    optimizer.step()
    before, moments = copy.deepcopy(optimizer.param_groups), optimizer.state[module.first.weight]["exp_avg"].clone()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    fabric, wrapped, shown = in_fabric(module, optimizer)
    assert isinstance(optimizer, torch.optim.AdamW)
    assert isinstance(optimizer, ScaledAdamW)
    state = optimizer.state[module.first.weight]
    assert state["exp_avg"].dtype == torch.float8_e4m3fn
    assert torch.allclose(state["exp_avg"].float() / state["exp_avg_scale"], moments, rtol=2**-4)
    assert state["step"] == 1
    for _ in range(2):
        fabric.backward(wrapped(Batches()[0]).square().mean())
        shown.step()
        scheduler.step()
        shown.zero_grad()
    assert calls == ["before", "after"] * 2
    for old, new in zip(before, optimizer.param_groups, strict=True):
        assert new["lr"] == old["lr"] / 4
        assert (new["betas"], new["weight_decay"]) == (old["betas"], old["weight_decay"])
    twin_module, twin = copy.deepcopy((module, optimizer))
    assert type(twin) is type(optimizer)
    assert type(twin.state[twin_module.first.weight]["step"]) is int  # a tensor's powers would be rounded to float32
    for model, own in ((module, optimizer), (twin_module, twin)):
        own.zero_grad()
        model(Batches()[1]).square().mean().backward()
        own.param_groups[0]["lr"] = 1.0  # a step that needs another scale
        before = values_of(twin_module.first.weight)
        own.step()
        assert torch.equal(values_of(twin_module.first.weight), before) == (model is module), "scales of its own"
    assert torch.equal(values_of(twin_module.first.weight), values_of(module.first.weight))
    L.Fabric(accelerator="cpu", devices=1, precision="half-auto").setup_optimizers(optimizer)
    assert type(optimizer) is ScaledAdamW, "which still has codes, beside biases"


def with_a_step_of_its_own(ps):
    optimizer = torch.optim.AdamW(ps)
    optimizer.step = lambda closure=None: None
    return optimizer


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda ps: torch.optim.AdamW(ps, amsgrad=True), ValueError, "`amsgrad=True` of AdamW"),
        (lambda ps: torch.optim.AdamW(ps, maximize=True), ValueError, "`maximize=True` of AdamW"),
        (lambda ps: ScaledAdamW(ps, level="O1"), ValueError, "has `level='O1'`; expected 'O2'"),
        (torch.optim.SGD, TypeError, r"SGD cannot step.*AdamW, .*Adam, .*ScaledAdamW"),
        (type("Own", (torch.optim.AdamW,), {}), TypeError, "Own cannot step"),
        (with_a_step_of_its_own, RuntimeError, "instance attribute `step` of this AdamW hides its class"),
    ],
)
def test_what_it_cannot_do_raises(make, error, message):
    with pytest.raises(error, match=message):
        fit(MSAMP("O2"), Net(lambda net: make(list(net.parameters()))))
    module = Net()
    with pytest.raises(error, match=message):
        in_fabric(module, make(list(module.parameters())))


def test_any_optimizer_may_hold_what_is_not_kept_as_codes():
    module = Net()
    module.requires_grad_(False)
    module.head.requires_grad_(True)
    optimizer = torch.optim.Adagrad(module.parameters(), lr=0.1)
    fabric, wrapped, shown = in_fabric(module, optimizer)
    fabric.backward(wrapped(Batches()[0]).square().mean())
    shown.step()
    module.load_state_dict({"first.bias": torch.zeros(32)}, strict=False)
    module.first.requires_grad_(True)
    fabric.backward(wrapped(Batches()[0]).square().mean())
    with pytest.raises(TypeError, match="Adagrad cannot step"):
        shown.step()
