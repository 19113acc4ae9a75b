"""``lowprec export --format``: checkpoints to folders that servers load, and their check."""
