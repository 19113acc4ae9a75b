"""The cross-entropy from hidden states: as exact as all logits at once, and never all logits at once."""

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import forward_ad
from torch.utils._pytree import tree_leaves

from lightning_lowprec.losses import linear_cross_entropy
from lightning_lowprec.numerics import linear_cross_entropy as numerics
from tests.quality import sqnr
from tests.toys import Operations, in_e4m3

T, K, V = 70, 64, 1000  # neither a multiple of 16
LEAST_DB = {torch.float32: 120, torch.float16: 67, torch.bfloat16: 50, "fp8": 25}
MORE_DB = {torch.float16: (1, 0), torch.bfloat16: (0.4, 0), "fp8": (5, 2)}
"""Of one factor for all losses, without and with a bias, of which there is a gradient too."""


def tensors(dtype, *, tokens=T, bias=False, ignored=7):
    generator = torch.Generator().manual_seed(0)
    h = torch.randn(tokens, K, generator=generator).to(dtype).requires_grad_()
    w = (torch.randn(V, K, generator=generator) * 0.1).to(dtype).requires_grad_()
    b = (torch.randn(V, generator=generator) * 0.1).to(dtype).requires_grad_() if bias else None
    t = torch.randint(0, V, (tokens,), generator=generator)
    t[:ignored] = -100
    return h, w, t, b


def expected(h, w, t, b=None, *, reduction, label_smoothing, ignore_index, factors):
    leaves = [None if x is None else x.detach().double().requires_grad_() for x in (h, w, b)]
    logits = F.linear(*leaves)
    losses = F.cross_entropy(logits, t, None, None, ignore_index, reduction="none", label_smoothing=label_smoothing)
    counts = t != ignore_index
    loss = {"none": losses, "sum": losses.sum(), "mean": losses.sum() / counts.sum()}[reduction]
    (loss * factors).sum().backward()
    return loss.detach(), [leaf.grad for leaf in leaves if leaf is not None]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, "fp8"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize(("label_smoothing", "bias"), [(0.0, False), (0.1, True)])
def test_losses_and_gradients_are_those_of_all_logits(dtype, reduction, label_smoothing, bias, monkeypatch):
    fp8 = dtype == "fp8"
    h, w, t, b = tensors(dtype if not fp8 else torch.float16 if bias else torch.bfloat16, bias=bias)
    options = {"reduction": reduction, "label_smoothing": label_smoothing, "ignore_index": 3 if bias else -100}
    if not fp8:
        h.data[t == -100] = torch.finfo(dtype).max  # no logit of an ignored row is finite
    t = t.masked_fill(t == -100, options["ignore_index"])
    if bias:
        monkeypatch.setattr(numerics, "SPAN_BYTES", 32 * V)  # the gradient of an FP8 weight in three products
        monkeypatch.setattr(numerics, "_BLOCK", 300)
    factors = torch.linspace(*((-1, 3) if bias else (-3, -1)), T) if reduction == "none" else torch.tensor(1.7)
    loss = linear_cross_entropy(h, w, t, bias=b, fp8=fp8, rows=17, **options)
    (loss * factors).sum().backward()
    assert loss.dtype == torch.float32
    true, gradients = expected(h, w, t, b, factors=factors, **options)
    for leaf, gradient in zip((h, w, b), gradients, strict=False):
        assert leaf.grad.dtype == leaf.dtype
        least = LEAST_DB[dtype] + (reduction != "none") * MORE_DB.get(dtype, (0, 0))[bias]
        assert sqnr(gradient, leaf.grad) >= least
    if not fp8:  # the same rounding of logits as by a Linear
        logits = F.linear(h, w, b).float()
        same = F.cross_entropy(logits, t, **options)
        torch.testing.assert_close(loss, same, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(loss.double(), true, rtol=2e-2 if reduction == "none" else 2e-3, atol=2e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("fp8", [False, True])
def test_sequences_of_a_batch_are_rows_and_autocast_decides_the_dtype(fp8, dtype):
    h, w, t, b = tensors(dtype, bias=True)
    wide = [x.detach().float().requires_grad_() for x in (w, b)]  # whose gradients are not rounded
    for options in ({"fp8": fp8, "label_smoothing": 1.0}, {"fp8": fp8, "reduction": "none"}):
        rows = linear_cross_entropy(h, w, t, bias=b, rows=32, **options)
        with torch.autocast("cpu", dtype):
            found = linear_cross_entropy(h.view(7, 10, K), wide[0], t.view(7, 10), bias=wide[1], rows=32, **options)
        assert torch.equal(found, rows.view(7, 10) if "reduction" in options else rows)
        exact = torch.autograd.grad(found.sum(), wide)
        assert all(map(torch.equal, torch.autograd.grad(rows.sum(), (w, b)), [x.to(dtype) for x in exact]))


@pytest.mark.parametrize("fp8", [False, True])
def test_no_tensor_is_as_large_as_all_logits(fp8):
    h, w, t, _ = tensors(torch.bfloat16, tokens=160)
    with Operations() as operations, pytest.MonkeyPatch.context() as patch:
        patch.setattr(numerics, "SPAN_BYTES", 48 * V)
        linear_cross_entropy(h, w, t, rows=16, fp8=fp8).backward()
    made = [x for *_, out in operations.seen for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
    largest = max(x.numel() for x in made)
    assert largest == len(w) * K if not fp8 else largest <= 1008 * K
    assert largest < 160 * V / 2


@pytest.mark.parametrize("fp8", [False, True])
def test_every_token_ignored_is_nan_without_gradients_as_in_torch(fp8):
    h, w, t, _ = tensors(torch.bfloat16, ignored=T)
    loss = linear_cross_entropy(h, w, t, fp8=fp8)
    loss.backward()
    assert loss.isnan()
    assert F.cross_entropy(F.linear(h, w).float(), t).isnan()
    for some, reduction in ((0, "sum"), (0, "none"), (T, "none")):  # of no token; of all, by a mask
        losses = linear_cross_entropy(h[:some], w, t[:some].clamp(min=0), reduction=reduction, fp8=fp8)
        assert some or losses.sum() == 0
        (0 * losses).sum().backward()
    assert not h.grad.any()
    assert not w.grad.any()


def test_fp16_gradients_of_wrong_predictions_stay_finite_with_weights_of_250():
    """Gradients of logits 1 and -1, the largest, times weights 250 and -250: 500, and times 2**7 less than 65504."""
    h = torch.ones(1, 1).half().requires_grad_()
    linear_cross_entropy(h, torch.tensor([[250.0], [-250.0]]).half(), torch.tensor([1])).backward()
    assert h.grad.item() == 500
    w, t = torch.cat([torch.full((16, 16), sign * 2.0**-10) for sign in (1, -1)]).half(), torch.full((2048,), 31)
    h = torch.zeros(2048, 16).half().requires_grad_()
    (linear_cross_entropy(h, w, t, fp8=True) * 2.0**16).backward()  # of 2**-21 times the loss scale
    assert torch.equal(h.grad, torch.full_like(h, 33 * 2.0**-10)), "31 / 32 is 1 in e5m2"


def test_frozen_parts_get_no_gradient_and_cost_no_product():
    h, w, t, _ = tensors(torch.bfloat16)
    for needs, count in (((True, True), 3), ((True, False), 2), ((False, False), 1)):
        with Operations() as operations:
            inputs = [x.detach().requires_grad_(need) for x, need in zip((h, w), needs, strict=True)]
            loss = linear_cross_entropy(*inputs, t, rows=T)
            if any(needs):
                loss.backward()
        products = torch.ops.aten.mm, torch.ops.aten.addmm
        assert sum(func.overloadpacket in products for func, *_ in operations.seen) == count
        assert [x.grad is not None for x in inputs] == list(needs)


def test_fp8_multiplies_codes_with_scales_of_powers_of_two():
    h, w, t, _ = tensors(torch.float32, ignored=0)
    hq, wq = in_e4m3(h.detach()), in_e4m3(w.detach())
    logits = hq @ wq.t()
    same = F.cross_entropy(logits, t)
    gradient = logits.softmax(-1)
    gradient[torch.arange(T), t] -= 1
    gradient = (gradient * 2.0**14).to(torch.float8_e5m2).float() / 2.0**14
    loss = linear_cross_entropy(h, w, t, fp8=True, rows=32)
    loss.backward()
    assert float(loss.detach()) == pytest.approx(float(same), rel=1e-6)
    # a value of the softmax between two codes may round the other way
    assert sqnr(gradient @ wq / T, h.grad) >= 60
    assert sqnr(gradient.t() @ hq / T, w.grad) >= 60


@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # dynamo's own, for every autograd.Function
@pytest.mark.parametrize("fp8", [False, True])
def test_a_compiler_sees_one_operation(fp8):
    h, w, t, _ = tensors(torch.float32)

    def f(h, w, t):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return linear_cross_entropy(torch.tanh(h), w, t, fp8=fp8) * 3

    eager = torch.autograd.grad(f(h, w, t), (h, w))
    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")(h, w, t)
    torch.testing.assert_close(torch.autograd.grad(compiled, (h, w)), eager, rtol=0, atol=0)
    settings = (-100, 0.0, "float32", "forward")
    operation = torch.ops.lightning_lowprec.linear_cross_entropy
    one = torch.ones(())
    arguments = (h.detach(), w.detach(), None, fp8, 32, [True, True, False], t, one, one, *settings)
    assert set(torch.library.opcheck(operation, arguments).values()) == {"SUCCESS"}


def test_a_second_backward_pass_and_a_second_gradient_raise():
    h, w, t, _ = tensors(torch.float32)
    loss = linear_cross_entropy(h, w, t)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match=r"ran its backward pass before.*reduction='none'"):
        loss.backward()
    with pytest.raises(RuntimeError, match=r"no second gradient.*cross_entropy"):
        torch.autograd.grad(linear_cross_entropy(h, w, t), h, create_graph=True)
    twice = linear_cross_entropy(h, w, t, reduction="none").sum()
    first, second = (torch.autograd.grad(twice, h, retain_graph=True) for _ in range(2))
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    with pytest.raises(RuntimeError, match=r"no derivative in forward mode.*cross_entropy"), forward_ad.dual_level():
        linear_cross_entropy(forward_ad.make_dual(h.detach(), h.detach()), w, t)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target": torch.zeros(1, T, dtype=torch.int64)}, r"do not fit: got \(70, 64\), \(1000, 64\) and \(1, 70\)"),
        ({"input": torch.zeros(T, 60)}, r"do not fit: got \(70, 60\), \(1000, 64\) and \(70,\)"),
        ({"weight": torch.zeros(K)}, r"do not fit: got \(70, 64\), \(64,\) and \(70,\)"),
        ({"label_smoothing": 1.1}, "`label_smoothing=1.1` is not valid; expected a number from 0 to 1"),
        ({"target": torch.zeros(T)}, "`target` must be int64.*float32"),
        ({"bias": torch.zeros(V, 1)}, r"`bias` must be \(V,\), here \(1000,\), got \(1000, 1\)"),
        ({"reduction": "avg"}, "`reduction='avg'` is not valid; expected one of: mean, sum, none"),
        ({"rows": 0}, "`rows=0` is not valid"),
        ({"fp8": True, "emulate": "h100"}, "`emulate='h100'` is not valid; expected one of: True, False, hopper"),
        ({"weight": torch.zeros(V, K).bfloat16()}, "`input` is torch.float32 and `weight` torch.bfloat16; cast"),
        ({"input": torch.zeros(T, 60), "weight": torch.zeros(V, 60), "fp8": True}, "multiple of 16.*got 60; leave"),
    ],
)
def test_what_does_not_fit_raises(change, message):
    h, w, t, _ = tensors(torch.float32)
    with pytest.raises(ValueError, match=message):
        linear_cross_entropy(**{"input": h, "weight": w, "target": t, **change})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("value", [float("inf"), -float("inf"), float("nan")])
@pytest.mark.parametrize("where", ["hidden", "weight"])
def test_the_loss_shows_what_is_not_finite(where, value, dtype):
    hidden, weight, target, _ = tensors(dtype, ignored=0)
    {"hidden": hidden, "weight": weight}[where].data[3, 4] = value
    loss = linear_cross_entropy(hidden, weight, target, fp8=True)
    loss.backward()
    assert loss.isnan()
    assert not weight.grad.isfinite().all()
    assert not hidden.grad.isfinite().all()


@pytest.mark.parametrize("vocabulary", [16, 17, 48, 64])
def test_a_head_that_is_stored_transposed(vocabulary):
    torch.manual_seed(0)
    stored, hidden = torch.randn(K, vocabulary), torch.randn(8, K)
    target = torch.randint(0, vocabulary, (8,))
    weights = [weight.requires_grad_() for weight in (stored.t(), stored.t().contiguous())]
    losses = [linear_cross_entropy(hidden, weight, target, fp8=True) for weight in weights]
    assert torch.equal(*losses)
    assert torch.equal(*torch.autograd.grad(sum(losses), weights))
