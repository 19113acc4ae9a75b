"""Checkpoints of MS-AMP's levels in every other precision and back, and models of codes in other precisions."""

import copy

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from lightning_lowprec import MSAMP, FP8TorchAO, HalfMixed, plain
from lightning_lowprec.msamp.linear import ScaledLinear
from lightning_lowprec.msamp.weight import values_of
from lightning_lowprec.names import create
from tests.msamp.msamp_runs import CHATTER, LEVELS, Net, fit, in_fabric
from tests.toys import in_e4m3

every_level = pytest.mark.parametrize("level", LEVELS)
pytestmark = pytest.mark.filterwarnings(CHATTER)


OTHERS = {
    "32-true": lambda: "32-true",
    "bf16-mixed": lambda: "bf16-mixed",
    "FP8TorchAO": FP8TorchAO,
    "bf16-master": lambda: HalfMixed("bf16", master_weights=True),
    **{level: lambda level=level: MSAMP(level) for level in LEVELS},
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint of each, after two epochs."""
    folder = tmp_path_factory.mktemp("msamp")
    for name, make in OTHERS.items():
        fit(make())[1].save_checkpoint(folder / f"{name}.ckpt")
    return folder


class Restored(Net):
    def on_train_start(self):
        self.weights = {key: value.clone().float() for key, value in self.state_dict().items()}
        self.moments = copy.deepcopy(self.optimizers().optimizer.state_dict()["state"])


PAIRS = [(a, b) for a in OTHERS for b in OTHERS if (a in LEVELS or b in LEVELS)]


@pytest.mark.slow
@pytest.mark.parametrize(("source", "target"), PAIRS, ids=lambda name: name)
def test_checkpoints_load_into_every_other_precision(saved, source, target):
    """Weights and moments are those of the checkpoint but for the rounding of the target; training goes on well."""
    path = saved / f"{source}.ckpt"
    checkpoint = torch.load(path, weights_only=True)
    module, _ = fit(OTHERS[target](), Restored(), epochs=4, path=path)
    eps = {"O1": 2**-11, "O2": 2**-11, "O3": 2**-11, "bf16-master": 2**-8}.get(target, 0.0)
    entries = checkpoint["optimizer_states"][0]["state"].values()
    for (key, weight), entry in zip(checkpoint["state_dict"].items(), entries, strict=True):
        weight = entry.get("master_param", weight)
        assert torch.allclose(module.weights[key], weight.float(), rtol=eps, atol=eps * 1e-2), key
    for index, entry in checkpoint["optimizer_states"][0]["state"].items():
        assert module.moments[index]["step"] == entry["step"] == 8
        for key, rtol in (("exp_avg", 2**-4), ("exp_avg_sq", 2**-11)):
            small = entry[key].abs().max().item() * 2**-15  # what underflows
            coded = target in ("O2", "O3")
            assert entry[key].dtype == torch.float32
            assert torch.allclose(module.moments[index][key], entry[key], rtol=coded * rtol, atol=coded * small)
    whole = fit(OTHERS[target](), epochs=4)[0].losses
    assert len(module.losses) == 8
    assert module.losses[-1] == pytest.approx(whole[-1], rel=0.05)
    if source == target:
        assert module.losses == whole[8:]


def test_masters_in_older_checkpoints_of_o3_count_and_a_stale_one_is_ignored(saved):
    checkpoint = torch.load(saved / "O3.ckpt", weights_only=True)
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
    assert type(fit(MSAMP("O1"), module)[0].first) is ScaledLinear  # the weights of O1 are those of O2


def test_a_checkpoint_names_its_backend_and_older_ones_without_it_resume(saved, tmp_path):
    checkpoint = torch.load(saved / "O2.ckpt", weights_only=True)
    assert checkpoint["MSAMP"].pop("backend") == "msamp"
    torch.save(checkpoint, tmp_path / "older.ckpt")
    continued = [
        fit(MSAMP("O2"), epochs=4, path=path)[0].losses for path in (saved / "O2.ckpt", tmp_path / "older.ckpt")
    ]
    assert len(continued[0]) == 8
    assert continued[0] == continued[1]


def test_a_run_of_ms_amp_goes_on_under_another_backend(saved):
    module, _ = fit("fp8-hybrid", epochs=4, path=saved / "O2.ckpt")
    assert len(module.losses) == 8
    for backend in ("torchao", "transformer_engine", "another"):
        create("fp8-hybrid").load_state_dict({"backend": backend})


def test_plain_of_a_part_lets_ddp_train_it_in_the_whole_again():
    whole = torch.nn.Sequential(Net(), Net(), torch.nn.LayerNorm(4))
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
