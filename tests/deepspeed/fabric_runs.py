"""Runs of two ranks in Fabric, under DDP and ZeRO."""

from contextlib import nullcontext, suppress

import deepspeed
import lightning as L
import torch
from lightning.fabric.strategies import DeepSpeedStrategy

import lightning_lowprec as lp
from tests.deepspeed.models import Net, batches, loss_of, optimizer_of

STEPS = 4
REFERENCES = {
    "bf16-master": lambda: lp.HalfMixed("bf16", master_weights=True),
    "half-auto": lambda: lp.HalfMixed("auto", master_weights=True),
    "fp16-master": lambda: lp.HalfMixed("fp16", master_weights=True),
    "fp8-hybrid": lambda: lp.FP8TorchAO(master_weights=True),
    "fp8-rowwise": lambda: lp.FP8TorchAO("rowwise", master_weights=True),
    "int8-mixed": lambda: lp.Int8TorchAO(master_weights=True),
    "fp8-hybrid-fp16": lambda: lp.FP8TorchAO(base="fp16", master_weights=True),
}
"""By name, the same arithmetic without ZeRO: half-precision weights with float32 masters, under DDP."""
FEW = ["bf16-master", "fp8-hybrid", "fp8-rowwise", "fp16-master"]


def fabric_of(strategy, **how):
    fabric = L.Fabric(accelerator="cpu", devices=2, strategy=strategy, **how)
    fabric.launch()
    return fabric


def started(fabric):
    net = Net()
    return fabric.setup(net, optimizer_of(net))


def steps(fabric, model, optimizer, tokens):
    losses = []
    for batch in tokens:
        loss = loss_of(model(batch), batch)
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def weights(model):
    module = model.module
    module = getattr(module, "module", module)
    cut = any(hasattr(p, "ds_id") for p in module.parameters())
    with deepspeed.zero.GatheredParameters(list(module.parameters())) if cut else nullcontext():
        return {name: p.detach().clone() for name, p in module.named_parameters()}


def trained(strategy, **how):
    fabric = fabric_of(strategy, **how)
    model, optimizer = started(fabric)
    losses = steps(fabric, model, optimizer, batches(STEPS, fabric.global_rank))
    return {"losses": losses, "weights": weights(model)}


def resumed(stage, folder):
    name = "fp8-hybrid"
    fabric = fabric_of(f"deepspeed_stage_{stage}", precision=name)
    tokens = batches(2 * STEPS, fabric.global_rank)
    model, optimizer = started(fabric)
    steps(fabric, model, optimizer, tokens[:STEPS])
    fabric.save(folder, {"model": model, "optimizer": optimizer, "precision": fabric.strategy.precision})
    saved = weights(model)
    straight = steps(fabric, model, optimizer, tokens[STEPS:])
    again = fabric_of(f"deepspeed_stage_{stage}", precision=name)
    other, its_optimizer = started(again)
    state = {"model": other, "optimizer": its_optimizer, "precision": again.strategy.precision}
    again.load(folder, state)
    loaded = weights(other)
    in_new = steps(again, other, its_optimizer, tokens[STEPS:])
    fabric.load(folder, {"model": model, "optimizer": optimizer, "precision": fabric.strategy.precision})
    in_old = steps(fabric, model, optimizer, tokens[STEPS:])
    return {"saved": saved, "loaded": loaded, "straight": straight, "in_new": in_new, "in_old": in_old}


def kept_by_backward():
    """The tensors in memory of gathered weights that the backward of ZeRO-3 keeps, and the float8 codes."""
    fabric = fabric_of("deepspeed_stage_3", precision="fp8-hybrid")
    model, _ = started(fabric)
    layers = [module for module in model.modules() if type(module).__name__ == "FP8Linear"]
    shapes = {tuple(layer.weight.ds_shape) for layer in layers}
    places, kept, codes = set(), [], []
    for layer in layers:
        layer.register_forward_pre_hook(lambda m, _: places.add(m.weight.untyped_storage().data_ptr()))

    def note(tensor):
        shape = tuple(tensor.shape)  # other tensors take memory that was freed
        of_weight = shape in shapes or shape[::-1] in shapes
        if not isinstance(tensor, torch.nn.Parameter) and of_weight and tensor.untyped_storage().data_ptr() in places:
            kept.append(shape)
        if tensor.dtype == torch.float8_e4m3fn:
            codes.append(shape)
        return tensor

    batch = batches(1, 0)[0]
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        model(batch)
    return {"kept": kept, "codes": codes, "layers": len(layers)}


def refused_whole():
    """What functions say of each stage's model, wrapped and bare: of masters that are cut, and of weights."""
    said = {}
    needs_weights = {
        "fp8_state": lambda model: list(lp.fp8_state(model)),
        "export": lambda model: lp.export(model, "nowhere"),
    }
    for stage in (1, 2, 3):
        model, _ = started(fabric_of(f"deepspeed_stage_{stage}", precision="fp8-rowwise"))
        functions = {"plain": lp.plain, **(needs_weights if stage == 3 else {})}
        for name, function in functions.items():
            for form, given in {"wrapped": model, "bare": model.module}.items():
                try:
                    function(given)
                    said[f"{name} {stage} {form}"] = "nothing"
                except RuntimeError as error:
                    said[f"{name} {stage} {form}"] = str(error)
        if stage == 2:
            states = [{name: t.clone() for name, t in lp.fp8_state(given)} for given in (model, model.module)]
            weights = dict(model.module.named_parameters())
    return said, states, {name: weight.detach().clone() for name, weight in weights.items()}


def overflow():
    plugin = lp.HalfMixed("fp16", loss_scale=lp.LossScale(initial=2.0**8, growth_interval=2, hysteresis=1))
    fabric = fabric_of("deepspeed_stage_2", plugins=plugin)
    model, optimizer = started(fabric)
    seen = []
    for factor in (1.0, float("inf"), 1.0, 1.0, 1.0):
        batch = batches(1, 0)[0]
        fabric.backward(loss_of(model(batch), batch) * factor)
        optimizer.step()
        seen.append((fabric.strategy.model.optimizer.loss_scale, plugin.skipped_steps))
    return seen


def forward_that_raises():
    fabric = fabric_of("deepspeed_stage_2", precision="bf16-master")
    started(fabric)
    with suppress(IndexError):
        fabric.strategy.model(torch.full((1, 1), 10**6))
    return torch.is_autocast_enabled("cpu")


def main(folder):
    seen = {"reference": {name: trained("ddp", plugins=make()) for name, make in REFERENCES.items()}}
    for stage in (1, 2, 3):  # stage 3 last: DeepSpeed replaces F.linear for the rest of the process
        names = FEW if stage == 1 else REFERENCES
        seen[stage] = {name: trained(f"deepspeed_stage_{stage}", precision=name) for name in names}
        seen["resumed", stage] = resumed(stage, f"{folder}/{stage}")
    config = {
        "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}},
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
    }
    seen["offload"] = trained(DeepSpeedStrategy(config=config), precision="fp8-hybrid")
    seen["kept"] = kept_by_backward()
    seen["refused whole"] = refused_whole()
    seen["overflow"] = overflow()
    seen["autocast after an error"] = forward_that_raises()
    return seen
