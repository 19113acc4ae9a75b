"""An option that users of another stack write is answered with ours, by the class that they write it to."""

from enum import Enum

import lightning as L
import pytest

import lightning_lowprec as lp
from lightning_lowprec import recipes

ASKED = {
    lp.MSAMP: ["use_te", "opt_level", "pad_inner_dim"],
    lp.FP8TE: [
        *("interval", "override_linear_precision", "use_autocast_during_eval", "fp8_margin", "fp8_config"),
        *("use_mxfp8_block_scaling", "fp8_recipe", "fp8_param", "fp4", "fp4_format", "fp8_quantizer_factory"),
        *("reuse_grad_buf_for_mxfp8_param_ag", "no_fp8_wgrad", "transformer_impl", "fp8_interval"),
    ],
    lp.HalfMixed: [
        *("bf16", "fp16", "accumulate_allreduce_grads_in_fp32", "grad_reduce_in_bf16", "loss_scale_window"),
        *("min_loss_scale", "initial_loss_scale", "hysteresis", "main_grads_dtype", "exp_avg_dtype"),
        *("use_precision_aware_optimizer", "autocast_enabled", "grad_reduce_in_fp32"),
    ],
    lp.LossScale: ["init_scale"],
    lp.FSDP2Strategy: [
        *("offload_params", "cpu_ram_efficient_loading", "auto_wrap_policy", "transformer_layer_cls_to_wrap"),
        *("sharding_strategy", "mixed_precision", "activation_checkpointing_policy"),
    ],
    lp.FabricFSDP2Strategy: ["auto_wrap_policy"],
}


@pytest.mark.parametrize(("cls", "name"), [(cls, name) for cls, names in ASKED.items() for name in names])
def test_the_answer_says_what_to_write(cls, name):
    answered = rf"unexpected keyword argument '{name}'. (Write|Leave|For|The|Weights)"
    with pytest.raises(TypeError, match=answered) as raised:
        cls(**{name: True})
    assert "Did you mean" not in str(raised.value)


@pytest.mark.parametrize(("make", "answer"), [
    (lambda: lp.FP8TorchAO(fp8_format=Enum("Format", ["HYBRID"]).HYBRID), "Did you mean 'hybrid'?"),
    (lambda: lp.FSDP2Strategy(state_dict_type="FULL_STATE_DICT"), "Did you mean 'full'?"),
    (lambda: lp.FSDP2Strategy(wrap="LlamaDecoderLayer"), "itself, in a list: `wrap=[LlamaDecoderLayer]`."),
    (lambda: lp.FSDP2Strategy(wrap="AUTO_WRAP"), "(fqn, module) -> bool. Did you mean 'auto'?"),
], ids=["Format.HYBRID", "FULL_STATE_DICT", "wrap", "AUTO"])  # fmt: skip
def test_a_value_of_theirs_is_answered_with_ours(make, answer):
    with pytest.raises(ValueError, match=r"is not valid; expected") as raised:
        make()
    assert str(raised.value).endswith(answer)


BRIDGE = {
    "bf16_with_fp8_delayed_scaling_mixed": "bf16_with_fp8_mixed()",
    "bf16_with_nvfp4_mixed": "'nvfp4-te'",
    "nemotron_3_ultra_bf16_with_nvfp4_mixed": "num_layers_at_start_in_bf16=0, num_layers_at_end_in_bf16=16)",
    "nemotron_h_bf16_with_fp8_current_scaling_mixed": "bf16_with_fp8_current_scaling_mixed(num_layers_at_start",
    "nanov2_bf16_with_fp8_current_scaling_mixed": "bf16_with_fp8_subchannel_scaling_mixed(first_last_layers_bf16",
}


@pytest.mark.parametrize("name", BRIDGE)
def test_recipes_of_megatron_bridge_are_answered(name):
    with pytest.raises(AttributeError, match="Write ") as raised:
        getattr(recipes, name)
    said = [str(raised.value)]
    for word in (name, name.replace("_", "-")):
        with pytest.raises(ValueError, match="Write ") as raised:
            L.Fabric(precision=word, accelerator="cpu")
        said.append(str(raised.value))
    assert all(BRIDGE[name] in answer and "Did you mean" not in answer for answer in said)


def test_nemos_attribute_is_answered_where_a_recipe_file_sets_it():
    plugin = recipes.bf16_mixed()
    with pytest.raises(AttributeError, match=r"write `recipes.bf16_mixed\(grad_reduce_in_fp32=False\)`"):
        plugin.grad_reduce_in_fp32 = False
    assert recipes.bf16_mixed(grad_reduce_in_fp32=False).masters.accumulation is None
