"""MS-AMP's AdamW by its specification: one parameter after the other, nothing shared with the package."""

import math

import torch

FMAX = {torch.float8_e4m3fn: 448.0, torch.float16: 65504.0}


def quantise(x, dtype, old=1.0):
    """Codes and scale; the scale is 2**floor(log2(FMAX / amax)), and the old one at amax 0."""
    amax = x.abs().max().item()
    scale = old
    if 0 < amax < math.inf:
        _, exponent = math.frexp(FMAX[dtype] / amax)  # float64: amax and FMAX have 24 bits
        scale = 2.0 ** (exponent - 1)
    return (x * scale).clamp(-FMAX[dtype], FMAX[dtype]).to(dtype), scale


def value(coded):
    codes, scale = coded
    return codes.float() / scale


class Reference:
    def __init__(self, start, level):
        self.level, self.t = level, 0
        self.master = quantise(start, torch.float16)
        self.weight = quantise(value(self.master), torch.float8_e4m3fn) if level == "O3" else self.master
        zeros = torch.zeros_like(start)
        self.m = zeros if level == "O1" else (zeros.to(torch.float8_e4m3fn), 1.0)
        self.v = zeros if level == "O1" else (zeros.to(torch.float16), 1.0)

    def step(self, g, lr, betas, eps, weight_decay, coupled=False):
        self.t += 1
        m, v = (self.m, self.v) if self.level == "O1" else (value(self.m), value(self.v))
        w = value(self.master)
        if coupled:
            g = g + w * weight_decay
        else:
            w = w * (1 - lr * weight_decay)
        m = m * betas[0] + g * (1 - betas[0])
        v = v * betas[1] + g * g * (1 - betas[1])
        w = w - m / (1 - betas[0] ** self.t) / ((v / (1 - betas[1] ** self.t)).sqrt() + eps) * lr
        self.master = quantise(w, torch.float16, self.master[1])
        if self.level == "O1":
            self.m, self.v, self.weight = m, v, self.master
            return
        self.m = quantise(m, torch.float8_e4m3fn, self.m[1])
        self.v = quantise(v, torch.float16, self.v[1])
        self.weight = self.master
        if self.level == "O3":
            self.weight = quantise(value(self.master), torch.float8_e4m3fn, self.weight[1])
