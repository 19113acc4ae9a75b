"""The three matrix products of a layer. Begin with `linear.py`; a number format is a file beside it."""
