"""What no stage of ZeRO runs: refused by the name of the strategy, before DeepSpeed is imported."""

import lightning as L
import pytest

import lightning_lowprec as lp
from lightning_lowprec.zero import scale_fields


@pytest.mark.parametrize("make", [L.Fabric, L.Trainer])
@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ({"precision": "bf16-remainder"}, r"has no `form='remainder'`\. Use `precision='bf16-master'`"),
        ({"precision": "fp8-hybrid-8bit"}, r"has no `form='remainder'`\. Use `precision='fp8-hybrid'`"),
        ({"precision": "bf16-sr"}, r"has no `form='stochastic'`\. Use `precision='bf16-master'`"),
        ({"plugins": "8bit"}, r"has no `moments='8bit'`\. Use `precision='bf16-master'`"),
        ({"plugins": "keep"}, r"`weights='keep'` trains .* ZeRO always has float32 masters\. Leave `weights` out"),
        ({"plugins": "head"}, r"`head='chunked'` reads the weight of the output head .* Leave `head` out"),
    ],
    ids=["remainder", "fp8", "sr", "8bit", "keep", "head"],
)
def test_refused_with_reason_and_way_out(make, how, reason):
    plugins = {
        "8bit": lambda: lp.HalfMixed("bf16", master_weights=lp.MasterConfig(moments="8bit")),
        "keep": lambda: lp.HalfMixed("bf16", weights="keep"),
        "head": lambda: lp.FP8TorchAO(head="chunked"),
    }
    how = {"plugins": plugins[how["plugins"]]()} if "plugins" in how else how
    with pytest.raises(ValueError, match=rf"does not run under `strategy='deepspeed_stage_2'`: .*{reason}"):
        make(strategy="deepspeed_stage_2", accelerator="cpu", devices=1, **how)


def test_a_loss_scale_that_starts_at_one_is_deepspeeds_two_to_the_zero():
    assert scale_fields(lp.LossScale(initial=1.0), "fp8-hybrid-fp16")["initial_scale_power"] == 0


@pytest.mark.parametrize("name", ["msamp-o1", "msamp-o2", "msamp-o3"])
def test_msamp(name):
    with pytest.raises(ValueError, match=r"does not run under `strategy='deepspeed_stage_3'` yet\. It runs under one"):
        L.Fabric(strategy="deepspeed_stage_3", accelerator="cpu", devices=1, precision=name)
