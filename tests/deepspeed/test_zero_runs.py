"""ZeRO 1, 2 and 3 on two gloo ranks: all runs are made once, by `worker.py`."""

import pytest
import torch
from lightning.fabric import Fabric

import lightning_lowprec as lp
from tests.deepspeed.fabric_runs import FEW, REFERENCES
from tests.deepspeed.models import Net, batches, loss_of, optimizer_of

STAGES = (1, 2, 3)
HALF = ["bf16-master", "half-auto", "fp16-master"]


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize(
    ("stage", "name"), [(1, name) for name in FEW] + [(stage, name) for stage in (2, 3) for name in REFERENCES]
)
def test_zero_trains_as_ddp_with_float32_masters_bit_for_bit(seen, stage, name):
    ours, expected = seen[stage][name], seen["reference"][name]
    assert expected["losses"][-1] < expected["losses"][0] - 0.2
    if stage == 3 and name in HALF:  # DeepSpeed's own `linear` rounds the product before it adds the bias
        assert ours["losses"] == pytest.approx(expected["losses"], abs=2e-3)
        return
    assert ours["losses"] == expected["losses"]
    assert equal(ours["weights"], expected["weights"])


def test_offloaded_weights_and_optimizer_give_the_same(seen):
    assert seen["offload"]["losses"] == seen[3]["fp8-hybrid"]["losses"]
    assert equal(seen["offload"]["weights"], seen[3]["fp8-hybrid"]["weights"])


@pytest.mark.parametrize("stage", STAGES)
def test_fabric_resumes_bit_for_bit(seen, stage):
    run = seen["resumed", stage]
    assert equal(run["loaded"], run["saved"])
    assert run["in_new"] == run["straight"]
    assert run["in_old"] == run["straight"], "codes of the weights before loading were used again"


def test_zero_3_keeps_neither_gathered_weights_nor_codes(seen):
    assert seen["kept"] == {"kept": [], "codes": [], "layers": 2}


def test_fp16_overflow_is_skipped_by_deepspeed_with_the_scale_of_the_plugin(seen):
    assert seen["overflow"] == [(256, 0), (128, 1), (128, 1), (128, 1), (256, 1)]


def test_autocast_ends_with_a_forward_that_raises(seen):
    assert seen["autocast after an error"] is False


# ---- Trainer


@pytest.mark.parametrize("stage", STAGES)
def test_the_trainer_resumes_bit_for_bit_and_validates(seen, stage):
    run = seen["trainer", stage]
    assert run["parts"] == run["straight"]
    assert run["straight"][:4] == seen["reference"]["fp8-hybrid"]["losses"]
    assert max(run["validated"]) < run["straight"][0]
    assert run["layer"] == "FP8Linear"


def test_a_checkpoint_of_another_base_dtype_is_named_with_the_way_out(seen):
    assert "under other names in bf16 than in fp16" in seen["of another base"]
    assert "`python zero_to_fp32.py`" in seen["of another base"]


@pytest.mark.parametrize("stage", STAGES)
def test_zero_to_fp32_gives_the_masters_which_other_strategies_load(seen, stage):
    masters = {name.removeprefix("net."): value for name, value in seen["trainer", stage]["masters"].items()}
    saved = {name.removeprefix("net."): value for name, value in seen["trainer", stage]["saved"].items()}
    assert {value.dtype for value in masters.values()} == {torch.float32}
    assert equal({name: value.to(torch.bfloat16) for name, value in masters.items()}, saved)
    net = Net()
    fabric = Fabric(accelerator="cpu", devices=1, plugins=lp.FP8TorchAO(master_weights=True))
    model, optimizer = fabric.setup(net, optimizer_of(net))
    model.load_state_dict(masters)
    batch = batches(1, 0)[0]
    loss = loss_of(model(batch), batch)
    assert loss.item() == seen["trainer", stage]["straight"][4]  # the first of the second epoch
    fabric.backward(loss)
    optimizer.step()


def test_the_trainer_tells_deepspeed_to_accumulate_and_clip(seen):
    assert seen["accumulated"]["told"] == (2, 0.5, 2, 2), "steps per update, clipping, steps of engine and Trainer"


def test_two_clippings_raise_with_both_values(seen):
    assert "`gradient_clip_val=0.5` contradicts `gradient_clipping=0.1` of the DeepSpeed config" in seen["clipping"]


def test_weights_that_zero_cuts_as_they_are_made_are_converted(seen):
    assert seen["cut"]["layer"] == "FP8Linear"
    assert "net.up               32 -> 64  FP8" in seen["cut"]["plan"]
    assert seen["cut"]["losses"][-1] < seen["cut"]["losses"][0] - 0.2


def test_what_needs_whole_weights_names_zero_to_fp32(seen):
    said, _, _ = seen["refused whole"]
    assert len(said) == 2 * (3 + 2)  # plain at three stages, two others at stage 3; wrapped and bare
    for case, message in said.items():
        values = " in float32" if case.startswith("plain") else ""
        assert f"needs whole weights{values}, and DeepSpeed's ZeRO has cut them" in message, case
        assert "zero_to_fp32" in message


def test_fp8_state_of_zero_2_decodes_to_its_whole_weights(seen):
    _, (wrapped, bare), weights = seen["refused whole"]
    assert wrapped.keys() == bare.keys()
    assert all(torch.equal(wrapped[name].float(), bare[name].float()) for name in wrapped)
    codes = {name for name, tensor in wrapped.items() if tensor.dtype == torch.float8_e4m3fn}
    assert codes
    for name in codes:
        weight, decoded = weights[name].float(), wrapped[name].float() * wrapped[f"{name}_scale"].float()
        largest = weight.abs().amax(1, keepdim=True)
        assert ((decoded - weight).abs() <= 2**-4 * weight.abs() + 2**-10 * largest).all()  # e4m3: 3 bits of mantissa


def test_the_log_names_the_format_of_the_products_of_each_precision(seen):
    lines = [line for line in seen["said"].splitlines() if "with float32 masters" in line]
    assert any(line.startswith("int8-mixed: ") and "; int8 is for matrix products alone" in line for line in lines)
    assert any(line.startswith("fp8-rowwise: ") and "; FP8 is for matrix products alone" in line for line in lines)
    assert not any(line.startswith("bf16-master: ") and "is for matrix" in line for line in lines)


@pytest.mark.parametrize(
    "line",
    [
        "ZeRO-3 keeps bf16 weights with float32 masters, gathers weights in bf16",
        "ZeRO-2 keeps fp16 weights with float32 masters, gathers updated weights in fp16 and scales the loss",
        "ZeRO-3 frees weights after each use: FP8 encodes them at every product",
        "the model keeps its low-precision layers and weights after `fit`, because DeepSpeed ZeRO-3 has sharded it",
    ],
)
def test_the_log_says_what_is_gathered(seen, line):
    assert line in seen["said"]
