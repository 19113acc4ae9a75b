"""An option that users of another stack write is answered with ours, by the class that they write it to."""

import pytest

from lightning_lowprec import FP8TE, MSAMP, FabricFSDP2Strategy, FSDP2Strategy
from lightning_lowprec.precision.loss_scale import LossScale

ASKED = {
    MSAMP: ["use_te", "opt_level"],
    FP8TE: ["interval", "override_linear_precision", "use_autocast_during_eval", "fp8_margin"],
    LossScale: ["init_scale"],
    FSDP2Strategy: [
        *("offload_params", "cpu_ram_efficient_loading", "auto_wrap_policy", "transformer_layer_cls_to_wrap"),
        *("sharding_strategy", "mixed_precision", "activation_checkpointing_policy"),
    ],
    FabricFSDP2Strategy: ["auto_wrap_policy"],
}


@pytest.mark.parametrize(("cls", "name"), [(cls, name) for cls, names in ASKED.items() for name in names])
def test_the_answer_says_what_to_write(cls, name):
    with pytest.raises(
        TypeError, match=rf"unexpected keyword argument '{name}'. (Write|Leave|For|The|Weights)"
    ) as raised:
        cls(**{name: True})
    assert "Did you mean" not in str(raised.value)
