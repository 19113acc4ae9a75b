"""The private name of argparse that this package reads: the options of a parser that another function has built."""

from __future__ import annotations

import argparse

from lightning_lowprec.private.names import missing

USED = ("argparse.ArgumentParser()._actions",)


def actions(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """Return options and arguments of a parser, in their order."""
    found: list[argparse.Action] = parser._actions
    return found


def moved() -> list[str]:
    """Return the names that this Python no longer has."""
    return missing(USED)
