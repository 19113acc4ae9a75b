"""The texts of ``lowprec`` without a command: which command answers what, and what an exit status means."""

from __future__ import annotations

import textwrap
from typing import Final

GUIDE: Final = (
    ("Which precisions run on this machine?", "lowprec doctor"),
    ("Does one precision run here?", "lowprec doctor --for fp8-hybrid"),
    ("Which layers of my model convert?", "lowprec plan my.Model"),
    ("Which precisions fit into my GPU?", "lowprec plan my.Model --fits H200"),
    ("Does a precision cost me loss?", "lowprec compare --model my.Model --data my.Data"),
    ("Train a LightningModule", "lowprec fit --model my.Model --trainer.precision fp8-hybrid"),
    ("Train by a script of my own", "lowprec run --precision fp8-hybrid train.py"),
    ("Which layers does FP8 serve worst?", "lowprec monitor RUN"),
    ("Write plain weights", "lowprec export last.ckpt weights.safetensors"),
    ("Report a bug", "lowprec doctor --report"),
)
"""What a user wants, and the command for it."""
STOPPED: Final = 130
READER_ENDED: Final = 141
EXIT_CODES: Final = {
    0: "the command has done its work, and the answer is yes",
    1: "the answer is no: the precision does not run here, nothing converts or fits, a comparison or check failed;"
    " or an error of your own code under fit and run",
    2: "wrong arguments, or an input that is missing or cannot be read; nothing was changed",
    STOPPED: "stopped by Ctrl-C",
    READER_ENDED: "the program that reads the output has ended, such as head",
}
"""What the exit status of a command means. ``run`` hands on the exit status of the script."""


def guide(version: str) -> str:
    """Return the text that ``lowprec`` prints without arguments."""
    width = max(len(question) for question, _ in GUIDE)
    lines = [f"lowprec {version}: low-precision training for Lightning and Fabric", ""]
    lines += [f"  {question:<{width}}  {command}" for question, command in GUIDE]
    lines += ["", "`lowprec --help` lists commands and exit codes, `lowprec COMMAND --help` the options of a command."]
    return "\n".join(lines)


def exit_codes() -> str:
    """Return the exit codes as lines for ``--help``."""
    lines = [
        textwrap.fill(meaning, 100, initial_indent=f"  {code:<5}", subsequent_indent=" " * 7)
        for code, meaning in EXIT_CODES.items()
    ]
    return "\n".join(["exit codes:", *lines, "  `lowprec run` ends with the exit code of the script."])
