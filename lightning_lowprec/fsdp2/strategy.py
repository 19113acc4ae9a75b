"""Share one half between the FSDP2 strategies of Trainer and Fabric, and keep what sharding has made of a model."""

import weakref
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, ClassVar, Final, Literal, NamedTuple, Self, cast, final

import torch
from torch import Tensor, nn
from torch.distributed.constants import default_pg_timeout
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from lightning_lowprec.checkpoints import optimizer_state
from lightning_lowprec.conversion.options import called_with, shows, take, takes
from lightning_lowprec.conversion.selection import left_alone
from lightning_lowprec.fsdp2.forward_hooks import reshard
from lightning_lowprec.fsdp2.from_fsdp import translate
from lightning_lowprec.fsdp2.meshes import data_ranks, make_mesh, shard_mesh, shards
from lightning_lowprec.fsdp2.options import ShardOptions
from lightning_lowprec.fsdp2.shard import shard
from lightning_lowprec.masters.kept_float32 import kept_float32
from lightning_lowprec.messages import dtype_name, in_units, info, warn
from lightning_lowprec.numerics.parameters import disable_foreach
from lightning_lowprec.precision.base import LowPrecision
from lightning_lowprec.precision.host import trainer_of
from lightning_lowprec.private import either
from lightning_lowprec.private import lightning as names
from lightning_lowprec.private.either import fabric_strategies as fabric
from lightning_lowprec.private.either import trainer_strategies as trainer
from lightning_lowprec.private.fsdp2 import gathered_parameters
from lightning_lowprec.private.torch import FSDP2, check, local_tensor
from lightning_lowprec.private.torch_modules import is_batch_or_instance_norm

OFFLOADING: Final = "cpu:gloo,cuda:nccl"
"""The backends for shards in CPU memory: norms and overflow flags are reduced there."""
STEPS: Final = ("training_step", "validation_step", "test_step", "predict_step")
"""The Trainer calls these methods, and not the module itself; Fabric calls the module."""


@dataclass(frozen=True, kw_only=True)
class StrategyOptions(ShardOptions):
    """The arguments of both strategies."""

    state_dict_type: Literal["sharded", "full"] = "sharded"
    verify_checkpoints: bool = True
    process_group_backend: str | None = None
    timeout: timedelta | None = default_pg_timeout
    cluster_environment: either.ClusterEnvironment | None = None
    checkpoint_io: either.CheckpointIO | None = None


@shows()
class FSDP2Base:
    """Share one half between both strategies; their other base is Lightning's ModelParallelStrategy.

    Args:
        state_dict_type: ``"sharded"`` checkpoints are folders to which every rank writes its shards. ``"full"``
            checkpoints are single files.
        verify_checkpoints: compare the checksums of a checkpoint before anything of it is loaded. False: a damaged
            file, or a file of another save, may load as other weights; a log line says so.
        process_group_backend: None: nccl on CUDA, gloo on CPU.
        timeout: the timeout of the process group.
        cluster_environment: where the processes come from; None: Lightning finds out.
        checkpoint_io: how the Trainer writes and reads single-file checkpoints. It must be None in Fabric, whose
            sharded strategies write their checkpoints themselves.

    Raises:
        ValueError: an option is not valid.
        ImportError: Lightning has moved a private name that is needed here.
    """

    strategy_name = "fsdp2"
    in_fabric: ClassVar[bool]

    def __init_subclass__(cls) -> None:
        _, title, options = (FSDP2Base.__doc__ or "").partition("\n\nArgs:\n")
        cls.__doc__ = f"{cls.__doc__}{title}{options}"

    @takes(StrategyOptions)
    def __init__(self, options: StrategyOptions) -> None:
        checkpoint_io = options.checkpoint_io
        if checkpoint_io is not None and self.in_fabric:
            raise ValueError(
                f"`checkpoint_io={checkpoint_io!r}` is not possible in Fabric: its sharded strategies write their"
                " checkpoints themselves. Leave it out, or use the Trainer."
            )
        self.sharding = Sharding(take(ShardOptions, options))
        self.state_dict_type = options.state_dict_type
        self.is_full = options.state_dict_type == "full"
        self.verify_checkpoints = options.verify_checkpoints
        self.arguments: dict[str, object] = dict(vars(options))
        """All arguments, to build the same strategy for the other one of Trainer and Fabric."""
        parent: Any = super()
        parent.__init__(
            save_distributed_checkpoint=options.state_dict_type == "sharded",
            process_group_backend=options.process_group_backend,
            timeout=options.timeout,
            **({"parallelize_fn": None} if self.in_fabric else {}),  # ours shards without such a function
        )
        names.check_model_parallel(self)
        self.cluster_environment = options.cluster_environment
        if checkpoint_io is not None:
            self.checkpoint_io = checkpoint_io

    @classmethod
    def from_fsdp(cls, strategy: fabric.FSDPStrategy | trainer.FSDPStrategy) -> Self:
        """Translate Lightning's ``FSDPStrategy``, of the Trainer or of Fabric, to FSDP2; a log line says the result.

        It raises for choices that FSDP2 has no equal for, and for classes that derive from ``FSDPStrategy``.
        """
        return cls(**translate(strategy))

    @property
    def distributed_sampler_kwargs(self) -> dict[str, object]:
        """Return which part of the data this rank reads."""
        strategy: Any = self
        return data_ranks(strategy.device_mesh)

    def setup_environment(self) -> None:
        """Start the processes and make their mesh."""
        strategy: Any = self
        parent: Any = super()
        plugin = strategy.precision if self.in_fabric else strategy.precision_plugin
        self.sharding.meet(plugin, strategy.root_device)
        options = self.sharding.options
        copies = strategy.num_nodes if options.replicate == "nodes" else options.replicate
        world_size = strategy.num_nodes * strategy.num_processes
        tensor = options.tensor_parallel_size
        shards(world_size, copies, tensor, options.shards)  # raises before the process group exists
        names.set_names(self, data_parallel_size=world_size // tensor, tensor_parallel_size=tensor)
        if options.cpu_offload and strategy.process_group_backend is None and strategy.root_device.type == "cuda":
            names.set_names(self, process_group_backend=OFFLOADING)
        parent.setup_environment()
        if copies > 1:  # a mesh of three dimensions in place of Lightning's
            names.set_names(self, device_mesh=make_mesh(strategy.root_device, world_size, copies, tensor))


def check_storage_options(value: object) -> None:
    """Raise TypeError if the user gave storage options."""
    if value is not None:
        raise TypeError(
            f"`storage_options={value!r}` is not valid with 'fsdp2', which writes checkpoints by itself and not through"
            " a CheckpointIO; leave it out."
        )


@final
class ReplacedParameters:
    """The parameters of ``model`` before and after sharding: made before, with :meth:`record` called after."""

    def __init__(self, model: Module) -> None:
        # weak references: nothing here may keep the unsharded weights alive. The id of a dead one may be taken again
        self._old = {fqn: (id(p), weakref.ref(p)) for fqn, p in model.named_parameters(remove_duplicate=False)}
        self._new: dict[int, tuple[weakref.ref[Parameter], Parameter]] = {}

    def record(self, model: Module) -> None:
        """Note the new parameters, by the names of the old ones."""
        new = dict(model.named_parameters(remove_duplicate=False))
        lost = self._old.keys() - new.keys()
        if lost:
            raise RuntimeError(
                f"sharding renamed or removed parameters of {type(model).__name__} ({', '.join(sorted(lost)[:3])});"
                " optimizers and checkpoints could not find them again."
            )
        self._new = {number: (old, new[fqn]) for fqn, (number, old) in self._old.items()}

    def put_into(self, optimizer: Optimizer) -> None:
        """Replace old parameters in the groups of an optimizer, and in its state; gradients are left behind."""
        replaced = [p for group in optimizer.param_groups for p in group["params"] if id(p) in self._new]
        new_of = {id(p): self._new[id(p)][1] for p in replaced if self._new[id(p)][0]() is p}
        for group in optimizer.param_groups:
            group["params"][:] = [new_of.get(id(p), p) for p in group["params"]]  # in place: LBFGS keeps the list
        for p in [p for p in optimizer.state if id(p) in new_of]:
            new = new_of[id(p)]
            state = optimizer.state.pop(p)
            for name, value in state.items():
                if isinstance(value, Tensor) and value.ndim > 0 and value.shape == p.shape:
                    state[name] = optimizer_state.place(value, new)
            optimizer.state[new] = state


class _Known(NamedTuple):
    precision: tuple[object, ...]
    options: ShardOptions


_sharded: weakref.WeakKeyDictionary[Module, _Known] = weakref.WeakKeyDictionary()


@final
class Sharding:
    """The sharded models of one strategy."""

    def __init__(self, options: ShardOptions) -> None:
        self.options = options
        self._replacements: list[ReplacedParameters] = []
        self._unreported: list[tuple[weakref.ref[Module], int]] = []  # models, and the number of their shards

    def check(self, plugin: either.FabricPrecision) -> None:
        """Raise if ``plugin`` does not run under FSDP2, or not with these options, or not with this torch."""
        check(FSDP2)
        param_dtype(plugin)
        gathers_fp8(plugin, self.options)

    def meet(self, plugin: either.FabricPrecision, device: torch.device) -> None:
        """Check the precision plugin, and let it know the device, which the strategy has now."""
        self.check(plugin)
        if isinstance(plugin, LowPrecision):
            plugin.bind_device(device)
            if plugin.masters is not None and self.options.buffer_dtype is None:
                self.options = replace(self.options, buffer_dtype=plugin.masters.buffer_dtype)
            if self.options.reduce_dtype is None:
                self.options = replace(self.options, reduce_dtype=plugin.reduce_dtype)
            plugin.bind_shards(reshard)
            if plugin.masters is not None:  # of half-precision shards, with which buffers are cast too
                plugin.masters.buffer_dtype = self.options.buffer_dtype

    def knows(self, model: Module, plugin: either.FabricPrecision) -> bool:
        """Return whether ``model`` was sharded for this precision before, in another fit or by another Trainer."""
        return model in _sharded and _sharded[model].precision == _identity(plugin)

    def apply(self, model: Module, mesh: DeviceMesh, plugin: either.FabricPrecision, device: torch.device) -> None:
        """Shard a converted model in place; warn if it is sharded already, with other options."""
        if self.knows(model, plugin):
            before = vars(_sharded[model].options)
            compared = [name for name in before if name not in NOT_COMPARED]
            other = [name for name in compared if _comparable(before[name]) != _comparable(getattr(self.options, name))]
            if other:
                kept = ", ".join(f"{name}={before[name]!r}" for name in other)
                warn(
                    f"fsdp2: {type(model).__name__.removeprefix('FSDP')} stays sharded as it was, with {kept}; for"
                    " other options build the model anew."
                )
            if isinstance(plugin, LowPrecision):
                plugin.cast_shards(model)  # the shards are cast already, but this plugin does not know them
            return
        replacements = ReplacedParameters(model)
        ours = plugin if isinstance(plugin, LowPrecision) else None
        float32 = () if ours is None else kept_float32(model, ours.autocast_dtype, ours.keep_fp32)
        shard(
            model,
            mesh,
            self.options,
            device=device,
            param_dtype=param_dtype(plugin),
            fp8_all_gather=gathers_fp8(plugin, self.options),
            methods=tuple(name for name in STEPS if trainer_of(model) and either.is_overridden(name, model)),
            float32=left_alone(model).union(float32),
        )
        if ours is not None:
            ours.cast_shards(model)
        replacements.record(model)
        self._replacements.append(replacements)
        data_mesh = shard_mesh(mesh)
        self._unreported.append((weakref.ref(model), data_mesh.size(data_mesh.ndim - 1)))
        _sharded[model] = _Known(_identity(plugin), self.options)

    def follow(self, optimizer: Optimizer) -> None:
        """Let an optimizer that was built before sharding update the new parameters."""
        for replacements in self._replacements:
            replacements.put_into(optimizer)
        if disable_foreach(optimizer):
            info(f"fsdp2: {type(optimizer).__name__} runs without foreach: its parameters are on two meshes.")
        optimizer_state.check_optimizer(optimizer)

    def after_step(self) -> None:
        """Log what each model gathered, once after its first step; raise if weights were not gathered as float8."""
        unreported, self._unreported = self._unreported, []
        for reference, ranks in unreported:
            model = reference()
            if model is not None and (line := gathered_line(model, ranks)) is not None:
                info(f"fsdp2: {line}.")
            elif model is not None and ranks > 1:
                self._unreported.append((reference, ranks))  # its first step is to come


NOT_COMPARED: Final = ("sync_module_states", "tensor_parallel")
"""Options that leave no trace in a sharded model, or that cannot be compared."""


def _comparable(value: object) -> object:
    """Return classes as a set, and the same for all functions, which cannot be compared."""
    if isinstance(value, Collection) and not isinstance(value, (str, Mapping)):
        return set(value)
    return callable if callable(value) else value


def _identity(plugin: either.FabricPrecision) -> tuple[object, ...]:
    """Return everything about a precision that is built into a model when the model is sharded."""
    if isinstance(plugin, LowPrecision):
        return *plugin.sharded_identity(), plugin.head, tuple(plugin.keep_fp32)
    return (getattr(plugin, "precision", None),)


def param_dtype(plugin: either.FabricPrecision) -> torch.dtype | None:
    """Return the dtype in which weights are gathered under a precision plugin; None: the dtype of the shards."""
    if isinstance(plugin, LowPrecision):
        return plugin.autocast_dtype
    if type(plugin) in either.both(
        either.FabricPrecision, either.TrainerPrecision, either.FabricHalf, either.TrainerHalf
    ):
        return None
    raise ValueError(
        f"`{type(plugin).__name__}` (precision={getattr(plugin, 'precision', None)!r}) does not run under 'fsdp2'. Use"
        " `precision=` with '32-true', 'bf16-true', '16-true', 'bf16-mixed', '16-mixed' or a name of lightning_lowprec,"
        " or one of its plugins (`HalfMixed` in place of Lightning's `MixedPrecision`)."
    )


def gathers_fp8(plugin: either.FabricPrecision, options: ShardOptions) -> bool:
    """Return whether float32 or bf16 weights are gathered as float8."""
    wanted, size = options.fp8_all_gather, options.reshard_after_forward
    if isinstance(plugin, LowPrecision):
        in_parts = None
        if size is not None and not isinstance(size, bool):
            in_parts = (
                f"`reshard_after_forward={size}` goes with weights in high precision only; True, False, None go with"
                " float8"
            )
        reason = plugin.gathers(options) or in_parts
        if plugin.not_sharded is not None:
            raise ValueError(f"`{plugin.not_sharded}` is not possible under FSDP2: {reason}, or leave it out.")
        if plugin.keeps_codes and wanted is False:
            raise ValueError(
                f"`fp8_all_gather=False` is not possible: `precision={plugin.precision!r}` keeps its weights as codes,"
                " which are gathered as they are. Use 'auto' or True."
            )
        if plugin.keeps_codes and in_parts is not None:
            raise ValueError(f"`precision={plugin.precision!r}` gathers its weights as codes, and {in_parts}.")
        if plugin.keeps_codes:
            return False  # its weights are codes already
    else:
        reason = f"`precision={getattr(plugin, 'precision', None)!r}` has no FP8 weights"
    if reason is not None and wanted is True:
        raise ValueError(f"`fp8_all_gather=True` is not possible: {reason}. Use 'auto' or False.")
    return wanted is not False and reason is None


@dataclass(frozen=True, kw_only=True)
class ParallelizeOptions(ShardOptions):
    """The arguments of :func:`parallelize`."""

    model: Module = field(kw_only=False)
    mesh: DeviceMesh = field(kw_only=False)
    plugin: LowPrecision = field(kw_only=False)

    def __post_init__(self) -> None:
        for name, value in (("replicate", self.replicate), ("shards", self.shards)):
            if value not in (1, None):
                raise ValueError(
                    f"`{name}={value!r}` is not valid in `parallelize`: the mesh says it. Pass such a mesh."
                )
        super().__post_init__()


@called_with(ParallelizeOptions)
def parallelize(options: ParallelizeOptions) -> Module:
    """Convert and shard ``model`` in place, in ``configure_model`` or in a ``parallelize_fn``.

        def configure_model(self):
            lightning_lowprec.parallelize(self, self.device_mesh, self.trainer.precision_plugin)

        ModelParallelStrategy(parallelize_fn=lambda model, mesh: parallelize(model, mesh, fabric.strategy.precision))

    Args:
        model: not sharded yet; a second call changes nothing.
        mesh: Lightning's ``device_mesh``, or a mesh of at most two dimensions (copies, shards).
        plugin: the precision.
        options: the fields of :class:`~lightning_lowprec.fsdp2.options.ShardOptions`. The mesh says how many copies,
            shards and tensor-parallel ranks there are, so ``replicate`` and ``shards`` raise.

    Returns:
        ``model`` itself.

    Raises:
        TypeError: the model was sharded already, but not by this function.
        ValueError: options that do not fit the precision or the model.
    """
    model, mesh, plugin, choices = options.model, options.mesh, options.plugin, take(ShardOptions, options)
    sharding = Sharding(choices)
    device = torch.device("cuda", torch.cuda.current_device()) if mesh.device_type == "cuda" else torch.device("cpu")
    sharding.meet(plugin, device)
    if not sharding.knows(model, plugin):
        plugin.convert_module(model)
    sharding.apply(model, mesh, plugin, device)
    return model


def gathered_line(model: nn.Module, shards: int) -> str | None:
    """Return what a rank sent in the last all-gather of each group, in one line.

    None: nothing was gathered so far, or there is one shard. ``shards``: the number of ranks that share a weight.
    """
    groups = {fqn: cast(nn.Module, m) for fqn, m in model.named_modules() if isinstance(m, FSDPModule)}
    records = {fqn: gathered_parameters(module) for fqn, module in groups.items()}
    gathered = {fqn: group for fqn, group in records.items() if any(one.all_gather_outputs for one in group)}
    if shards == 1 or not gathered:
        return None
    sent_as = "fsdp_pre_all_gather"  # the method of shards that send codes
    every = [(fqn, one) for fqn, group in gathered.items() for one in group]
    codes = [(fqn, one) for fqn, one in every if hasattr(local_tensor(one.sharded_param), sent_as)]
    for fqn, record in codes:
        wide = next((dtype_name(sent.dtype) for sent in record.all_gather_outputs if sent.dtype.itemsize > 1), None)
        if wide is not None:
            raise RuntimeError(
                f"the weights of {fqn or 'the root'!r} were to be gathered as float8, but {wide} was sent. Use"
                " `fp8_all_gather=False`, and please report it."
            )
    blocks = [group for fqn, group in gathered.items() if fqn and not is_batch_or_instance_norm(groups[fqn])]
    unit = "block" if blocks else "gather"
    blocks = blocks or list(gathered.values())
    sent = [tensor for group in blocks for one in group for tensor in one.all_gather_outputs]
    size = sum(tensor.nbytes for tensor in sent) / shards
    in_bf16 = sum(2 * local_tensor(one.sharded_param).numel() for group in blocks for one in group)
    dtype = "float8" if codes else " and ".join(sorted({dtype_name(tensor.dtype) for tensor in sent}))
    of_bf16 = size / max(in_bf16, 1)  # a rank that has nothing of a group sends padding only
    return f"all-gather: {dtype}, {in_units(size / len(blocks))} per {unit} and rank, {of_bf16:.2f}x of bf16"
