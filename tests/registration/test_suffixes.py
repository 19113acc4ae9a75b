"""Names with an ending, such as ``-8bit``: one rule makes them; everything that takes a name takes them."""

from collections import Counter
from importlib.util import find_spec
from typing import get_args

import lightning as L
import pytest
import torch

from lightning_lowprec import FP8TE, FP8TorchAO, Int8TorchAO, MasterConfig
from lightning_lowprec.conversion.name_suffixes import families, in_words, split
from lightning_lowprec.names import TABLE, create
from lightning_lowprec.tools.cli import main

FORMS = {"-remainder": "remainder", "-8bit": "8bit", "-sr": "stochastic"}
BF16_BASED = [
    name
    for name, row in TABLE.items()
    if row.plugin in (FP8TorchAO, FP8TE, Int8TorchAO) and split(name)[1] == "" and name not in ("mxfp8-te", "nvfp4-te")
]
HERE = [name for name in BF16_BASED if TABLE[name].plugin is not FP8TE or find_spec("transformer_engine")]


def test_the_rule_covers_every_bf16_based_name():
    assert len(BF16_BASED) == 11
    for name in BF16_BASED:
        for suffix, form in FORMS.items():
            row = TABLE[f"{name}{suffix}"]
            assert row.options == {**TABLE[name].options, "master_weights": form}
            assert (row.plugin, row.gathers_fp8, row.gains) == (
                TABLE[name].plugin, TABLE[name].gathers_fp8, TABLE[name].gains,
            )  # fmt: skip
    suffixed = [name for name in TABLE if split(name)[1] in FORMS and split(name)[0] in TABLE]
    assert len(suffixed) == len(FORMS) * len(BF16_BASED), "no other name has such a form"
    assert Counter(split(name)[1] for name in suffixed) == dict.fromkeys(FORMS, len(BF16_BASED))


@pytest.mark.parametrize("name", HERE)
def test_each_makes_the_plugin_with_bf16_weights_and_its_masters(name):
    configs = (("remainder", "fp32"), ("remainder", "8bit"), ("stochastic", "fp32"))
    for suffix, (form, moments) in zip(FORMS, configs, strict=True):
        plugin = create(f"{name}{suffix}")
        assert plugin.precision == f"{name}{suffix}"
        assert plugin.masters.config == MasterConfig(form=form, moments=moments)
        assert plugin.autocast_dtype is torch.bfloat16
        assert plugin.scaler is None
        made = TABLE[f"{name}{suffix}"]
        same = made.plugin(**made.options).precision
        assert TABLE[same].options == made.options, "a plugin made by hand is called by a name that means the same"


def test_the_flag_of_lightning_cli_offers_every_name():
    for owner in (L.Trainer, L.Fabric):
        offered = {value for part in get_args(owner.__init__.__annotations__["precision"]) for value in get_args(part)}
        assert set(TABLE) <= offered


REFUSED = {
    "fp8-hybrid-fp16-remainder": (
        "`-fp16` and `-remainder` do not go together: names with `-fp16` keep float32 weights. Write 'fp8-hybrid-"
        "remainder' for bf16, or `plugins=FP8TorchAO(..., base='fp16', master_weights=True)` for fp16 weights with"
        " float32 masters."
    ),
    "fp8-hybrid-remainder-fp16": "`-fp16` and `-remainder` do not go together: names with `-fp16` keep float32 weights",
    "fp8-hybrid-te-fp16-sr": "`-fp16` and `-sr` do not go together: names with `-fp16` keep float32 weights",
    "mxfp8-te-remainder": "'mxfp8-te' has no `-remainder`: it needs Blackwell",
    "mxfp8-te-master": "'mxfp8-te' has no `-master`: its backend has no such name",
    "mxfp8-fp16": "'mxfp8' has no `-fp16`: its kernels take and return bf16.",
    "nvfp4-te-sr": "'nvfp4-te' has no `-sr`: it needs Blackwell",
    "nvfp4-te-fp16": "'nvfp4-te' has no `-fp16`: its Hadamard transform is made for bf16.",
    "fp8-block-te-fp16": "'fp8-block-te' has no `-fp16`: write `plugins=FP8TE('block', base='fp16')`.",
    "fp8-rowwise-fp16": "'fp8-rowwise' has no `-fp16`: its kernels round their output through bf16.",
    "msamp-o3-master": "'msamp-o3' has no `-master`: it keeps its weights as codes",
    "msamp-o3-fp16": "'msamp-o3' has no `-fp16`: its backend has no such name.",
    "fp8-hybrid-remainder-sr": "A name has one suffix: write 'fp8-hybrid-remainder'.",
    "fp8-hybrid-8bit-fp16": "`-fp16` and `-8bit` do not go together: names with `-fp16` keep float32 weights",
    "msamp-o2-8bit": "'msamp-o2' has no `-8bit`: it keeps its weights as codes",
    "fp8-hybrid-remaindr": "Did you mean 'fp8-hybrid-remainder'?",
    "fp8-remainder": "Write 'fp8-hybrid-remainder'",
    "fp8-8bit": "Write 'fp8-hybrid-8bit'",
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_form_that_does_not_exist_raises_with_the_reason_and_a_remedy(name):
    for make in (L.Fabric, L.Trainer):
        with pytest.raises(ValueError, match=f"^Precision '{name}' is invalid") as caught:
            make(precision=name, accelerator="cpu")
        assert str(caught.value).startswith(f"Precision {name!r} is invalid. {REFUSED[name]}")


def test_the_remedies_run():
    for base in ("bf16", "fp16"):
        assert FP8TorchAO(recipe="tensorwise", fp8_format="hybrid", base=base, master_weights=True).masters
    if find_spec("transformer_engine"):
        for kind in ("mxfp8", "nvfp4"):
            for form in FORMS.values():
                assert FP8TE(kind, master_weights=form).precision.startswith(f"{kind}-te")
        assert FP8TE("block", base="fp16").scaler is not None


def test_a_family_says_exactly_what_exists():
    found = families(TABLE)
    members = [f"{stem}{suffix}" for suffixes, stems in found.items() for stem in stems for suffix in ("", *suffixes)]
    assert Counter(members) == Counter(list(TABLE))
    assert in_words(["a", "a-sr", "b-sr", "c", "c-sr", "c-fp16"]) == "a, also with -sr; b-sr; c, also with -fp16 or -sr"


@pytest.mark.parametrize(("suffix", "bytes_of_state"), [("", 16), ("-remainder", 14), ("-8bit", 8), ("-sr", 12)])
def test_plan_counts_the_bytes_of_the_state(suffix, bytes_of_state, capsys):
    import json

    assert main(["plan", "torch.nn.Linear", "--args", '{"in_features": 64, "out_features": 64, "bias": false}',
                 f"--precision=fp8-hybrid{suffix}", "--json"]) == 0  # fmt: skip
    row = json.loads(capsys.readouterr().out)["bytes"][-1]
    assert row["precision"] == f"fp8-hybrid{suffix}"
    assert (row["weights"] + row["gradients"] + row["optimizer"]) / 64**2 == bytes_of_state
    assert row["gathered"] / 64**2 == 1
