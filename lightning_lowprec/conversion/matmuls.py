"""Every weight of a model that is multiplied with the tokens: Linears, and what does a Linear's work otherwise."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True, kw_only=True)
class Matmul:
    """One weight and its shape as ``[tokens, in_features] @ [in_features, out_features]``."""

    fqn: str
    module: nn.Module
    kind: str
    """``"Linear"`` or, if it is something else, what."""
    in_features: int
    out_features: int
    per_token: float = 1.0
    """How many such products a token takes part in: 2 for the experts of a mixture that sends it to 2."""
    stored: int = 1
    """How many weights of this shape there are: the number of experts."""


def linears(model: nn.Module) -> dict[str, nn.Linear]:
    """Every Linear of the model (subclasses too) by fqn, in the order of ``named_modules``; a root Linear is ``""``."""
    return {fqn: module for fqn, module in model.named_modules() if isinstance(module, nn.Linear)}


def matmuls(model: nn.Module) -> list[Matmul]:
    """All of them, in the order of ``named_modules``."""
    found: list[Matmul] = []
    for fqn, module in model.named_modules():
        if isinstance(module, nn.Linear):
            found.append(
                Matmul(
                    fqn=fqn, module=module, kind="Linear",
                    in_features=module.in_features, out_features=module.out_features,
                )
            )  # fmt: skip
        else:
            found += _others(model, fqn, module)
    return found


def _others(model: nn.Module, fqn: str, module: nn.Module) -> list[Matmul]:
    name = type(module).__name__
    weight = module._parameters.get("weight")
    if name == "Conv1D" and weight is not None and weight.dim() == 2:  # transformers' GPT-2: weight is [in, out]
        k, n = weight.shape
        return [Matmul(fqn=fqn, module=module, kind="Conv1D", in_features=k, out_features=n)]
    if name.endswith("Router") and weight is not None and weight.dim() == 2:
        n, k = weight.shape
        return [Matmul(fqn=fqn, module=module, kind="router", in_features=k, out_features=n)]
    if "expert" not in fqn.rpartition(".")[2].lower():
        return []
    parent = model.get_submodule(fqn.rpartition(".")[0])
    choices = (getattr(m, "top_k", None) for m in (parent, *parent.children()))
    top_k = next((value for value in choices if isinstance(value, int)), None)
    stacks = {n: p for n, p in module._parameters.items() if p is not None and p.dim() == 3}
    return [
        Matmul(
            fqn=f"{fqn}.{parameter}", module=module, kind="stacked experts", in_features=p.shape[2],
            out_features=p.shape[1], stored=p.shape[0], per_token=float(top_k or p.shape[0]),
        )
        for parameter, p in stacks.items()
    ]  # fmt: skip
