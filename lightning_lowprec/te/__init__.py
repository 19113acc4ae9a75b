"""Layers of Transformer Engine in the place of torch's: recipes, layers, norms, the state of scales."""
