"""The rules that keep a Linear in high precision, each with its reason."""

from collections.abc import Collection, Iterable, Iterator
from fnmatch import fnmatchcase
from typing import Final, TypeGuard

import torch
from torch import Tensor, nn

from lightning_lowprec.conversion.experts import is_stack, weight_names
from lightning_lowprec.conversion.in_place import own_class
from lightning_lowprec.conversion.matmuls import STACKED, Matmul, is_conv1d, is_linear, linears, matmuls
from lightning_lowprec.conversion.options import LayerOptions
from lightning_lowprec.conversion.recipe_map import nearest_fqns
from lightning_lowprec.private import transformers
from lightning_lowprec.private.transformers import has_parallel_forward

Blocks = nn.ModuleList | nn.Sequential
FEATURE_ALIGNMENT = 16
"""``torch._scaled_mm`` takes matrices whose inner dimensions are multiples of 16 (bytes of its 128-bit loads)."""
HEAD_NAMES = ("lm_head", "output", "head", "embed_out")
"""Last component of an output head's fqn in the model families of ``transformers``, torchtitan and timm."""
UNCAST: Final = "autocast leaves grouped products in the dtype of the weights, so cast these in the model"
"""What becomes of stacked experts whose products no precision of this package can take over."""
_UNCALLED: Final = {
    ("torchvision", "ShiftedWindowAttention"): ("qkv", "proj"),
    ("transformers", "MambaMixer"): ("dt_proj",),
    ("transformers", "FalconMambaMixer"): ("dt_proj",),
    ("transformers", "JambaMambaMixer"): ("dt_proj",),
}
"""By package and class: the Linears whose weight the class reads by ``F.linear``, so that they are never called.

In timm (BEiT, EVA, Swin v2) every class with a ``q_bias`` does so, unless it adds the bias in a step of its own.
"""


def unsupported(
    matmul: Matmul, module: nn.Module, alignment: int, converted_class: type[nn.Module] | None, experts: str | None
) -> str | None:
    """Return why this weight cannot convert under any options, or None if it can.

    Layers of ``converted_class`` were converted by an earlier plan; ``experts`` says why stacked experts cannot be.
    """
    if matmul.kind == STACKED:
        name = matmul.fqn.rpartition(".")[2]
        if experts is not None:
            return experts
        if not is_stack(module) or name not in weight_names(module):
            return f"stacked experts of an unknown class ({type(module).__name__}); {UNCAST}"
        weight = getattr(module, name)
        replaced = "forward" in vars(module) and not has_parallel_forward(module)
    else:
        if converted_class is not None and isinstance(module, converted_class):
            return None
        if not is_linear(module):
            return f"no Linear ({matmul.kind})"
        if (different := own_work(module)) is not None:
            return different
        if not hasattr(module, "weight"):  # deleted: a hypernetwork gives one to each forward
            return "it has no weight before its forward"
        weight = module.weight
        replaced = "forward" in vars(module)
    if replaced:
        return "its forward is replaced on the instance"
    if weight.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"weights of {weight.dtype}"
    return no_multiple(alignment) if matmul.in_features % alignment or matmul.out_features % alignment else None


def no_multiple(alignment: int) -> str:
    """Return the reason to keep a layer whose features the kernels do not take."""
    return f"features are no multiples of {alignment}"


def own_work(module: nn.Module) -> str | None:
    """Return why a module is not one whose work is exactly that of a Linear, or None."""
    cls = own_class(module)
    if cls is nn.Linear or transformers.is_conv1d(cls):
        return None
    if is_conv1d(module):
        return f"a subclass of Conv1D ({cls.__name__})"
    if not isinstance(module, nn.Linear):
        return f"no Linear ({cls.__name__})"
    if cls.__name__ == "NonDynamicallyQuantizableLinear":
        return "out_proj of a MultiheadAttention, which never calls it"
    computes_as_linear = (
        cls.forward is nn.Linear.forward
        and cls.__call__ is nn.Module.__call__
        and not any(name in vars(base) for base in cls.__mro__ for name in ("weight", "bias"))
    )
    if not (computes_as_linear or transformers.is_falcon_linear(cls)):
        return f"a subclass of Linear ({cls.__name__})"
    if type(module) is cls and type(module.weight) not in (nn.Parameter, Tensor):
        return f"a subclass of Linear ({cls.__name__}) whose weight is a {type(module.weight).__name__}"
    return None


def uncalled(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield the Linears of known classes of torchvision, timm and transformers that read their weight themselves."""
    for fqn, module in model.named_modules():
        for cls in type(module).__mro__:
            package = cls.__module__.partition(".")[0]
            names = _UNCALLED.get((package, cls.__name__), ())
            if package == "timm" and getattr(module, "q_bias", None) is not None:
                names = () if getattr(module, "qkv_bias_separate", False) else ("qkv",)
            for name in names:
                yield f"{fqn}.{name}".lstrip("."), f"{cls.__name__} reads its weight and never calls it"


def in_metrics(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules by fqn that only metrics of torchmetrics hold: these compute as they declare."""
    outside: set[int] = set()
    waiting = [model]
    while waiting:
        module = waiting.pop()
        classes = {(cls.__module__, cls.__name__) for cls in type(module).__mro__}
        if id(module) not in outside and ("torchmetrics.metric", "Metric") not in classes:
            outside.add(id(module))
            waiting += module.children()
    return {fqn: module for fqn, module in model.named_modules() if id(module) not in outside}


def left_alone(model: nn.Module) -> set[str]:
    """Return the parameters and buffers, by fqn, that no cast changes: of metrics, float64 and complex ones."""
    inside = in_metrics(model).items()
    left = {f"{fqn}.{name}" for fqn, module in inside for name in (*module._parameters, *module._buffers)}
    tensors = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return left.union(fqn for fqn, tensor in tensors if tensor.dtype is torch.float64 or tensor.is_complex())


def built_in(model: nn.Module) -> dict[str, str]:
    """Return what only ``only`` can convert, by fqn: output heads, and layers that FP8 would harm.

    Routers, and gates beside experts, would send tokens to other experts. PEFT's low-rank adapters are too narrow to
    gain, and the only weights that train.
    """
    kept = {}
    for fqn in linears(model):
        if any(part.startswith("lora_") for part in fqn.split(".")):
            kept[fqn] = "LoRA adapter"
        elif (reason := router(model, fqn)) is not None:
            kept[fqn] = reason
    return kept | output_heads(model)


def output_heads(model: nn.Module) -> dict[str, str]:
    """Return the output heads by fqn, with the rule that found them.

    The first rule that finds a head decides: ``get_output_embeddings()``; a weight tied to an Embedding; an fqn ending
    in one of ``HEAD_NAMES``. No rule takes the last Linear, which in many models is an ordinary layer.
    """
    candidates = linears(model)
    getters = (getattr(module, "get_output_embeddings", None) for module in model.modules())
    declared = {id(getter()) for getter in getters if callable(getter)}
    heads = {fqn: "output head (get_output_embeddings())" for fqn, m in candidates.items() if id(m) in declared}
    if not heads:
        embeddings = {id(m.weight): fqn for fqn, m in model.named_modules() if isinstance(m, nn.Embedding)}
        tied = {fqn: embeddings.get(id(linear._parameters.get("weight"))) for fqn, linear in candidates.items()}
        heads = {f: f"output head (tied to the embedding {name!r})" for f, name in tied.items() if name is not None}
    return heads or {fqn: "output head (by name)" for fqn in candidates if fqn.rpartition(".")[2] in HEAD_NAMES}


def router(model: nn.Module, fqn: str) -> str | None:
    """Return the reason why a module is taken for the router of a mixture, or for a part of one; None: it is not."""
    *path, name = fqn.split(".")
    if any(part == "router" or part.endswith("_router") for part in (*path, name)):
        return "router (by name)"
    if name == "gate" or name.endswith("_gate"):
        siblings = dict(model.get_submodule(".".join(path)).named_children())
        if any("expert" in sibling for sibling in siblings):
            return "gate beside experts"
    return None


def by_user(model: nn.Module, options: LayerOptions) -> dict[str, str]:
    """Return the Linears and stacked experts that ``keep``, ``only`` and the first/last options keep, with reasons."""
    choosable: dict[str, nn.Module] = {
        **linears(model),
        **{m.fqn: module for m, module in matmuls(model) if m.kind == STACKED},
    }
    kept: dict[str, str] = {}
    if options.only is not None:
        chosen = {fqn for pattern in options.only for fqn in _matching("only", pattern, choosable)}
        kept |= {fqn: "not in `only`" for fqn in choosable if fqn not in chosen}
    if options.first_last_layers_bf16:
        start, end = options.num_layers_at_start_in_bf16, options.num_layers_at_end_in_bf16
        stacks = [list(stack) for stack in block_stacks(model, having=choosable.values(), of_one=False).values()]
        if not stacks:
            raise ValueError(
                "`first_last_layers_bf16=True` needs a stack of blocks (children of one class in an nn.ModuleList"
                " or nn.Sequential), and the model has none; name the layers with `keep=[...]` instead."
            )
        blocks = [block for stack in stacks for block in (*stack[:start], *stack[max(len(stack) - end, 0) :])]
        inside = {id(module) for block in blocks for module in block.modules()}
        ends = [fqn for fqn, module in choosable.items() if id(module) in inside]
        kept |= dict.fromkeys(ends, "first or last block (first_last_layers_bf16)")
    for pattern in options.keep:
        kept |= dict.fromkeys(_matching("keep", pattern, choosable), f"kept by {pattern!r}")
    return kept


def _matching(field: str, pattern: str, fqns: Collection[str]) -> list[str]:
    """Return the fqns that a name or pattern matches (see :func:`matches`); raise if there is none."""
    matched = [fqn for fqn in fqns if matches(pattern, fqn)]
    if not matched:
        raise ValueError(
            f"`{field}={pattern!r}` matches no Linear of the model; {nearest_fqns(pattern, fqns)}. Give part of an fqn"
            " ('lm_head', 'blocks.0') or a pattern ('*.mlp.*')."
        )
    return matched


def matches(pattern: str, fqn: str) -> bool:
    """Return whether a name (whole components: ``"blocks.0"``) or pattern (``"*.mlp.*"``) matches ``fqn``."""
    if any(c in pattern for c in "*?["):
        return fnmatchcase(fqn, pattern)
    return f".{pattern}." in f".{fqn}."


def block_stacks(model: nn.Module, having: Iterable[nn.Module], *, of_one: bool = True) -> dict[str, Blocks]:
    """Return the outermost lists of several children of one class that hold a module of ``having``, by fqn.

    Lists are ModuleLists, and the Sequentials whose children are larger modules (timm has its blocks there). With
    ``of_one`` also the ModuleLists of one child that neither hold such a list nor lie in one.
    """
    wanted = set(map(id, having))
    lists = {fqn: module for fqn, module in model.named_modules() if _is_list(module)}
    lists = {fqn: stack for fqn, stack in lists.items() if any(id(inner) in wanted for inner in stack.modules())}
    stacks: dict[str, Blocks] = {}
    for fqn, stack in lists.items():  # outer ones come before inner ones
        one_class = len(stack) > 1 and len({type(child) for child in stack}) == 1
        if one_class and not any(_is_inside(fqn, outer) for outer in stacks):
            stacks[fqn] = stack
    for fqn, stack in lists.items() if of_one else ():
        if len(stack) == 1 and not any(_is_inside(fqn, other) or _is_inside(other, fqn) for other in stacks):
            stacks[fqn] = stack
    return stacks


def _is_list(module: nn.Module) -> TypeGuard[Blocks]:
    if isinstance(module, nn.Sequential):
        large = (type(child) is not nn.Sequential and any(child.children()) for child in module)
        return len(module) > 1 and all(large)
    return isinstance(module, nn.ModuleList)


def _is_inside(fqn: str, outer: str) -> bool:
    return not outer or f"{fqn}.".startswith(f"{outer}.")
