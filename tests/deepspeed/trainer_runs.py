"""Runs of two ranks in the Trainer, under ZeRO."""

import lightning as L
import torch
import torch.distributed as dist
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from lightning.pytorch.strategies import DeepSpeedStrategy

from tests.deepspeed.fabric_runs import weights
from tests.deepspeed.models import Net, Task, batches
from tests.toys import ON_CPU

STEPS = 4


class CutFromTheStart(Task):
    def __init__(self) -> None:
        super().__init__()
        self.net = None

    def configure_model(self) -> None:
        if self.net is None:
            self.net = Net()


def trainer_of(stage, epochs, precision="fp8-hybrid", **how):
    strategy = how.pop("strategy", f"deepspeed_stage_{stage}")
    return L.Trainer(
        devices=2, strategy=strategy, precision=precision, max_epochs=epochs, use_distributed_sampler=False,
        **ON_CPU, **how,
    )  # fmt: skip


def loader():
    return torch.utils.data.DataLoader(batches(STEPS, dist.get_rank()).flatten(0, 1), batch_size=4)


def resumed(stage, folder):
    straight, first, second = Task(), Task(), Task()
    trainer_of(stage, 2).fit(straight, loader())
    trainer = trainer_of(stage, 1)
    trainer.fit(first, loader())
    trainer.save_checkpoint(folder)
    saved = weights_of(trainer)
    masters = get_fp32_state_dict_from_zero_checkpoint(folder) if dist.get_rank() == 0 else None
    trainer = trainer_of(stage, 2)
    trainer.fit(second, loader(), ckpt_path=folder)
    trainer.validate(second, loader(), verbose=False)
    return {
        "straight": straight.losses,
        "parts": first.losses + second.losses[:STEPS],
        "validated": second.losses[STEPS:],
        "saved": saved,
        "masters": masters,
        "layer": type(second.net.up).__name__,
    }


def weights_of(trainer):
    return weights(type("Wrapped", (), {"module": trainer.strategy.model}))


def accumulated():
    task = Task()
    trainer = trainer_of(2, 1, accumulate_grad_batches=2, gradient_clip_val=0.5)
    trainer.fit(task, loader())
    engine = trainer.strategy.model
    told = engine.gradient_accumulation_steps(), engine.gradient_clipping(), engine.global_steps, trainer.global_step
    return {"told": told, "weights": weights_of(trainer), "losses": task.losses}


def contradicted():
    config = {"zero_optimization": {"stage": 2}, "gradient_clipping": 0.1, "zero_allow_untested_optimizer": True}
    trainer = trainer_of(2, 1, strategy=DeepSpeedStrategy(config=config), gradient_clip_val=0.5)
    try:
        trainer.fit(Task(), loader())
    except L.pytorch.utilities.exceptions.MisconfigurationException as error:
        return str(error)


def cut_from_the_start():
    task = CutFromTheStart()
    trainer = trainer_of(3, 1)
    trainer.fit(task, loader())
    return {"losses": task.losses, "layer": type(task.net.up).__name__, "plan": str(trainer.precision_plugin.plan)}


def of_another_base(folder):
    try:
        trainer_of(2, 2, "fp16-master").fit(Task(), loader(), ckpt_path=folder)
    except FileNotFoundError as error:
        return str(error)


def main(folder):
    seen = {("trainer", stage): resumed(stage, f"{folder}/trainer-{stage}") for stage in (1, 2, 3)}
    seen["of another base"] = of_another_base(f"{folder}/trainer-2")
    seen["accumulated"] = accumulated()
    seen["clipping"] = contradicted()
    seen["cut"] = cut_from_the_start()
    return seen
