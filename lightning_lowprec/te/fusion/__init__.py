"""Compute norms, linear layers, MLPs and experts by single calls of Transformer Engine; no module or Parameter moves.

    fusion = fuse(model, may_convert=plan.converted)      # in place
    print(fusion.summary())
    unfuse(model)                                          # undo it
    add_places(Place(layer="my_package.Block", ...))       # recognise decoder layers of the user's own

State dicts, the order and count of ``parameters()``, optimizers, ties and sharding stay the same. Importing this
package imports no Transformer Engine; :func:`fuse` does.
"""

from lightning_lowprec.te.fusion.apply import engines, fuse, fused_modules, unfuse
from lightning_lowprec.te.fusion.candidates import Place, add_places
from lightning_lowprec.te.fusion.plan import Fusion, FusionRow, plan_fusion

__all__ = ["Fusion", "FusionRow", "Place", "add_places", "engines", "fuse", "fused_modules", "plan_fusion", "unfuse"]
