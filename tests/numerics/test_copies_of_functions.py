"""The copies of functions that compilers get compute what the functions compute."""

import torch

from lightning_lowprec.numerics.formats import encode
from lightning_lowprec.numerics.one_pass import _copied


def scaled(rows, factor=2.0, *, shift=1.0):
    return rows * factor + shift


def test_a_copy_has_the_defaults_of_the_function_and_a_code_object_of_its_own():
    for function in (scaled, encode):
        copy = _copied(function)
        assert copy.__code__ is not function.__code__
        assert copy.__name__ == function.__name__
        assert (copy.__defaults__, copy.__kwdefaults__) == (function.__defaults__, function.__kwdefaults__)
    rows = torch.ones(2, 3)
    assert torch.equal(_copied(scaled)(rows), torch.full((2, 3), 3.0))
    assert torch.equal(_copied(scaled)(rows, shift=0.0), torch.full((2, 3), 2.0))
