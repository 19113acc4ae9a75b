"""Transformer Engine's ONNX path: its modules in plain torch, on CPU. Its GEMM lacks a derivative; it is added here."""

from contextlib import contextmanager

from transformer_engine.pytorch.export import onnx_export
from transformer_engine.pytorch.onnx_extensions import torch_onnx_gemm_inf_op

from lightning_lowprec.te.fusion import engines


def _save(ctx, inputs, output):
    weight, rows, bias = inputs
    ctx.save_for_backward(weight, rows)
    ctx.has_bias = bias is not None


def _backward(ctx, grad_output):
    # output = rows @ weight.T + bias: [M, K] @ [K, N] -> [M, N]
    weight, rows = ctx.saved_tensors
    return grad_output.T @ rows, grad_output @ weight, grad_output.sum(0) if ctx.has_bias else None


torch_onnx_gemm_inf_op.register_autograd(_backward, setup_context=_save)


@contextmanager
def plain_torch(model):
    """Forward and backward of the fused parts of ``model`` run in plain torch."""
    for engine in engines(model).values():
        engine.forwarded_at_least_once = True
    with onnx_export(True):
        yield
