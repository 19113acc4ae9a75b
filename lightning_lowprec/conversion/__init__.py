"""Decide which layers of a model convert, and check that conversion leaves the rest of the model unchanged."""
