"""Stacked experts with a scale per block of 128: each is a Linear with the expert's weight, bit for bit.

Weights that are stored as [in, out] (gpt-oss) are compared with a Conv1D, which is stored so too.
"""

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, GptOssConfig, MixtralConfig
from transformers.pytorch_utils import Conv1D

from lightning_lowprec import FP8TorchAO
from lightning_lowprec.conversion.experts import stacks
from lightning_lowprec.numerics.groups import group, spread
from lightning_lowprec.torchao.experts import fp8_experts
from tests.quality import sqnr
from tests.torchao.test_experts import Layer, gradients, routed, set_up

CPU = torch.device("cpu")
WIDE = {"hidden_size": 272, "intermediate_size": 144, "num_local_experts": 5, "num_experts_per_tok": 1}
WIDE |= {"vocab_size": 64, "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 32}
CONFIGS = {"mixtral": MixtralConfig, "gpt_oss": GptOssConfig}
COUNTS = [130, 0, 1, 16, 300]
"""Tokens of each expert: beyond one and two blocks, none, one, and a multiple of 16."""


def converted(model, dtype=torch.float32, **options):
    plugin = FP8TorchAO("block", compile=False, weights="keep", **options)
    plugin.bind_device(CPU)
    plugin.convert_module(model.to(dtype))
    return model


@pytest.mark.slow(
    "dtype2-True-hopper-down_proj-gpt_oss",
    "dtype2-True-hopper-down_proj-mixtral",
    "dtype2-True-hopper-gate_up_proj-gpt_oss",
)
@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("name", ["gate_up_proj", "down_proj"])
@pytest.mark.parametrize(
    ("dtype", "autocast", "emulate"),
    [
        (torch.float32, True, True), (torch.float32, False, True), (torch.float32, True, "hopper"),
        (torch.bfloat16, True, True), (torch.bfloat16, False, True),
    ],
)  # fmt: skip
def test_each_expert_is_a_linear_with_its_weight(family, name, dtype, autocast, emulate):
    """Sizes that 128 does not divide; both layouts of the stack; all three products."""
    torch.manual_seed(0)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIGS[family](**WIDE))
    _, experts = next(stacks(model))
    experts = experts.to_empty(device="cpu")
    for parameter in experts.parameters():
        nn.init.normal_(parameter, std=0.1)
    converted(nn.Sequential(experts), dtype, emulate=emulate)
    weight = getattr(experts, name)
    inputs, outputs = weight.shape[1:] if experts.is_transposed else weight.shape[:0:-1]
    assert experts.alignment == 128
    index = torch.arange(len(COUNTS)).repeat_interleave(torch.tensor(COUNTS))[torch.randperm(sum(COUNTS)), None]
    groups = group(index, len(COUNTS), experts.alignment)
    tokens = torch.randn(sum(COUNTS), inputs)
    used = torch.bfloat16 if autocast else dtype
    rows = spread(tokens.to(used), groups).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        output = experts.multiply(rows, name, groups)
    grad = torch.randn(output.shape).to(output.dtype)
    grad[groups.token == len(tokens)] = 0  # as `collect` has it for rows without a token
    output.backward(grad)
    start = 0
    for expert, (count, end) in enumerate(zip(COUNTS, groups.ends.tolist(), strict=True)):
        own, here = weight[expert].detach(), slice(start, start + count)
        linear = Conv1D(outputs, inputs) if experts.is_transposed else nn.Linear(inputs, outputs, bias=False)
        linear.weight = nn.Parameter(own.clone())
        converted(nn.Sequential(linear), dtype, emulate=emulate)
        x = rows.detach()[here].clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            expected = linear(x)
        expected.backward(grad[here])
        found = weight.grad[expert]
        assert expected.dtype == output.dtype == used
        assert torch.equal(output[here], expected)
        assert torch.equal(rows.grad[here], x.grad)
        assert torch.equal(found, torch.zeros_like(found) if count == 0 else linear.weight.grad)
        start = end


@pytest.mark.slow("gpt_oss")
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_a_layer_is_near_to_the_model_and_compiles_to_the_same_values(family):
    layer = Layer(family)
    inputs = routed(layer.experts, tokens=60)
    expected = gradients(layer, inputs)
    layer = set_up(layer, FP8TorchAO("block", compile=False))
    eager = gradients(layer, inputs)
    for name, value in expected.items():
        assert sqnr(value, eager[name].float()) > 20, name
    layer.experts.compile(backend="aot_eager", fullgraph=True)
    compiled = gradients(layer, inputs)
    assert all(torch.equal(compiled[name], value) for name, value in eager.items())


def test_products_in_bf16_of_a_recipe_and_a_choice():
    inputs = routed(Layer("mixtral").experts)
    plain = gradients(set_up(Layer("mixtral"), FP8TorchAO("block")), inputs)
    high = gradients(set_up(Layer("mixtral"), FP8TorchAO({"*": {"recipe": "block", "grad_weight": "bf16"}})), inputs)
    assert torch.equal(high["hidden"], plain["hidden"])
    assert not torch.equal(high["down_proj"], plain["down_proj"])
    model = AutoModelForCausalLM.from_config(MixtralConfig(**WIDE))
    set_up(model, plugin := FP8TorchAO("block", experts="bf16"))
    assert not fp8_experts(model)
    reasons = {row.kept_because for row in plugin.plan.rows if row.kind == "stacked experts"}
    assert reasons == {"stacked experts (experts='bf16')"}
