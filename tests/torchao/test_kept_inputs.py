"""What a layer keeps of its input for the backward: nothing without need, and codes in compiled blocks."""

import lightning as L
import pytest
import torch
from torch import nn

from lightning_lowprec import FP8TorchAO


class Siblings(nn.Module):
    """Three layers that read one input."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.parts = nn.ModuleList(nn.Linear(64, n) for n in (64, 32, 32))

    def forward(self, x):
        return torch.cat([part(x) for part in self.parts], dim=-1)


def converted(net):
    """The bare model, to be called with the tensor itself: the wrapper casts inputs. And the context of a forward."""
    fabric = L.Fabric(accelerator="cpu", devices=1, plugins=FP8TorchAO(weight_codes="per_gemm"))
    fabric.setup_module(net)
    return net, fabric.autocast


def inputs(rows, dtype=torch.float32):
    return torch.randn(rows, 64, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()


class Saved:
    """The storages that autograd keeps between forward and backward, without those of ``model``."""

    def __init__(self, model):
        self._held = {}
        self._own = {p.untyped_storage()._cdata for p in model.parameters()}

    def hooks(self):
        return torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)

    def _pack(self, tensor):
        self._held[tensor.untyped_storage()._cdata] = tensor
        return tensor

    def held(self):
        return [tensor for key, tensor in self._held.items() if key not in self._own]

    def bytes(self):
        return sum(tensor.untyped_storage().nbytes() for tensor in self.held())


@pytest.mark.parametrize("rows", [64, 21])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_siblings_keep_their_input_in_bf16(rows, dtype):
    """The cast of a float32 input makes a copy for each layer; a bf16 input is shared."""
    model, autocast = converted(Siblings())
    found = Saved(model)
    with autocast(), found.hooks():
        model(inputs(rows, dtype))
    copies = 1 if dtype == torch.bfloat16 else 3
    assert found.bytes() == copies * 2 * rows * 64


def test_compiled_siblings_keep_one_tensor_of_codes():
    """The compiler finds that the three layers compute the same codes, and keeps codes in place of values."""
    model, autocast = converted(Siblings())
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    found = Saved(model)
    with autocast(), found.hooks():
        compiled(inputs(64))
    kept = [(t.dtype, t.numel()) for t in found.held() if t.ndim]
    assert kept == [(torch.float8_e4m3fn, 64 * 64)]


def test_a_frozen_weight_keeps_nothing_of_its_input():
    """As under LoRA, whose base layers do not train."""
    model, autocast = converted(Siblings().requires_grad_(False))
    x = inputs(16)
    found = Saved(model)
    with autocast(), found.hooks():
        out = model(x)
    assert found.bytes() == 0
    out.sum().backward()
    assert x.grad is not None
