"""Record every matrix product of a training step: its operation, the dtypes of its factors, and why it is float32."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.module_tracker import ModuleTracker

from lightning_lowprec.conversion import backends
from tests.families.tiny import batch, loss_of

WORDS = ("mm", "mv", "matmul", "dot", "conv", "attention", "linear", "rnn", "lstm", "gru", "triangular")
OTHER_WORK = ("upsample", "comm", "cumm", "convert", "conv_tbc_", "attention_mask", "dropout", "logsumexp", "_softmax")
MATH_ATTENTION = "scaled_dot_product_attention"
"""Its kernel for shapes that no fused kernel takes computes in float32, by torch's choice
(``torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp``)."""


@dataclass(frozen=True)
class Product:
    op: str
    dtypes: tuple[torch.dtype, ...]
    shapes: tuple[tuple[int, ...], ...]
    module: str
    """The fqn of the innermost module that runs; without meaning in the backward pass."""
    backward: bool
    autocast: bool
    """Whether autocast was on where the model called the operation."""
    called: str
    """What the model called: ``torch.nn.functional.linear``."""

    @property
    def float32(self) -> bool:
        return torch.float32 in self.dtypes

    @property
    def by_request(self) -> bool:
        """Whether float32 is the choice of the model (autocast is off) or of torch (see ``MATH_ATTENTION``)."""
        return not self.autocast or MATH_ATTENTION in self.called or "linalg" in self.called

    def __str__(self) -> str:
        dtypes = ", ".join(str(dtype).removeprefix("torch.") for dtype in self.dtypes)
        return f"{self.module}: {self.op} ({dtypes}) {self.shapes} by {self.called}"


class Calls(TorchFunctionMode):
    """Note what the model calls, and whether autocast is on there: below, an operation looks as if it were off."""

    def __init__(self) -> None:
        super().__init__()
        self.called, self.autocast = "", False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.called, self.autocast = resolve_name(func) or str(func), torch.is_autocast_enabled("cpu")
        return func(*args, **(kwargs or {}))


class Products(TorchDispatchMode):
    """Record the products of everything that runs inside."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.rows: list[Product] = []
        self.own = {fqn for fqn, module in model.named_modules() if backends.owner(module) is not None}
        self._modules = ModuleTracker()
        self._calls = Calls()

    def __enter__(self) -> Products:
        self._modules.__enter__()
        self._calls.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._calls.__exit__(*error)
        self._modules.__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.split("::")[1]
        if any(word in name for word in WORDS) and not any(word in name for word in OTHER_WORK):
            factors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            factors = [leaf for leaf in factors if leaf.is_floating_point()][: 4 if "attention" in name else 3]
            fqn = max(self._modules.parents, key=len).removeprefix("_FabricModule.").removeprefix("_forward_module.")
            self.rows.append(
                Product(
                    func._schema.name,
                    tuple(factor.dtype for factor in factors),
                    tuple(tuple(factor.shape) for factor in factors),
                    fqn,
                    self._modules.is_bw,
                    self._calls.autocast,
                    self._calls.called,
                )
            )
        return func(*args, **(kwargs or {}))

    def faults(self) -> list[str]:
        """Return the float32 products that nobody asked for, outside of this package's own layers."""
        outside = [row for row in self.rows if not any(f"{row.module}.".startswith(f"{own}.") for own in self.own)]
        forward = [row for row in outside if row.float32 and not row.backward]
        return [str(row) for row in forward if not row.by_request]

    def backward_surplus(self) -> int:
        """Return how many more float32 products the backward pass has than those of the forward pass explain."""
        float32 = [row for row in self.rows if row.float32]
        return sum(row.backward for row in float32) - 2 * sum(not row.backward for row in float32)


def step(model: nn.Module, name: str) -> Products:
    fabric = L.Fabric(precision=name, accelerator="cpu")
    wrapped, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    with Products(model) as products:
        fabric.backward(loss_of(wrapped(**batch(model))))
    optimizer.step()
    return products
