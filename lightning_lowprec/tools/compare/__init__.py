"""What `lowprec compare` does: one model, the same data, the same seed, several precisions, side by side."""
