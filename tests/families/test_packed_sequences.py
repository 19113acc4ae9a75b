"""Models of transformers with compiled blocks: values and masks are those of uncompiled blocks."""

import lightning as L
import pytest
import torch

import lightning_lowprec
from tests.families.test_transformers import IDS, build

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning"),  # since 5.2x
]
PADDED = torch.tensor([[1, 1, 1, 1, 1, 1, 1, 1], [0, 0, 0, 1, 1, 1, 1, 1]])
PACKED = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]]).expand(2, -1)
"""Sequences of 3 and 5 tokens."""
CONFIGS = ("llama", "gpt2", "mixtral")


def compiled_or_not(name="llama", *, compiled=True, checkpoints=False):
    """Return the model in training under FP8, with or without compiled blocks; equal values every time."""
    torch._dynamo.reset()
    model = build(name, num_hidden_layers=2)
    if checkpoints:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for _ in range(2):  # as in a second run of the same model
        plugin = lightning_lowprec.FP8TorchAO(compile={"backend": "eager"} if compiled else False)
        wrapped = L.Fabric(accelerator="cpu", devices=1, plugins=plugin).setup_module(model)
    return wrapped.train()


INPUTS = {
    "plain": {},
    "padded": {"attention_mask": PADDED},
    "packed": {"position_ids": PACKED},
    "positions from 3 on": {"position_ids": torch.arange(3, 11)[None]},
}


@pytest.mark.parametrize("checkpoints", [False, True], ids=["", "checkpoints"])
@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize("name", CONFIGS)
def test_values_are_those_of_blocks_that_are_not_compiled(name, inputs, checkpoints):
    found = []
    for compiled in (False, True):
        model = compiled_or_not(name, compiled=compiled, checkpoints=checkpoints)
        loss = model(input_ids=IDS, labels=IDS, **INPUTS[inputs]).loss
        loss.backward()
        found.append([loss.detach(), *(p.grad for p in model.parameters())])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("how", [{"use_cache": False}, {"checkpoints": True}, {"config": False}], ids=str)
def test_packed_sequences_do_not_see_each_other_where_transformers_parts_them(how):
    model = compiled_or_not(checkpoints="checkpoints" in how)
    model.config.use_cache = "config" not in how
    asked = {"use_cache": False} if "use_cache" in how else {}
    base = model.module.model  # which the whole calls with `position_ids` as a keyword
    packed, other = (base(ids, None, PACKED, **asked)[0] for ids in (IDS, IDS.flip(0)))
    mixed = base(torch.cat([IDS[:, :3].flip(0), IDS[:, 3:]], 1), None, PACKED, **asked)[0]
    assert not torch.equal(packed, other)
    # scales of FP8 are those of all tokens, which are the same ones in both calls but for their order
    torch.testing.assert_close(mixed[:, 3:], packed[:, 3:], rtol=0, atol=0)


def test_masks_of_other_models_are_made_as_ever_after_a_call_that_ended_early():
    model, other = compiled_or_not(), compiled_or_not(compiled=False)
    expected = other(input_ids=IDS, position_ids=PACKED, use_cache=False).logits

    def interrupt(*_):
        raise KeyboardInterrupt

    handle = model.module.model.layers[1].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(input_ids=IDS, labels=IDS)
    handle.remove()
    assert torch.equal(other(input_ids=IDS, position_ids=PACKED, use_cache=False).logits, expected)
    assert torch.equal(model(input_ids=IDS, position_ids=PACKED, use_cache=False).logits, expected)
