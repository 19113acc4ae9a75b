"""The head and the loss of the 8B shape: 8,192 tokens, 128,256 classes, 4,096 features."""

import gc
from functools import partial

import lightning as L
import pytest
import torch
import torch.nn.functional as F

from benchmarks.ledger import own_moved, triton_bytes
from benchmarks.ledger.entry import amounts
from benchmarks.ledger.moved import Moved
from benchmarks.ledger.recorder import recording
from lightning_lowprec import HalfMixed
from lightning_lowprec.losses import linear_cross_entropy
from tests.ledger.budgets import ALL_LOGITS_GB, ALL_LOGITS_PEAK_GB, HEAD_GB, HEAD_PEAK_GB
from tests.ledger.counted import STACK

TOKENS = 2 * STACK.sequence
PRODUCT = 2 * TOKENS * STACK.vocab * STACK.hidden


LOSSES = {"chunked": linear_cross_entropy, "fp8": partial(linear_cross_entropy, fp8=True)}


def counted(loss_of, weights):
    gc.collect()
    torch.cuda.empty_cache()
    torch._dynamo.reset()
    triton_bytes.start(f"{TOKENS} {weights}")
    h = torch.zeros(TOKENS, STACK.hidden, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    w = torch.nn.Parameter(torch.zeros(STACK.vocab, STACK.hidden, dtype=weights, device="cuda"))
    t = torch.zeros(TOKENS, dtype=torch.int64, device="cuda")

    def step():
        h.grad = w.grad = None
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = loss_of(h, w, t)
        loss.backward()

    step()
    h.grad = w.grad = None
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    peak = torch.cuda.max_memory_allocated() - before
    moved = Moved()
    stop = own_moved.watch(moved.from_outside)
    triton_bytes.forget_launches()
    with torch.autograd.set_multithreading_enabled(False), recording() as log, moved:
        step()
    stop()
    stretches, loose = amounts(log.records, moved.operations, triton_bytes.KERNELS, triton_bytes.LAUNCHES)
    assert (log.waits(), log.of("refused", "unknown"), loose) == ([], [], {})
    return stretches["forward"]["outside"], peak / 1e9


@pytest.mark.parametrize("weights", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("loss", LOSSES)
def test_head_and_loss_stay_within_memory_and_bytes(loss, weights):
    amount, peak = counted(LOSSES[loss], weights)
    case = loss, str(weights)
    assert peak <= HEAD_PEAK_GB[case]
    assert amount.bytes / 1e9 <= HEAD_GB[case]
    assert sum(amount.product_flops.values()) == 3 * PRODUCT  # nothing is computed twice
    if loss == "fp8":
        assert amount.product_flops == {"float8 fast": PRODUCT, "float8 exact": 2 * PRODUCT}
    else:
        assert amount.product_flops == {"bfloat16": 3 * PRODUCT}


def test_all_logits_cost_what_the_documents_say():
    amount, peak = counted(lambda h, w, t: F.cross_entropy(F.linear(h, w).float(), t), torch.bfloat16)
    assert (peak, amount.bytes / 1e9) == pytest.approx((ALL_LOGITS_PEAK_GB, ALL_LOGITS_GB), abs=0.05)


@pytest.mark.parametrize(("vocab", "head", "lines"), [(32_000, "bf16", 1), (31_999, "bf16", 0), (32_000, "chunked", 0)])
def test_a_line_says_where_the_models_own_loss_need_not_make_all_logits(vocab, head, lines, caplog):
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=vocab, **sizes))
    with caplog.at_level("INFO"):
        L.Fabric(accelerator="cuda", devices=1, plugins=HalfMixed("bf16", head=head)).setup_module(model)
    model.to("cpu")  # other tests measure peaks
    assert caplog.text.count("`head='chunked'` computes the same loss without them") == lines
