"""Models of transformers with compiled blocks: the host reads no value, and masks are those of uncompiled blocks."""

import lightning as L
import peft
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, MixtralConfig

import lightning_lowprec

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings(
        "ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning",  # since 5.2x
        "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning",  # PEFT's own call
    ),
]
IDS = torch.arange(16).view(2, 8)
PADDED = torch.tensor([[1, 1, 1, 1, 1, 1, 1, 1], [0, 0, 0, 1, 1, 1, 1, 1]])
PACKED = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]]).expand(2, -1)
"""Sequences of 3 and 5 tokens."""
SIZES = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
CONFIGS = {
    "llama": lambda: LlamaConfig(**SIZES, intermediate_size=64),
    "gpt2": lambda: GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=2, n_positions=32, **NO_DROPOUT),
    "mixtral": lambda: MixtralConfig(**SIZES, intermediate_size=64, num_local_experts=2, num_key_value_heads=1),
}


class Reads(TorchDispatchMode):
    """Count the values that Python reads from tensors: on a GPU the host waits for each one."""

    def __init__(self):
        super().__init__()
        self.count = 0

    @classmethod
    def ignore_compile_internals(cls):
        return True

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function is torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))


def build(name="llama", *, compiled=True, checkpoints=False, adapters=False):
    """Return the model in training under FP8, with or without compiled blocks; equal values every time."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[name]())
    if adapters:
        model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    if checkpoints:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    plugin = lightning_lowprec.FP8TorchAO(compile={"backend": "eager"} if compiled else False)
    return L.Fabric(accelerator="cpu", devices=1, plugins=plugin).setup_module(model).train()


def reads(model, **inputs):
    """Return how many values one forward and backward read, after a first one."""
    model(input_ids=IDS, labels=IDS, **inputs).loss.backward()
    with Reads() as mode:
        model(input_ids=IDS, labels=IDS, **inputs).loss.backward()
    return mode.count


@pytest.mark.parametrize("how", [{}, {"checkpoints": True}, {"adapters": True}], ids=str)
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_step_reads_no_value(name, how):
    if name == "gpt2" and "adapters" in how:
        pytest.skip("its layer is called c_attn; Llama shows adapters")
    assert reads(build(name, **how)) == 0
    if "adapters" not in how:
        assert reads(build(name, **how), position_ids=PACKED) == ("checkpoints" in how)  # as uncompiled
        assert reads(build(name, **how, compiled=False), position_ids=PACKED) == ("checkpoints" in how)


INPUTS = {
    "plain": {},
    "padded": {"attention_mask": PADDED},
    "packed": {"position_ids": PACKED},
    "packed, without a cache": {"position_ids": PACKED, "use_cache": False},
    "positions from 3 on": {"position_ids": torch.arange(3, 11)[None]},
}


@pytest.mark.parametrize("checkpoints", [False, True], ids=["", "checkpoints"])
@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize("name", CONFIGS)
def test_values_are_those_of_blocks_that_are_not_compiled(name, inputs, checkpoints):
    found = []
    for compiled in (False, True):
        model = build(name, compiled=compiled, checkpoints=checkpoints)
        loss = model(input_ids=IDS, labels=IDS, **INPUTS[inputs]).loss
        loss.backward()
        found.append([loss.detach(), *(p.grad for p in model.parameters())])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("how", [{"use_cache": False}, {"checkpoints": True}, {"config": False}], ids=str)
def test_packed_sequences_do_not_see_each_other_where_transformers_parts_them(how):
    model = build(checkpoints="checkpoints" in how)
    if "config" in how:
        model.config.use_cache = False
    asked = {"use_cache": False} if "use_cache" in how else {}
    first, second = IDS[:, :3], IDS[:, 3:]
    packed, other = (model(input_ids=ids, position_ids=PACKED, **asked).logits for ids in (IDS, IDS.flip(0)))
    mixed = model(input_ids=torch.cat([first.flip(0), second], 1), position_ids=PACKED, **asked).logits
    assert not torch.equal(packed, other)
    # scales of FP8 are those of all tokens, which are the same ones in both calls but for their order
    torch.testing.assert_close(mixed[:, 3:], packed[:, 3:], rtol=0, atol=0)


def test_masks_of_other_models_are_made_as_ever_after_a_call_that_ended_early():
    """As by Ctrl-C, after which torch runs no hook."""
    model, other = build(), build(compiled=False)
    expected = other(input_ids=IDS, position_ids=PACKED, use_cache=False).logits

    def interrupt(*_):
        raise KeyboardInterrupt

    handle = model.module.model.layers[1].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(input_ids=IDS, labels=IDS)
    handle.remove()
    assert torch.equal(other(input_ids=IDS, position_ids=PACKED, use_cache=False).logits, expected)
    assert torch.equal(model(input_ids=IDS, position_ids=PACKED, use_cache=False).logits, expected)
    inner = model.module.model
    assert reads(model) == 0
    for failing in (KeyboardInterrupt, ValueError):
        handle = inner.layers[0].register_forward_pre_hook(lambda *_, error=failing: (_ for _ in ()).throw(error))
        with pytest.raises(failing):
            model(input_ids=IDS, labels=IDS)
        handle.remove()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            states = (m.module.model(input_ids=IDS, position_ids=PACKED, use_cache=False) for m in (model, other))
            assert torch.equal(*(one.last_hidden_state for one in states))
