"""Heads and losses of causal models: which are recognised, and that a model with ours is the model it was."""

import copy
import io
import pickle

import lightning as L
import pytest
import torch
from torch import nn

from lightning_lowprec import FP8TorchAO, HalfMixed, plain
from tests.quality import sqnr
from tests.toys import convert

transformers = pytest.importorskip("transformers")
transformers.logging.set_verbosity_error()
COMMON = {"vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "pad_token_id": 0}
ROTARY = {**COMMON, "num_key_value_heads": 1, "intermediate_size": 64, "head_dim": 16, "attention_dropout": 0.0}
GPT2 = {"vocab_size": 300, "n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 32}
GPT2 |= dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
KNOWN = {
    "llama": ROTARY, "gemma3_text": ROTARY, "gpt2": GPT2, "gpt_neox": {**COMMON, "intermediate_size": 64},
    "phi": {**COMMON, "intermediate_size": 64},  # its head has a bias
}  # fmt: skip


def build(family="llama", **changes):
    config = transformers.AutoConfig.for_model(family, **{**{"falcon": COMMON, **KNOWN}.get(family, ROTARY), **changes})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).train()
    if (bias := model.get_output_embeddings().bias) is not None:
        nn.init.normal_(bias)  # transformers begins with zeros
    return model


def with_head(model, head):
    convert(HalfMixed("bf16", head=head, weights="keep"), plain(model))


@pytest.fixture
def model():
    with_head(model := build(), "chunked")
    return model


def is_lazy(logits):
    return type(logits).__name__ == "LazyLogits"


def batch():
    tokens = torch.randint(1, 300, (2, 20), generator=torch.Generator().manual_seed(1))
    labels = tokens.clone()
    labels[:, :3] = -100
    return {"input_ids": tokens, "labels": labels}


def stepped(model, *, dtype=None, **options):
    model.zero_grad()
    with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
        out = model(**{**batch(), **options})
    out.loss.backward()
    return out, [p.grad.clone() for p in model.parameters()]


def as_exact(ours, true, least):
    return all(sqnr(a, b) >= least for a, b in zip(true, ours, strict=True))


@pytest.mark.parametrize("family", KNOWN)
def test_loss_and_gradients_are_those_of_the_model(family):
    model = build(family)
    labels = batch()["labels"]
    runs = [{}, {"dtype": torch.bfloat16}, {"num_items_in_batch": torch.tensor(50)}, {"shift_labels": labels.flip(1)}]
    runs.append({"labels": labels.clamp(min=0), "ignore_index": 0, "num_items_in_batch": 50})
    stock = [stepped(model, **run) for run in runs]
    keys = list(model.state_dict())
    with_head(nn.ModuleDict({"other": build(), "model": model}), "chunked")
    for run, (out, gradients) in zip(runs, stock, strict=True):
        ours, found = stepped(model, **run)
        torch.testing.assert_close(ours.loss, out.loss, rtol=1e-6, atol=0)
        assert as_exact(found, gradients, 38 if "dtype" in run else 115)
        assert is_lazy(ours.logits)
        assert torch.equal(ours.logits + 0, out.logits)
    assert list(model.state_dict()) == keys
    with_head(model, "fp32")
    out, found = stepped(model, dtype=torch.bfloat16)
    assert (out.logits + 0).dtype == torch.float32
    torch.testing.assert_close(out.loss, stock[0][0].loss, rtol=2e-3, atol=0)
    assert sqnr(stock[0][1][-1], found[-1]) > sqnr(stock[0][1][-1], stock[1][1][-1]) - 1
    with_head(model, "fp8")
    _, found = stepped(model)
    assert as_exact(found, stock[0][1], 20)
    plain(model)
    assert type(model.get_output_embeddings()) is nn.Linear
    out, gradients = stepped(model)
    assert torch.equal(out.loss, stock[0][0].loss)


@pytest.mark.parametrize("family", ["gemma2", "granite", "cohere"])
def test_a_forward_that_computes_with_the_logits_is_right_with_one_warning(family):
    model = build(family)
    stock, expected = stepped(model)
    with_head(model, "chunked")
    with pytest.warns(UserWarning, match="`head='chunked'` has no effect on this forward") as warned:
        steps = [stepped(model), stepped(model)]
    assert len(warned) == 1
    out, found = steps[0]
    assert torch.equal(out.loss, stock.loss)
    assert torch.equal(out.logits, stock.logits)
    assert as_exact(found, expected, float("inf"))


def test_other_models_and_widths_are_refused_with_the_reason():
    hooked, own_loss, own_head, replaced, computed = (build() for _ in range(5))
    hooked.lm_head.register_forward_hook(lambda *args: None)
    replaced.lm_head.forward = torch.zeros_like
    computed.lm_head.weight = computed.lm_head._parameters.pop("weight").detach()
    own_loss.loss_function = lambda logits, labels, vocab_size, **kwargs: logits.sum()
    own_head.lm_head = type("MyHead", (nn.Linear,), {})(32, 300, bias=False)
    for model, head, reason in (
        (hooked, "chunked", r"the loss of LlamaForCausalLM \('lm'\): its head has hooks"),
        (own_loss, "chunked", "its loss is not that"),
        (own_head, "chunked", "the loss of LlamaForCausalLM: its head is no Linear but a MyHead"),
        (replaced, "chunked", "the forward of its head is replaced on the instance"),
        (computed, "chunked", "the weight of its head is computed at each forward"),
        (nn.Sequential(nn.Linear(16, 16)), "chunked", r"holds none.*lightning_lowprec\.losses\.linear_cross_entropy"),
        (build("gpt2", n_embd=24), "fp8", r"multiple of 16 hidden features.*has 24; use `head='chunked'`"),
    ):
        first = build()
        with pytest.raises(ValueError, match=reason):
            with_head(model if " no" in reason else nn.ModuleDict({"first": first, "lm": model}), head)
        assert type(first.lm_head) is nn.Linear


@pytest.mark.parametrize(("head", "dtype"), [("bf16", "bf16"), ("chunked", "bf16"), ("fp8", None), ("fp32", "fp32")])
def test_the_plan_says_the_dtype_of_a_head(head, dtype):
    plugin = FP8TorchAO(head=head)
    L.Fabric(accelerator="cpu", plugins=plugin).setup_module(build())
    assert {row.fqn: row.runs_in for row in plugin.plan.rows}["lm_head"] == dtype


def test_logits_that_were_read_and_changed_before_the_loss_are_those_of_the_loss():
    model = build()
    hidden = torch.randn(2, 20, 32)
    labels = batch()["labels"]
    logits = model.lm_head(hidden)
    with torch.no_grad():
        logits[..., 7] = 0
    expected = model.loss_function(logits, labels, 300)
    (gradient,) = torch.autograd.grad(expected, model.lm_head.weight)
    with_head(model, "chunked")
    lazy = model.lm_head(hidden)
    with pytest.warns(UserWarning, match="`head='chunked'` has no effect on this forward"), torch.no_grad():
        lazy[..., 7] = 0
    loss = model.loss_function(lazy, labels, 300)
    assert torch.equal(loss, expected)
    assert torch.equal(torch.autograd.grad(loss, model.lm_head.weight)[0], gradient)


def test_evaluation_generation_and_forwards_without_labels_are_untouched(model):
    with pytest.warns(UserWarning, match="Pass `labels=...` to a model"):
        logits = model(input_ids=batch()["input_ids"]).logits[:, -1]
    logits.sum().backward()
    with torch.no_grad():
        assert type(model(**batch()).logits) is torch.Tensor
    model.eval()
    out = model(**batch())
    assert type(out.logits) is torch.Tensor
    torch.testing.assert_close(out.loss, build().eval()(**batch()).loss)
    assert model.generate(batch()["input_ids"], max_new_tokens=2).shape == (2, 22)
    with pytest.raises(ValueError, match="do not fit"):
        model.train()(**batch(), logits_to_keep=4)


def test_copies_and_files_keep_the_head():
    model = build(tie_word_embeddings=True)
    with_head(model, "chunked")
    expected, gradients = stepped(model)
    copied = copy.deepcopy(model)
    assert copied.loss_function.args[0] is copied.lm_head is not model.lm_head
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copied, torch.load(file, weights_only=False)):
        out, found = stepped(other)
        assert torch.equal(out.loss, expected.loss)
        assert as_exact(found, gradients, float("inf"))
        assert other.lm_head.weight is other.model.embed_tokens.weight


def test_lazy_logits_are_read_as_a_tensor(model):
    lazy = model(**batch()).logits
    assert isinstance(lazy, torch.Tensor)
    assert (lazy.shape, lazy.dtype, lazy.device.type, len(lazy)) == ((2, 20, 300), torch.float32, "cpu", 2)
    assert (lazy.size(dim=-1), lazy.requires_grad, lazy.computed) == (300, False, None)
    for unread in (lazy.to(torch.bfloat16), lazy.to(torch.int64), lazy.float(), lazy.contiguous()):
        assert is_lazy(unread)
        assert unread.computed is None
        assert torch.equal(unread, model(**batch()).logits.to(unread.dtype))
    assert not (lazy.detach() * 1).requires_grad
    same_logits = lazy + 0
    assert same_logits.requires_grad
    assert lazy.requires_grad
    for found, same in (
        (lazy.argmax(-1), same_logits.argmax(-1)),
        (torch.softmax(lazy, -1), same_logits.softmax(-1)),
        (lazy[0, 1:], same_logits[0, 1:]),
        (2 - lazy, 2 - same_logits),
        (lazy * lazy, same_logits * same_logits),
        (torch.cat([lazy, lazy]), torch.cat([same_logits, same_logits])),
        (torch.stack(tensors=(lazy, lazy)), torch.stack([same_logits, same_logits])),
        (torch.from_numpy(lazy.detach().numpy()), same_logits),
        (pickle.loads(pickle.dumps(lazy.detach())), same_logits),
        (copy.deepcopy(lazy.detach()), same_logits),
        (torch.empty(2, 20, 300).copy_(lazy), same_logits),
    ):
        assert torch.equal(found, same)


def test_logits_of_a_weight_that_has_changed_since_raise_cast_or_not(model):
    read, unread = stepped(model)[0].logits, stepped(model)[0].logits
    casts = (torch.Tensor.float, lambda logits: logits.to(torch.bfloat16))
    values, early = read.detach().clone(), [cast(unread) for cast in casts]
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    assert torch.equal(read, values)
    late = [cast(logits) for cast, once in zip(casts, early, strict=True) for logits in (unread, once)]
    for logits in (unread, *early, *late):
        assert is_lazy(logits)
        with pytest.raises(RuntimeError, match=r"not read before the weight of the head changed.*leave `head` out"):
            logits.argmax(-1)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits):
        return 2 * logits

    @staticmethod
    def backward(ctx, grad_output):
        return 2 * grad_output


def test_a_function_of_the_user_gets_no_logits_without_a_graph(model):
    out = model(**batch())
    doubled = Doubled.apply(out.logits)
    assert torch.equal(doubled, 2 * out.logits)
    with pytest.raises(RuntimeError, match="meta"):
        (out.loss + doubled.sum()).backward()
    out = model(**batch())
    (out.loss + Doubled.apply(out.logits.clone()).sum()).backward()


def test_fp32_computes_the_head_in_float32_from_a_bf16_weight():
    model = build(tie_word_embeddings=False)
    hidden = torch.randn(2, 20, 32)
    model.lm_head.to(torch.bfloat16).register_state_dict_post_hook(lambda *args: None)  # which sees no logits
    model.model.get_output_embeddings = lambda: model.lm_head
    exact = nn.functional.linear(hidden, model.lm_head.weight.float())
    with_head(model, "fp32")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        lazy = model.lm_head(hidden)
        loss = model.loss_function(lazy, batch()["labels"], 300)
        assert torch.equal(model.eval().lm_head(hidden), exact)
    targets = nn.functional.pad(batch()["labels"], (0, 1), value=-100)[..., 1:]
    expected = nn.functional.cross_entropy(exact.flatten(0, 1), targets.flatten())
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    loss.backward()
    assert model.lm_head.weight.grad.dtype == torch.bfloat16
    assert type(plain(model).lm_head) is nn.Linear
