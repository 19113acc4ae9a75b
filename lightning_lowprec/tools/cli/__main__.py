"""``python -m lightning_lowprec.tools.cli``: the ``lowprec`` command without its script."""

import sys

from lightning_lowprec.tools.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
