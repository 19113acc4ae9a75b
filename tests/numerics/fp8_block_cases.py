"""Rows of every kind of value, and what their blocks become by the formula, one block at a time."""

import math

import torch

BLOCK = 128
SIZES = (1, 127, 128, 129, 300, 4096 + 128 + 5)
ODD = (0.0, -0.0, 1e-38, -3e-39, 2.0**-30, 448.0, -1e30, 3e38)


def rows(n, dtype=torch.float32):
    """Three rows of (n,): of one magnitude, of magnitudes that differ by 2**30, and of zeros with odd numbers."""
    generator = torch.Generator().manual_seed(n)
    values = torch.randn(3, n, generator=generator)
    values[1] *= torch.exp2(torch.randint(-22, 9, (n,), generator=generator).float())
    values[2] = 0
    odd = [x for x in ODD if abs(x) <= torch.finfo(dtype).max][: max(n // 2, 1)]
    values[2, : len(odd)] = torch.tensor(odd)
    return values.to(dtype)


def with_lost_numbers(n, dtype=torch.float32):
    """The same rows with inf in the first block of row 0, and NaN beside inf in the last block of row 1."""
    values = rows(n, dtype)
    values[0, 0] = -math.inf
    values[1, -1] = math.nan
    if n % BLOCK > 1:
        values[1, -2] = math.inf
    return values


def nearest(value):
    """The float8_e4m3fn number that is nearest to ``value``, ties to even; from the definition of the format."""
    numbers = [m * 2.0**-9 for m in range(8)]
    numbers += [(1 + m / 8) * 2.0**e for e in range(-6, 9) for m in range(8)][:-1]  # the last one is NaN
    size = min(abs(value), 448.0)
    best = min(range(len(numbers)), key=lambda i: (abs(numbers[i] - size), i % 2))
    return math.copysign(numbers[best], value)
