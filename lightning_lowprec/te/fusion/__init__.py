"""Norms, linear layers, MLPs and experts as single calls of Transformer Engine; every module stays where it is.

    fusion = fuse(model, may_convert=plan.converted)      # in place
    print(fusion.summary())
    unfuse(model)                                          # what it was

Nothing is renamed and no Parameter moves: state dicts, the order and count of ``parameters()``, optimizers, ties and
sharding do not know about fusion. Importing this package imports no Transformer Engine; ``fuse`` does.
"""

from lightning_lowprec.te.fusion.apply import engines, fuse, fused_modules, plan_fusion, unfuse
from lightning_lowprec.te.fusion.report import Fusion, FusionRow

__all__ = ["Fusion", "FusionRow", "engines", "fuse", "fused_modules", "plan_fusion", "unfuse"]
