"""Lets the garbage collector look at less, in processes of tests; importing this file does so.

torch, its compiler and Lightning make millions of objects that stay: looking at all of them takes 0.1 to 0.4 s each
time, and while code is compiled Python would look every second. Tests that need garbage to be gone collect it.
"""

import gc


def leave_what_is_there() -> None:
    """Hide all objects from the garbage collector; let it look at later ones ten times less often."""
    gc.set_threshold(7_000, 10, 10)
    gc.collect()
    gc.freeze()


leave_what_is_there()
