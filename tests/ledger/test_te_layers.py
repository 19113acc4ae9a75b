"""Blocks of Transformer Engine's own, ``te.TransformerLayer``: by hand, and in a model under ``FP8TE``."""

import lightning as L

from benchmarks.ledger.step import measure
from benchmarks.rivals import models
from benchmarks.rivals.models import TOY
from benchmarks.rivals.te_layers import use_te_layers
from lightning_lowprec import FP8TE

BLOCK_WEIGHTS = 2 * TOY.hidden * (TOY.hidden + TOY.kv_heads * TOY.head_dim) + 3 * TOY.hidden * TOY.ffn
TOKENS = 2 * TOY.sequence


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
