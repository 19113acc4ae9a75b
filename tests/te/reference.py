"""A machine on which Transformer Engine's own forward and backward run without a GPU.

Transformer Engine ships quantizers in plain torch (``reference_current_scaling`` of its ``custom_recipes``). Here its
recipe ``Float8CurrentScaling`` makes these: its autograd function, its workspaces and its GEMM dispatch run as they do
on a GPU, and the products are ``torch._scaled_mm`` on CPU. Beside what :func:`pretend` answers, it is told:

* ``tensor.is_cuda`` is True where its base module or our own ``check_input`` asks;
* ``torch.cuda.is_current_stream_capturing()`` is False where it asks;
* autocast is that of CPU: it asks for CUDA's flag and dtype;
* its GEMM runs outside torch's autocast: ``torch._scaled_mm`` is one kernel on CUDA, which autocast does not touch, and
  on CPU an ``mm`` that CPU autocast would round the operands of;
* ``te.checkpoint`` keeps and restores the state of CPU's generator, which it does anyway, in the place of CUDA's too;
* codes of weights stay in the cache while a forward has saved them for its backward;
* the gradient of a bias, which its kernel computes while it quantises, is a sum of torch (``tex.bgrad_quantize``);
* scratch memory for cuBLAS (``get_cublas_workspace``), which no custom quantizer uses, and the empty tensor that
  replaces freed ones (``_empty_tensor``), are made on CPU.

No kernel, no arithmetic and no control flow of Transformer Engine is replaced.
"""

import copy
import functools
import os
import sys

os.environ["NVTE_TORCH_COMPILE"] = "0"  # read at import: its torch code for scales runs eagerly, not through inductor

import lightning as L
import torch
import transformer_engine.pytorch as te
from torch.utils.data import DataLoader
from transformer_engine.common.recipe import Float8CurrentScaling
from transformer_engine.pytorch import distributed, quantization, utils
from transformer_engine.pytorch.cpp_extensions import gemm
from transformer_engine.pytorch.custom_recipes.reference_current_scaling import (
    CurrentScalingQuantizerRef,
    CurrentScalingTensorRef,
    current_scaling_ref_factory,
)
from transformer_engine.pytorch.module import base
from transformers import LlamaConfig

from lightning_lowprec import FP8TE
from lightning_lowprec.te import layer
from lightning_lowprec.te.delayed_scaling import restore_scales
from tests.toys import ON_CPU, Stack, Task, gelu_block

ASKING = (base.__name__, layer.__name__)


def pretend(monkeypatch) -> None:
    """Transformer Engine is told of CUDA and of every recipe that Hopper has; torch and Lightning are not."""
    real = torch.cuda.is_available
    asking = ("transformer_engine.", FP8TE.__module__)

    def asked() -> bool:
        return sys._getframe(1).f_globals["__name__"].startswith(asking) or real()

    monkeypatch.setattr(torch.cuda, "is_available", asked)
    for name in ("_FP8_SUPPORT", "_FP8_BLOCK_SCALING_SUPPORT", "_NVFP4_SUPPORT"):
        monkeypatch.setattr(quantization, name, (True, ""))
    monkeypatch.setattr(FP8TE, "refusal", lambda plugin, device: None)


def take_any_input(monkeypatch) -> None:
    from lightning_lowprec.te import norms

    for module in (layer, norms):
        monkeypatch.setattr(module, "check_input", lambda input: None)


def current_scaling():
    return Float8CurrentScaling()


class Counting(CurrentScalingQuantizerRef):
    def _quantize(self, tensor):
        self.notes.append(self.layer)
        return super()._quantize(tensor)


def counting_current_scaling(notes):
    """:func:`current_scaling`; the fqn of a layer is appended to ``notes`` when its weight is quantised."""
    recipe = Float8CurrentScaling()
    recipe.notes = notes
    return recipe


def _current(state):
    """In place of ``Float8CurrentScalingRecipeState.make_quantizers``."""
    made = [current_scaling_ref_factory(role) for role in state.roles]
    for quantizer, role in zip(made, state.roles, strict=True):
        if role is not None and role.tensor_type == "weight" and hasattr(state.recipe, "notes"):
            quantizer.__class__, quantizer.notes, quantizer.layer = Counting, state.recipe.notes, role.name
    return made


def _keeps_codes(result, prepare):
    """In place of ``prepare_for_saving``: a reference's result keeps its codes. The cache of weights holds tensors on a
    GPU, which are saved as they are; results of the reference are no tensors."""
    return prepare(copy.copy(result))


def _bgrad_quantize(grad, quantizer):
    return grad.view(-1, grad.shape[-1]).sum(dim=0), quantizer(grad)


def run_on_cpu(monkeypatch) -> None:
    """Answer the questions above, until ``monkeypatch`` undoes it."""
    pretend(monkeypatch)

    def asked_by(*modules):
        return sys._getframe(2).f_globals["__name__"].startswith(modules)

    cuda, enabled = torch.Tensor.is_cuda.__get__, torch.is_autocast_enabled
    capturing = torch.cuda.is_current_stream_capturing
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda t: asked_by(*ASKING) or cuda(t)), raising=False)
    monkeypatch.setattr(
        torch.cuda, "is_current_stream_capturing", lambda: not asked_by("transformer_engine.") and capturing()
    )
    monkeypatch.setattr(
        torch,
        "is_autocast_enabled",
        lambda *device: enabled("cpu") if not device and asked_by("transformer_engine.") else enabled(*device),
    )
    monkeypatch.setattr(quantization.Float8CurrentScalingRecipeState, "make_quantizers", _current)
    saving = functools.partialmethod(_keeps_codes, CurrentScalingTensorRef.prepare_for_saving)
    monkeypatch.setattr(CurrentScalingTensorRef, "prepare_for_saving", saving)
    monkeypatch.setattr(base.tex, "bgrad_quantize", _bgrad_quantize)
    monkeypatch.setattr(base, "torch_get_autocast_gpu_dtype", lambda: torch.get_autocast_dtype("cpu"))
    monkeypatch.setattr(gemm, "custom_gemm", torch.autocast("cpu", enabled=False)(gemm.custom_gemm))
    monkeypatch.setattr(gemm, "get_cublas_workspace", lambda *_: torch.empty(0, dtype=torch.uint8))
    monkeypatch.setattr(distributed, "_get_cuda_rng_state", lambda *_, **__: torch.get_rng_state())
    monkeypatch.setattr(distributed, "_set_cuda_rng_state", lambda *_, **__: None)
    monkeypatch.setattr(utils, "_empty_tensor", lambda: torch.empty(0))


# ---- what the tests of the plugin set up

QUIET = {**ON_CPU, "max_epochs": 1}
LLAMA = LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
)


class Net(Stack):
    def __init__(self):
        super().__init__(gelu_block, 3, head=("lm_head", 32, 16), seed=0)


class Lit(Task):
    def __init__(self):
        super().__init__(Net())

    def train_dataloader(self):
        return DataLoader(torch.randn(8, 16, 32), batch_size=2)


def te_linears(model):
    return [m for m in model.modules() if isinstance(m, te.Linear)]


def fabric_for(plugin):
    return L.Fabric(accelerator="cpu", devices=1, plugins=plugin)


def some_scales(length):
    generator = torch.Generator().manual_seed(length)
    return {
        f"{mode}.{name}": torch.rand(shape, generator=generator)
        for mode, count in (("forward", 3), ("backward", 2))
        for name, shape in (("scale", (count,)), ("amax_history", (length, count)))
    }


def give_scales(model, recipe, length=4):
    for number, linear in enumerate(te_linears(model)):
        entry = {key: value + number for key, value in some_scales(length).items()}
        restore_scales([("", linear)], {"": entry}, recipe)
