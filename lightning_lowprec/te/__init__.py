"""Layers of Transformer Engine in the place of torch's: recipes, layers, norms, the state of scales.

Importing this package imports no Transformer Engine; its modules ``layer`` and ``norms`` do.
"""
