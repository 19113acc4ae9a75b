"""Checkpoints: written completely or not at all, checked, and read by any precision, whole or some rows at a time."""
