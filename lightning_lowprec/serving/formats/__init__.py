"""The formats, one file each; `base.py` says what a format is, `registry.py` lists them."""
