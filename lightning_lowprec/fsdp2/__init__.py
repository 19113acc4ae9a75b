"""Shard a model by torch's FSDP2 in every precision, with weights gathered in FP8."""
