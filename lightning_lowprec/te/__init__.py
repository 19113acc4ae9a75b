"""Transformer Engine's layers in the place of torch's: the recipes, the layers, their state; no Lightning.

Importing this package imports no Transformer Engine; its modules do.
"""
