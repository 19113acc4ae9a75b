"""The logic of ``lowprec plan``: a model from a source, on the meta device, and what FP8 means for it."""
