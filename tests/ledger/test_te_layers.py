"""Blocks of Transformer Engine's own, ``te.TransformerLayer``: by hand, and in a model under ``FP8TE``."""

import lightning as L
import pytest

from benchmarks.ledger.step import measure
from benchmarks.rivals import models
from benchmarks.rivals.contenders import TE_LAYERS, find
from benchmarks.rivals.models import TOY
from benchmarks.rivals.te_layers import use_te_layers
from lightning_lowprec import FP8TE

BLOCK_WEIGHTS = 2 * TOY.hidden * (TOY.hidden + TOY.kv_heads * TOY.head_dim) + 3 * TOY.hidden * TOY.ffn
TOKENS = 2 * TOY.sequence


@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_every_product_of_the_blocks_is_in_fp8(recipe):
    """6 FLOPs per weight and token: all but the head's in float8, twelve products per block."""
    found = measure("", find(f"{TE_LAYERS} {recipe}").setup, TOY)
    flops = found.whole().product_flops
    assert flops.pop("bfloat16") == 6 * TOY.hidden * TOY.vocab * TOKENS
    assert set(flops) == {"float8 fast", "float8 exact"}
    assert sum(flops.values()) == 6 * BLOCK_WEIGHTS * TOY.layers * TOKENS
    assert found.per_block("products") == 12
    attention = 7 * 2 * (TOY.sequence**2 * TOY.hidden * 2) // 2
    assert found.per_block("attention_flops") == attention
    assert (found.waits, found.refused, found.loose) == ([], [], {})
    largest = sum("11amax_kernel" in name for name in found.kernels)
    assert largest == (9 * TOY.layers if recipe == "current" else 0), (
        "4 weights, 1 input, 4 gradients: the page's reads"
    )


def test_they_run_in_fp8_in_a_model_under_our_plugin():
    """The way out that docs/speed.md names."""

    def setup(job):
        from benchmarks.rivals.running import Running

        fabric = L.Fabric(accelerator="cuda", devices=1, plugins=FP8TE())
        bare = models.build(TOY, job.device)
        use_te_layers(bare)
        module = fabric.setup_module(bare)
        optimizer = fabric.setup_optimizers(job.make_optimizer(module))
        return Running(model=module, bare=bare, optimizer=optimizer, backward=fabric.backward)

    flops = measure("", setup, TOY).whole().product_flops
    assert sum(flops[which] for which in ("float8 fast", "float8 exact")) == 6 * BLOCK_WEIGHTS * TOY.layers * TOKENS
