"""What two ranks do under ZeRO, in Fabric and in the Trainer, and what must come of it: every part on both ranks."""

import pickle
from contextlib import nullcontext, suppress
from functools import cache

import deepspeed
import lightning as L
import pytest
import torch
import torch.distributed as dist
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from lightning.fabric.strategies import DeepSpeedStrategy as FabricDeepSpeed
from lightning.pytorch.strategies import DeepSpeedStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException

import lightning_lowprec as lp
from tests.deepspeed.models import Net, Task, batches, loss_of, optimizer_of
from tests.fsdp2.models import same
from tests.toys import ON_CPU, stepped

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
HALF = ("bf16-master", "half-auto", "fp16-master")
FEW = ("bf16-master", "fp8-hybrid", "fp8-rowwise", "fp16-master")


def fabric_of(strategy, **how):
    fabric = L.Fabric(accelerator="cpu", devices=2, strategy=strategy, **how)
    fabric.launch()
    return fabric


def started(fabric):
    net = Net()
    return fabric.setup(net, optimizer_of(net))


def steps(fabric, model, optimizer, tokens):
    return stepped(fabric, optimizer, (loss_of(model(batch), batch) for batch in tokens))


def weights(module):
    module = getattr(module, "module", module)
    cut = any(hasattr(p, "ds_id") for p in module.parameters())
    with deepspeed.zero.GatheredParameters(list(module.parameters())) if cut else nullcontext():
        return {name: p.detach().clone() for name, p in module.named_parameters()}


def trained(strategy, **how):
    fabric = fabric_of(strategy, **how)
    model, optimizer = started(fabric)
    losses = steps(fabric, model, optimizer, batches(STEPS, fabric.global_rank))
    return losses, weights(model.module)


@cache
def reference(name):
    losses, values = trained("ddp", plugins=REFERENCES[name]())
    assert losses[-1] < losses[0] - 0.2
    return losses, values


def zero_trains_as_ddp_with_float32_masters_bit_for_bit(folder, stage, name):
    losses, values = trained(f"deepspeed_stage_{stage}", precision=name)
    expected, exact = reference(name)
    if stage == 3 and name in HALF:  # DeepSpeed's own `linear` rounds the product before it adds the bias
        assert losses == pytest.approx(expected, abs=2e-3)
        return
    assert losses == expected
    assert same(values, exact)


def offloaded_weights_and_optimizer_give_the_same(folder):
    config = {
        "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}},
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
    }
    losses, values = trained(FabricDeepSpeed(config=config), precision="fp8-hybrid")
    expected, exact = trained("deepspeed_stage_3", precision="fp8-hybrid")
    assert losses == expected
    assert same(values, exact)


def fabric_resumes_bit_for_bit(folder, stage):
    """Train, save in the middle, go on; load into a new engine and into the old one, and go on from there."""
    path, name = folder / f"fabric-{stage}", "fp8-hybrid"
    fabric = fabric_of(f"deepspeed_stage_{stage}", precision=name)
    tokens = batches(2 * STEPS, fabric.global_rank)
    model, optimizer = started(fabric)
    steps(fabric, model, optimizer, tokens[:STEPS])
    state = {"model": model, "optimizer": optimizer, "precision": fabric.strategy.precision}
    fabric.save(path, state)
    saved = weights(model.module)
    straight = steps(fabric, model, optimizer, tokens[STEPS:])
    again = fabric_of(f"deepspeed_stage_{stage}", precision=name)
    other, its_optimizer = started(again)
    again.load(path, {"model": other, "optimizer": its_optimizer, "precision": again.strategy.precision})
    assert same(weights(other.module), saved)
    assert steps(again, other, its_optimizer, tokens[STEPS:]) == straight
    fabric.load(path, state)
    in_old = steps(fabric, model, optimizer, tokens[STEPS:])
    assert in_old == straight, "codes of the weights before loading were used again"


def zero_3_keeps_neither_gathered_weights_nor_codes(folder):
    """For the backward."""
    fabric = fabric_of("deepspeed_stage_3", precision="fp8-hybrid")
    model, _ = started(fabric)
    layers = [module for module in model.modules() if type(module).__name__ == "FP8Linear"]
    assert len(layers) == 2
    shapes = {tuple(layer.weight.ds_shape) for layer in layers}
    places, kept = set(), []
    for layer in layers:
        layer.register_forward_pre_hook(lambda m, _: places.add(m.weight.untyped_storage().data_ptr()))

    def note(tensor):
        shape = tuple(tensor.shape)  # other tensors take memory that was freed
        of_weight = shape in shapes or shape[::-1] in shapes
        gathered = not isinstance(tensor, torch.nn.Parameter) and tensor.untyped_storage().data_ptr() in places
        if (of_weight and gathered) or tensor.dtype == torch.float8_e4m3fn:
            kept.append((shape, tensor.dtype))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        model(batches(1, 0)[0])
    assert kept == []


def what_needs_whole_weights_names_zero_to_fp32(folder, stage):
    """Masters are cut at every stage, weights at the third."""
    model, _ = started(fabric_of(f"deepspeed_stage_{stage}", precision="fp8-rowwise"))
    for given in (model, model.module):
        message = "needs whole weights in float32, and DeepSpeed's ZeRO has cut them.*zero_to_fp32"
        with pytest.raises(RuntimeError, match=message):
            lp.plain(given)
        for function in (lambda m: list(lp.fp8_state(m)), lambda m: lp.export(m, "nowhere")) * (stage == 3):
            message = "needs whole weights, and DeepSpeed's ZeRO has cut them.*zero_to_fp32"
            with pytest.raises(RuntimeError, match=message):
                function(given)
    if stage == 2:
        fp8_state_decodes_to_the_whole_weights(model)


def fp8_state_decodes_to_the_whole_weights(model):
    wrapped, bare = ({name: t.clone() for name, t in lp.fp8_state(given)} for given in (model, model.module))
    whole = dict(model.module.named_parameters())
    assert wrapped.keys() == bare.keys()
    assert all(torch.equal(wrapped[name].float(), bare[name].float()) for name in wrapped)
    codes = {name for name, tensor in wrapped.items() if tensor.dtype == torch.float8_e4m3fn}
    assert codes
    for name in codes:
        weight, decoded = whole[name].float(), wrapped[name].float() * wrapped[f"{name}_scale"].float()
        largest = weight.abs().amax(1, keepdim=True)
        assert ((decoded - weight).abs() <= 2**-4 * weight.abs() + 2**-10 * largest).all()  # e4m3: 3 bits of mantissa


def fp16_overflow_is_skipped_by_deepspeed_with_the_scale_of_the_plugin(folder):
    """The scale halves after the hysteresis."""
    plugin = lp.HalfMixed("fp16", loss_scale=lp.LossScale(initial=2.0**8, growth_interval=2, hysteresis=1))
    fabric = fabric_of("deepspeed_stage_2", plugins=plugin)
    model, optimizer = started(fabric)
    seen = []
    for factor in (1.0, float("inf"), 1.0, 1.0, 1.0):
        batch = batches(1, 0)[0]
        fabric.backward(loss_of(model(batch), batch) * factor)
        optimizer.step()
        seen.append((fabric.strategy.model.optimizer.loss_scale, plugin.skipped_steps))
    assert seen == [(256, 0), (128, 1), (128, 1), (128, 1), (256, 1)]


def autocast_ends_with_a_forward_that_raises(folder):
    """Also without an optimizer. A copy of the plugin has no engine."""
    fabric = fabric_of("deepspeed_stage_3", precision="bf16-master")
    model, inside = fabric.setup_module(net := Net()), []
    net.lm_head.register_forward_hook(lambda *_: inside.append(torch.is_autocast_enabled("cpu")))
    model(batches(1, 0)[0])
    with suppress(IndexError):
        model(torch.full((1, 1), 10**6))
    assert (inside, torch.is_autocast_enabled("cpu")) == ([True], False)
    assert (torch.autocast_increment_nesting(), torch.autocast_decrement_nesting()) == (1, 0), "what it cached is freed"
    assert pickle.loads(pickle.dumps(fabric.strategy.precision)).skipped_steps == 0


# ---- Trainer


class CutFromTheStart(Task):
    def __init__(self) -> None:
        super().__init__()
        self.net = None

    def configure_model(self) -> None:
        self.net = self.net or Net()


def trainer_of(stage, epochs, precision="fp8-hybrid", **how):
    strategy = how.pop("strategy", f"deepspeed_stage_{stage}")
    return L.Trainer(
        devices=2, strategy=strategy, precision=precision, max_epochs=epochs, use_distributed_sampler=False,
        **ON_CPU, **how,
    )  # fmt: skip


def loader():
    return torch.utils.data.DataLoader(batches(STEPS, dist.get_rank()).flatten(0, 1), batch_size=4)


def the_trainer_resumes_bit_for_bit_and_zero_to_fp32_gives_the_masters(folder, stage):
    path = folder / f"trainer-{stage}"
    straight, first, second = Task(), Task(), Task()
    trainer_of(stage, 2).fit(straight, loader())
    trainer = trainer_of(stage, 1)
    trainer.fit(first, loader())
    trainer.save_checkpoint(path)
    saved = weights(trainer.strategy.model)
    trainer = trainer_of(stage, 2)
    trainer.fit(second, loader(), ckpt_path=path)
    trainer.validate(second, loader(), verbose=False)
    assert first.losses + second.losses[:STEPS] == straight.losses
    assert straight.losses[:STEPS] == reference("fp8-hybrid")[0]
    assert max(second.losses[STEPS:]) < straight.losses[0]
    assert type(second.net.up).__name__ == "FP8Linear"

    masters = get_fp32_state_dict_from_zero_checkpoint(path)
    assert {value.dtype for value in masters.values()} == {torch.float32}
    assert same({name: value.to(torch.bfloat16) for name, value in masters.items()}, saved)
    fabric = L.Fabric(accelerator="cpu", devices=1, plugins=lp.FP8TorchAO(master_weights=True))
    model, optimizer = started(fabric)
    model.load_state_dict({name.removeprefix("net."): value for name, value in masters.items()})
    (loss,) = steps(fabric, model, optimizer, batches(1, dist.get_rank()))
    assert stage == 3 or loss == straight.losses[STEPS]  # the first of the second epoch


def a_checkpoint_of_another_base_dtype_is_named_with_the_way_out(folder):
    with pytest.raises(FileNotFoundError, match=r"under other names in bf16 than in fp16.*`python zero_to_fp32\.py`"):
        trainer_of(2, 2, "fp16-master").fit(Task(), loader(), ckpt_path=folder / "trainer-2")


def the_trainer_tells_deepspeed_to_accumulate_and_clip(folder):
    trainer = trainer_of(2, 1, accumulate_grad_batches=2, gradient_clip_val=0.5)
    task, again, ended = Task(), Task(), []
    for one in (task, again):
        one.optimizer = lambda task: torch.optim.AdamW([p for p in task.parameters() if p is not task.net.up.weight])
    said = pytest.warns(UserWarning, match=r"'net\.up\.weight' is trainable and in no optimizer")
    with nullcontext() if dist.get_rank() else said:
        trainer.fit(task, loader())
    engine = trainer.strategy.model
    assert (engine.gradient_accumulation_steps(), engine.gradient_clipping()) == (2, 0.5)
    assert engine.global_steps == trainer.global_step == 2
    trainer.save_checkpoint(path := folder / "accumulated")
    resumed = trainer_of(2, 2, accumulate_grad_batches=2)
    again.on_train_batch_end = lambda *_: ended.append(resumed.precision_plugin.engine.ended_step)
    resumed.fit(again, loader(), ckpt_path=path)
    assert ended == [False, True] * 2


def two_clippings_raise_with_both_values(folder):
    config = {"zero_optimization": {"stage": 2}, "gradient_clipping": 0.1, "zero_allow_untested_optimizer": True}
    trainer = trainer_of(2, 1, strategy=DeepSpeedStrategy(config=config), gradient_clip_val=0.5)
    message = "`gradient_clip_val=0.5` contradicts `gradient_clipping=0.1` of the DeepSpeed config"
    with pytest.raises(MisconfigurationException, match=message):
        trainer.fit(Task(), loader())


def weights_that_zero_cuts_as_they_are_made_are_converted(folder):
    task, trainer = CutFromTheStart(), trainer_of(3, 1)
    trainer.fit(task, loader())
    assert type(task.net.up).__name__ == "FP8Linear"
    assert "net.up               32 -> 64  FP8" in str(trainer.precision_plugin.plan)
    assert task.losses[-1] < task.losses[0] - 0.2


def of_stage(stage):
    names = FEW if stage == 1 else REFERENCES
    yield from ((zero_trains_as_ddp_with_float32_masters_bit_for_bit, stage, name) for name in names)
    yield fabric_resumes_bit_for_bit, stage
    yield what_needs_whole_weights_names_zero_to_fp32, stage
    yield the_trainer_resumes_bit_for_bit_and_zero_to_fp32_gives_the_masters, stage
    if stage == 2:
        yield from ((part,) for part in OF_STAGE_2)


OF_STAGE_2 = (
    a_checkpoint_of_another_base_dtype_is_named_with_the_way_out,
    fp16_overflow_is_skipped_by_deepspeed_with_the_scale_of_the_plugin,
    the_trainer_tells_deepspeed_to_accumulate_and_clip,
    two_clippings_raise_with_both_values,
)
OF_STAGE_3 = (
    offloaded_weights_and_optimizer_give_the_same,
    zero_3_keeps_neither_gathered_weights_nor_codes,
    weights_that_zero_cuts_as_they_are_made_are_converted,
    autocast_ends_with_a_forward_that_raises,
)
PARTS = {
    "-".join([part.__name__, *map(str, args)]): (part, args)
    for part, *args in (*of_stage(1), *of_stage(2), *of_stage(3), *((part,) for part in OF_STAGE_3))
}
"""By name; stage 3 last: DeepSpeed replaces F.linear for the rest of the process."""
