"""FSDP2 for the Trainer."""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from torch.nn import Module
from torch.optim import Optimizer
from torchmetrics import Metric
from typing_extensions import override

from lightning_lowprec.checkpoints import optimizer_state
from lightning_lowprec.checkpoints.load import load, open_checkpoint
from lightning_lowprec.checkpoints.save import model_state, remove, save
from lightning_lowprec.checkpoints.weights import WEIGHT_KEYS
from lightning_lowprec.fsdp2.forward_hooks import check_reduced, reshard
from lightning_lowprec.fsdp2.strategy import FSDP2Base, check_storage_options
from lightning_lowprec.numerics.parameters import clip_grad_norm
from lightning_lowprec.precision.refusals import refuse_averaging
from lightning_lowprec.private import either
from lightning_lowprec.private.lightning import note_sigterm, set_names

if TYPE_CHECKING:
    _Parent = either.trainer_strategies.ModelParallelStrategy
else:
    _Parent = object


class ForTrainer(FSDP2Base, _Parent):
    """What the strategy does in any package of Lightning; its last base is ModelParallelStrategy of that package."""

    in_fabric = False

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        set_names(self.lightning_module, device_mesh=self.device_mesh)

    @override
    def setup(self, trainer: either.Trainer) -> None:
        """Convert, shard, and only then build optimizers."""
        assert self.model is not None
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        refuse_averaging(
            getattr(trainer, "callbacks", ()),
            "copies the model, and a sharded model cannot be copied: it does not run under 'fsdp2'. Average the weights"
            " of checkpoints afterwards, or use 'ddp'.",
        )
        note_sigterm(trainer)
        if not self.sharding.knows(self.model, self.precision_plugin):
            self.model = self.precision_plugin.convert_module(self.model)
        self.sharding.apply(self.model, self.device_mesh, self.precision_plugin, self.root_device)
        if self.sharding.options.tensor_parallel is not None:
            plugin = self.precision_plugin
            plugin.clip_grad_by_norm = lambda optimizer, value: clip_grad_norm(  # type: ignore[method-assign, assignment]
                plugin.main_params(optimizer), value
            )
        for module in self.model.modules():
            if isinstance(module, Metric):  # the states of metrics are no buffers, so nothing has moved them yet
                module.to(self.root_device)
        self.barrier()
        if trainer.state.fn == either.TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    @override
    def setup_optimizers(self, trainer: either.Trainer) -> None:
        """Set up the user's optimizers; an optimizer that was built in ``__init__`` gets the sharded parameters."""
        super().setup_optimizers(trainer)
        for optimizer in self.optimizers:
            self.sharding.follow(optimizer)

    @override
    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], object],
        model: either.LightningModule | Module | None = None,
        **kwargs: object,
    ) -> Any:
        module = self.lightning_module
        if module is None or module.automatic_optimization:
            output = super().optimizer_step(optimizer, closure, model, **kwargs)
        else:
            output = super().optimizer_step(optimizer, partial(_checked, closure, module, optimizer), model, **kwargs)
            reshard(module)  # a forward without a backward leaves weights that the step makes old
        self.sharding.after_step()
        return output

    @override
    def lightning_module_state_dict(self) -> dict[str, object]:
        assert self.model is not None
        return model_state(self.model, full=self.is_full)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state by fqn, sharded; or by number, whole, on rank 0."""
        assert self.model is not None
        optimizer = optimizer.optimizer if isinstance(optimizer, either.both(either.LightningOptimizer)) else optimizer
        state = optimizer_state.collect(self.model, optimizer, full=self.is_full)
        return optimizer_state.numbered(state, self.model) if self.is_full else state

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: object = None) -> None:
        check_storage_options(storage_options)
        shards: dict[str, object] = {}
        if not self.is_full:
            shards = {"state_dict": checkpoint.pop("state_dict")}
            shards |= {f"optimizer_{i}": state for i, state in enumerate(checkpoint.pop("optimizer_states", []))}
        save(Path(self.broadcast(filepath)), shards, checkpoint, full=self.is_full)

    @override
    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, object]:
        """Load model and optimizers from a folder or file of any precision and number of ranks; return the rest."""
        assert self.model is not None
        assert self.lightning_module is not None
        path = Path(self.broadcast(checkpoint_path))
        stored = open_checkpoint(path, weights_only, verify=self.verify_checkpoints)
        optimizers = self.optimizers if self.lightning_module.trainer.state.fn == either.TrainerFn.FITTING else []
        states = stored.rest.pop("optimizer_states", None) or []  # in a file
        if optimizers:
            stored.rest.update({f"optimizer_{i}": state for i, state in enumerate(states)})
        saved = [key for key in stored.keys if re.fullmatch(r"optimizer_\d+", key)]
        if optimizers and not saved:
            raise KeyError(
                f"{str(path)!r} holds the model alone (`save_weights_only=True`?), and the Trainer was asked to resume"
                " from it. Load the weights in your own code, or resume from a checkpoint with optimizer states."
            )
        if optimizers and len(saved) != len(optimizers):
            raise ValueError(
                f"{str(path)!r} has the state of {len(saved)} optimizers, the model has {len(optimizers)}."
            )
        key = next((key for key in WEIGHT_KEYS if key in stored.keys), WEIGHT_KEYS[0])
        stored.check_keys([key])
        named = {f"optimizer_{i}": optimizer for i, optimizer in enumerate(optimizers)}
        load(stored, self.model, key, named, strict=self.lightning_module.strict_loading)
        return stored.rest

    @override
    def remove_checkpoint(self, filepath: str | Path) -> None:
        if self.is_global_zero:
            remove(Path(filepath))


def _checked(closure: Callable[[], Any], module: Module, optimizer: Optimizer) -> Any:
    output = closure()
    check_reduced(module, (p for group in optimizer.param_groups for p in group["params"]))
    return output


@final
class FSDP2Strategy(ForTrainer, either.trainer_strategies.ModelParallelStrategy):
    """Fully sharded training by FSDP2 in every precision, of any LightningModule, without changes to its code."""
