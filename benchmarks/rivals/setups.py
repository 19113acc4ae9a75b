"""How each rival is set up, as its documents say; heavy libraries are imported when their turn comes."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from benchmarks.rivals.models import Loss
from benchmarks.rivals.running import Job, Running, compile_blocks
from benchmarks.rivals.values import stand_in_for_nccl

HEAD = "lm_head"


def lightning(
    job: Job, *, precision: Any = None, plugin: Any = None, compiled: bool, strategy: str = "auto"
) -> Running:
    """Fabric with one of Lightning's or our own precisions; the optimizer after the module, as its documents ask."""
    import lightning as L

    import lightning_lowprec  # noqa: F401  (registers our names)

    chosen: dict[str, Any] = {"precision": precision} if plugin is None else {"plugins": plugin}
    fabric = L.Fabric(accelerator=job.device.type, devices=1, strategy=strategy, **chosen)
    fabric.launch()
    bare = job.model()
    if compiled:
        compile_blocks(bare, job)
    module = fabric.setup_module(bare)
    optimizer = fabric.setup_optimizers(job.make_optimizer(module))
    plan = getattr(fabric.strategy.precision, "plan", None)
    plan = getattr(fabric.strategy.precision, "choice", plan)  # Transformer Engine's: norms too
    notes = {} if plan is None else {"plan": plan.summary()}
    return Running(model=module, bare=bare, optimizer=optimizer, backward=fabric.backward, notes=notes)


def whole_model(job: Job, *, precision: str) -> Running:
    """Fabric over ``torch.compile(model)``: one graph for everything, a long compilation."""
    import lightning as L

    fabric = L.Fabric(accelerator=job.device.type, devices=1, precision=precision)  # type: ignore[arg-type]
    bare = job.model()
    module = fabric.setup_module(torch.compile(bare) if job.compile else bare)
    optimizer = fabric.setup_optimizers(job.make_optimizer(module))
    return Running(model=module, bare=bare, optimizer=optimizer, backward=fabric.backward)


def accelerate(job: Job, *, backend: str) -> Running:
    """Accelerate's FP8; its torchao backend with compiled blocks, since it is slow without."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from accelerate.utils import AORecipeKwargs, TERecipeKwargs

    AcceleratorState._reset_state(reset_partial_state=True)  # a singleton: another contender may have left one
    if backend == "torchao":  # its default, FP8 all-gather, is for FSDP2 and wraps every weight
        recipe: Any = AORecipeKwargs(enable_fsdp_float8_all_gather=False)
    else:
        recipe = TERecipeKwargs()
    accelerator = Accelerator(mixed_precision="fp8", kwargs_handlers=[recipe], cpu=job.device.type == "cpu")
    bare = job.model()
    model, optimizer = accelerator.prepare(bare, job.make_optimizer(bare))
    if backend == "torchao":
        compile_blocks(bare, job)
    return Running(model=model, bare=bare, optimizer=optimizer, backward=accelerator.backward)


def torchao(job: Job, *, recipe: str) -> Running:
    """torchao by hand: convert all but the head, autocast, compile the blocks."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    bare = job.model()
    config = Float8LinearConfig.from_recipe_name(recipe)
    convert_to_float8_training(bare, config=config, module_filter_fn=lambda _, fqn: fqn != HEAD)
    if job.device.type == "cpu":  # torchao asks for CUDA's autocast only
        for module in bare.modules():
            if hasattr(module, "config") and isinstance(module, nn.Linear):
                module.register_forward_pre_hook(lambda _, args: (args[0].bfloat16(),))
    compile_blocks(bare, job)
    context = functools.partial(torch.autocast, job.device.type, dtype=torch.bfloat16)
    return Running(model=bare, bare=bare, optimizer=job.make_optimizer(bare), context=context)


def te_recipe(name: str, **fields: Any) -> Any:
    """Transformer Engine's recipes by the names of this benchmark; ``fields`` of the recipe differ from its own."""
    import transformer_engine.common.recipe as recipes

    makers = {
        "delayed": recipes.DelayedScaling,
        "current": recipes.Float8CurrentScaling,
        "block": recipes.Float8BlockScaling,
    }
    return makers[name](**fields)


def transformer_engine(job: Job, *, recipe: str) -> Running:
    """Transformer Engine by hand: its Linears but for the head, its norms, both autocasts around the forward."""
    bare = job.model()
    for parent in list(bare.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and name != HEAD:
                setattr(parent, name, _te_linear(child))
            elif type(child) is nn.RMSNorm:
                setattr(parent, name, te_norm(child))
    return Running(
        model=bare,
        bare=bare,
        optimizer=job.make_optimizer(bare),
        context=both_autocasts(job, te_recipe(recipe)),
    )


def both_autocasts(job: Job, recipe: Any) -> Callable[[], ExitStack]:
    """What is entered around a forward by hand: torch's autocast and Transformer Engine's."""
    import transformer_engine.pytorch as te

    def context() -> ExitStack:
        stack = ExitStack()
        stack.enter_context(torch.autocast(job.device.type, dtype=torch.bfloat16))
        stack.enter_context(te.autocast(enabled=True, recipe=recipe))
        return stack

    return context


def te_norm(norm: nn.RMSNorm) -> nn.Module:
    import transformer_engine.pytorch as te

    weight = norm.weight
    layer: nn.Module = te.RMSNorm(norm.normalized_shape, eps=norm.eps, dtype=weight.dtype, device=weight.device)
    with torch.no_grad():
        layer.weight.copy_(weight)
    return layer


def _te_linear(linear: nn.Linear) -> nn.Module:
    import transformer_engine.pytorch as te

    weight = linear.weight
    layer: nn.Module = te.Linear(
        linear.in_features, linear.out_features, bias=False, params_dtype=weight.dtype, device=weight.device
    )
    with torch.no_grad():
        layer.weight.copy_(weight)
    return layer


def ours(job: Job, *, name: str, options: dict[str, Any] | None = None, strategy: str = "auto") -> Running:
    """A name of our table; ``options`` change the plugin that it stands for."""
    from lightning_lowprec.names import TABLE

    if strategy == "fsdp2":
        stand_in_for_nccl(job.device)
    if (options or {}).get("weights") == "keep":
        job = replace(job, weights=torch.bfloat16)
    entry = TABLE[name]
    changed = dict(options or {})
    compiles_itself = "compile" in inspect.signature(entry.plugin).parameters
    if compiles_itself and not job.compile:
        changed["compile"] = False
    plugin = entry.plugin(**{**entry.options, **changed}) if changed else None
    # half precision as Lightning's, by the user; Transformer Engine's layers are not compiled
    by_hand = not compiles_itself and not name.startswith(("fp8", "mxfp8", "nvfp4", "msamp"))
    return lightning(job, precision=name, plugin=plugin, compiled=by_hand, strategy=strategy)


def with_loss(job: Job, *, setup: Callable[[Job], Running], loss: Loss) -> Running:
    """Another contender, with a loss that is computed from hidden states."""
    return setup(replace(job, loss=loss))


def bf16_between_blocks(job: Job, *, name: str, options: dict[str, Any] | None = None) -> Running:
    """A name of ours with bf16 sums from block to block: the embedding returns bf16, the last norm gets float32."""
    running = ours(job, name=name, options=options)
    model: Any = running.bare
    model.embed.register_forward_hook(lambda module, args, out: out.bfloat16())
    model.norm.register_forward_pre_hook(lambda module, args: (args[0].float(),))
    return running
