"""Layers of Transformer Engine in the place of torch's: recipes, layers, norms, the state of scales, fusion.

Importing this package imports no Transformer Engine. Of its modules, ``linear``, ``norms``, ``fusion.units`` and
``fusion.experts`` import it.
"""
