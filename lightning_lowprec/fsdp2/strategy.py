"""What the two FSDP2 strategies share: the plugin's part in sharding, and what came of it."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from lightning.fabric.plugins import Precision as FabricPrecision
from lightning.fabric.plugins.precision import HalfPrecision as FabricHalf
from lightning.fabric.utilities.rank_zero import rank_zero_info, rank_zero_warn
from lightning.pytorch.plugins.precision import HalfPrecision as TrainerHalf
from lightning.pytorch.plugins.precision import Precision as TrainerPrecision
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import Module
from torch.optim import Optimizer

from lightning_lowprec.fsdp2.following import Replacements
from lightning_lowprec.fsdp2.options import ShardOptions
from lightning_lowprec.fsdp2.several_meshes import step_one_by_one
from lightning_lowprec.fsdp2.visits import reshard
from lightning_lowprec.precision.base import LowPrecision
from lightning_lowprec.precision.host import in_trainer

if TYPE_CHECKING:
    from lightning_lowprec.fsdp2.shard import Sharded

STEPS: Final = ("training_step", "validation_step", "test_step", "predict_step")
"""What the Trainer calls instead of the module itself; Fabric goes through the module."""


class _Known(NamedTuple):
    choices: tuple[Any, ...]
    options: ShardOptions
    sharded: Sharded


_sharded: weakref.WeakKeyDictionary[Module, _Known] = weakref.WeakKeyDictionary()


class Sharding:
    """The sharded models of one strategy.

    Args:
        options: what the user chose.
    """

    def __init__(self, options: ShardOptions) -> None:
        self.options = options
        self._replacements: list[Replacements] = []
        self._unreported: list[Sharded] = []

    def check(self, plugin: Any) -> None:
        """Raise ValueError for a plugin that does not run under FSDP2, or options that do not fit it."""
        param_dtype(plugin)
        gathers_fp8(plugin, self.options)

    def meet(self, plugin: Any, device: torch.device) -> None:
        """The strategy has its precision plugin and its device.

        Raises:
            ValueError: see :meth:`check`.
        """
        self.check(plugin)
        if isinstance(plugin, LowPrecision):
            plugin.bind_device(device)
            if plugin.masters is not None and self.options.buffer_dtype is None:
                self.options = replace(self.options, buffer_dtype=plugin.masters.buffer_dtype)
            plugin.bind_shards(reshard)

    def knows(self, model: Module, plugin: Any) -> bool:
        """Whether ``model`` was sharded for this precision before: in an earlier fit, or by an earlier Trainer."""
        known = _sharded.get(model)
        return known is not None and known.choices == _identity(plugin)

    def apply(self, model: Module, mesh: DeviceMesh, plugin: Any, device: torch.device) -> None:
        """Shard a converted model in place, unless that was done before."""
        if self.knows(model, plugin):
            self._say_what_stays(model)
            if isinstance(plugin, LowPrecision):
                plugin.cast_shards(model)  # they are cast: it only learns of them
            return
        from lightning_lowprec.fsdp2.shard import shard

        replacements = Replacements(model)
        sharded = shard(
            model,
            mesh,
            self.options,
            device=device,
            param_dtype=param_dtype(plugin),
            fp8_all_gather=gathers_fp8(plugin, self.options),
            methods=tuple(name for name in STEPS if in_trainer(model) and is_overridden(name, model)),
        )
        if isinstance(plugin, LowPrecision):
            plugin.cast_shards(model)
        replacements.note()
        self._replacements.append(replacements)
        self._unreported.append(sharded)
        _sharded[model] = _Known(_identity(plugin), self.options, sharded)

    def _say_what_stays(self, model: Module) -> None:
        """Warn of options that differ from those that ``model`` was sharded with."""
        before = _sharded[model].options
        values = {
            field.name: (getattr(before, field.name), getattr(self.options, field.name)) for field in fields(before)
        }
        kept = [f"{n}={old!r}" for n, (old, new) in values.items() if n not in NOT_SEEN and _differ(old, new)]
        if kept:
            rank_zero_warn(
                f"fsdp2: {type(model).__name__} stays sharded as it was, with {', '.join(kept)}; for other options"
                " build the model anew."
            )

    def follow(self, optimizer: Optimizer) -> None:
        """Let an optimizer that was built before sharding update what its model has become."""
        for replacements in self._replacements:
            replacements.follow(optimizer)
        if step_one_by_one(optimizer):
            rank_zero_info(f"fsdp2: {type(optimizer).__name__} runs without foreach: its parameters are on two meshes.")

    def before_backward(self, model: Module | None, loss: Tensor) -> None:
        """A backward pass begins; within ``training_step`` FSDP2 has to be told."""
        if model is not None and model in _sharded:
            _sharded[model].sharded.visits.before_backward(loss)

    def gather_again(self, model: Module | None) -> None:
        """After a backward pass or a step within ``training_step``: what follows in it may use the model again."""
        if model is not None and model in _sharded:
            _sharded[model].sharded.visits.gather_again()

    def after_step(self) -> None:
        """Once, after the first step: say what was gathered; raise if it was not what was promised."""
        unreported, self._unreported = self._unreported, []
        for sharded in unreported:
            line = sharded.wire.check()
            if line is not None:
                rank_zero_info(f"fsdp2: {line}.")


NOT_SEEN: Final = ("sync_module_states", "tensor_parallel")
"""Options without a trace in a sharded model, or whose plans do not compare."""


def _differ(old: Any, new: Any) -> bool:
    if isinstance(old, Collection) and isinstance(new, Collection) and not isinstance(old, (str, Mapping)):
        return set(old) != set(new)  # classes
    functions = [callable(value) and not isinstance(value, type) for value in (old, new)]
    return not all(functions) and bool(old != new)


def _identity(plugin: Any) -> tuple[Any, ...]:
    """Everything about a precision that is built into a model when it is sharded."""
    return plugin.sharded_identity() if isinstance(plugin, LowPrecision) else (getattr(plugin, "precision", None),)


def param_dtype(plugin: Any) -> torch.dtype | None:
    """What weights are gathered as under a precision plugin; None: as they are stored.

    Raises:
        ValueError: a plugin of which that is not known.
    """
    if isinstance(plugin, LowPrecision):
        return plugin.autocast_dtype
    if type(plugin) in (FabricPrecision, TrainerPrecision, FabricHalf, TrainerHalf):
        return None
    raise ValueError(
        f"`{type(plugin).__name__}` (precision={getattr(plugin, 'precision', None)!r}) does not run under 'fsdp2'. Use"
        " `precision=` with '32-true', 'bf16-true', '16-true', 'bf16-mixed', '16-mixed' or a name of lightning_lowprec,"
        " or one of its plugins (`HalfMixed` in place of Lightning's `MixedPrecision`)."
    )


def gathers_fp8(plugin: Any, options: ShardOptions) -> bool:
    """Whether float32 or bf16 weights are gathered as float8.

    Raises:
        ValueError: it was asked for and the precision cannot.
    """
    wanted = options.fp8_all_gather
    if getattr(plugin, "fp8_params", False):
        if wanted is False:
            raise ValueError("`fp8_all_gather=False` is not possible with `fp8_params=True`. Use 'auto' or True.")
        if (reason := _not_gathered(plugin, options)) is not None:
            raise ValueError(f"`fp8_params=True` is not possible under FSDP2: {reason}. Leave it out.")
    if getattr(plugin, "keeps_codes", False):
        if wanted is False:
            raise ValueError(
                f"`fp8_all_gather=False` is not possible: `precision={plugin.precision!r}` keeps its weights as codes,"
                " which are gathered as they are. Use 'auto' or True."
            )
        if (reason := _in_parts(options)) is not None:
            raise ValueError(f"`precision={plugin.precision!r}` gathers its weights as codes, and {reason}.")
        return False  # not by what `fp8_all_gather` does to float32 weights
    if wanted is False:
        return False
    reason = _not_gathered(plugin, options)
    if reason is None and wanted is True and getattr(plugin, "fuse", False):
        reason = "`fuse='auto'` joins weights that would have scales of their own ('auto' gathers the others in float8)"
    if reason is None:
        return True
    if wanted is True:
        raise ValueError(f"`fp8_all_gather=True` is not possible: {reason}. Use 'auto' or False.")
    return False


def _in_parts(options: ShardOptions) -> str | None:
    """Why what is gathered is not freed in a way that float8 weights can be, or None if it is."""
    size = options.reshard_after_forward
    if size is None or isinstance(size, bool):
        return None
    return f"`reshard_after_forward={size}` goes with weights in high precision only; True, False, None go with float8"


def _not_gathered(plugin: Any, options: ShardOptions) -> str | None:
    """Why the weights are not gathered as float8, or None if they are."""
    if not isinstance(plugin, LowPrecision):
        return f"`precision={getattr(plugin, 'precision', None)!r}` has no FP8 weights"
    return plugin.gathers(options) or _in_parts(options)
