"""Decide which layers of a model convert, and check that conversion keeps the model's promises."""
