"""Cast the weights of modules to half precision and back to float32, and let their optimizers follow.

``transformers`` loads weights in the dtype of the checkpoint, often bf16, and masters leave half-precision weights in a
model. A precision with float32 weights would train both without masters, and lose updates.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final, final

import torch
from torch import Tensor, nn
from torch.nn import Module, Parameter
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lightning_lowprec.conversion import backends
from lightning_lowprec.conversion.selection import left_alone
from lightning_lowprec.masters.config import MasterConfig
from lightning_lowprec.masters.copies import watch
from lightning_lowprec.masters.float32_values import KEPT, MARK, NO_PLAIN_STEP, drop, is_marked, keep, kept, mark, raw
from lightning_lowprec.masters.kept_float32 import coupled, kept_float32
from lightning_lowprec.masters.moments import decode_on_load, float32_state
from lightning_lowprec.masters.optimizer import add_masters, remove_masters
from lightning_lowprec.masters.registry import existing_masters, places_of, registry_of
from lightning_lowprec.masters.step import refuse_plain_steps
from lightning_lowprec.messages import in_units, info
from lightning_lowprec.numerics.formats import HALF_DTYPES
from lightning_lowprec.numerics.parameters import parameters_of
from lightning_lowprec.numerics.rounding import upper_half
from lightning_lowprec.private.fsdp2 import reset_shards
from lightning_lowprec.private.torch_optimizers import brings_masters
from lightning_lowprec.private.torchao import parameters_of_copies

_OWN_MASTERS: Final = "lowprec_own_masters"  # an attribute of optimizers of which was said that they bring masters
_CASTABLE: Final = (torch.float32, *HALF_DTYPES)  # float64 is meant; codes of FP8 need a scale


@final
class HalfWeights:
    """Half-precision weights of a plugin: casts modules and gives the optimizers of their parameters masters.

    Modules and optimizers may be set up in any order: the float32 weights from before the cast are kept.
    """

    def __init__(
        self,
        config: MasterConfig,
        buffer_dtype: torch.dtype | None = None,
        accumulation: torch.dtype | None = None,
        *,
        cast_inputs: bool = False,
    ) -> None:
        self.config = config
        self.cast_inputs = cast_inputs
        """Whether the Trainer's batch is cast to the dtype of the weights."""
        self.buffer_dtype = buffer_dtype
        self.accumulation = accumulation
        """The dtype in which gradients accumulate, ``torch.float32`` or None: that of the weights."""
        self.keep_fp32: Sequence[str] = ()
        self._counted: set[int] = set()  # id(parameter) of those that were half precision at the set-up

    def cast(self, module: Module, dtype: torch.dtype, *, trains: bool = True) -> int:
        """Cast the module's parameters in place, and its buffers to ``buffer_dtype`` if there is one.

        Their float32 values are kept, in host memory those of parameters that do not train. Masters that an earlier
        run's optimizer still has become the masters of this run. Return the number of trainable parameters whose
        float32 values are not known, because they were half precision before the first call.
        """
        refuse_plain_steps()
        with_buffers, named = self._with_buffers(module), kept_float32(module, dtype, self.keep_fp32)
        trained = {id(p): p for p in module.parameters() if p.requires_grad}
        changed = {id(p): p.dtype for p in module.parameters() if p.dtype != dtype}
        half = [p for p in module.parameters() if p.dtype in HALF_DTYPES]
        known = existing_masters(half)
        # a master is rounded once, not from one half precision to the other
        _make_float32([p for p in half if id(p) in known and p.dtype != dtype], known)
        every_name = module.named_parameters(remove_duplicate=False)
        widened = [p for fqn, p in every_name if fqn in named.keys() - with_buffers]
        # loaded in half precision, or an earlier precision has cast them
        _make_float32([p for p in widened if p.dtype in HALF_DTYPES], known)
        skip = with_buffers | named.keys()
        values = known | cast_parameters(module, dtype, keep=True, buffer_dtype=self.buffer_dtype, skip=skip)
        for p in module.parameters():
            if p.dtype != dtype or not (p.requires_grad or id(p) in changed or id(p) in known):
                continue
            ties_away = self.config.form == "remainder" and not hasattr(p, "to_local")
            if ties_away and p.requires_grad and id(p) in values and id(p) in changed:  # as the steps round
                p.data.copy_(upper_half(values[id(p)]))
            mark(p)
            vars(p)[NO_PLAIN_STEP] = True
            if id(p) in values and (trains or id(p) in changed):
                on_host = not (trains and p.requires_grad)
                stored = changed.get(id(p), torch.float32) if on_host and id(p) not in known else torch.float32
                keep(p, values[id(p)].to(stored), on_host=on_host)
        watch(module)
        self._set_accumulation(module.parameters())
        rounded = {id(p) for p in half if id(p) in trained} - known.keys() - self._counted
        self._counted |= rounded
        return len(rounded)

    def _with_buffers(self, module: Module) -> set[str]:
        """Return the names of parameters that stay as they are, for float32 buffers, and of what no cast changes."""
        groups = [
            g for g in coupled(module) if g.is_batch_or_instance_norm or (g.buffers and self.buffer_dtype is None)
        ]
        ids = {id(p) for group in groups for p in group.params}
        kept = {fqn for fqn, p in module.named_parameters() if id(p) in ids}
        return kept | left_alone(module)

    def under_fsdp2(self) -> "HalfWeights | None":
        """Return the half weights of FSDP2's shards, whose gradients it reduces in float32; None for float32 shards."""
        if self.config.form == "fp32":
            if self.config.moments != "fp32":
                raise ValueError(
                    f"`MasterConfig(moments={self.config.moments!r})` with `form='fp32'` is not possible under FSDP2,"
                    " whose float32 shards take the place of masters. Use `form='remainder'`: it keeps the same masters"
                    " in 2 bytes per parameter less."
                )
            return None
        if self.accumulation is not None:
            raise ValueError(
                f"`grad_accumulation_dtype={self.accumulation}` with half-precision shards is not possible"
                " under FSDP2, which keeps their gradients in the dtype of the shards. Use `master_weights=True`: its"
                " shards and gradients are float32 under FSDP2."
            )
        sharded = HalfWeights(self.config, self.buffer_dtype)
        sharded.keep_fp32 = self.keep_fp32
        return sharded

    def add_masters(self, optimizer: Optimizer) -> None:
        """Give an optimizer masters, in place of an earlier precision's; call again when more parameters were cast."""
        if not optimizer.param_groups:  # stands for no optimizer in Lightning
            return
        if brings_masters(optimizer):
            for p in parameters_of(optimizer):
                drop(p)
            if not vars(optimizer).get(_OWN_MASTERS):
                vars(optimizer)[_OWN_MASTERS] = True
                info(
                    f"{type(optimizer).__name__} of FlashOptim keeps masters and moments itself, so it gets none of"
                    " ours: `master_weight_bits` says how many bits of a weight it keeps."
                )
            return
        registry = registry_of(optimizer)
        if registry is not None and registry.is_stale(self.config):
            params = {id(p): p for p in parameters_of(optimizer)}
            for key, value in existing_masters(params.values()).items():
                keep(params[key], value, on_host=False)
            remove_masters(optimizer)
        others = existing_masters(p for p in parameters_of(optimizer) if registry is None and any(places_of(p)))
        add_masters(optimizer, self.config, values=others)  # those of an optimizer that is set up again
        self._set_accumulation(parameters_of(optimizer))

    def _set_accumulation(self, params: Iterable[Tensor]) -> None:
        """Let autograd accumulate the gradients of half-precision parameters in float32, if that was chosen."""
        for p in params if self.accumulation is not None else ():
            if p.dtype in HALF_DTYPES:
                grad, p.grad = p.grad, None  # torch refuses a gradient of another dtype
                p.grad_dtype = torch.float32
                p.grad = None if grad is None else grad.float()

    def settle(self, modules: Iterable[Module], *, widen: bool) -> int:
        """Decide about weights that no optimizer took, when training begins; return the bytes kept in host memory.

        ``widen``: what no optimizer holds and nobody froze becomes float32 again, such as an average that the module
        keeps. Else its float32 values wait in host memory, with those of frozen weights.
        """
        self._counted = set()
        size = 0
        for module in modules:
            together = {id(p) for group in coupled(module) for p in group.params}
            for p in module.parameters():
                if (value := raw(p)) is None or p.dtype not in HALF_DTYPES:
                    continue
                if widen and p.requires_grad and id(p) not in together:
                    _make_float32([p], kept([p]))
                    unmark(p)
                else:
                    keep(p, value, on_host=True)
                    size += value.numel() * value.element_size()
        return size

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_counted": set()}


@final
class Float32Weights:
    """Makes parameters float32, and lets optimizers follow."""

    def __init__(self) -> None:
        self._fqns: set[str] = set()

    def make(self, module: Module, *, frozen_too: bool = False) -> str | None:
        """Make the trainable half-precision parameters of ``module`` float32, in place; return the change in words.

        Parameter objects, ties and gradients stay. A parameter gets the value of its master, if an optimizer of an
        earlier run still has one. Codes, and frozen parameters that no plugin has cast, stay. Buffers become float32
        where they are :func:`coupled`. With ``frozen_too`` all frozen parameters change, to be unfrozen later.
        """
        half = [p for p in module.parameters() if p.dtype in HALF_DTYPES and not backends.keeps_master(p)]
        half = [p for p in half if p.requires_grad or frozen_too or is_marked(p)]
        if not half:
            return None
        more = sum(p.numel() * (4 - p.element_size()) for p in half if not is_lazy(p))
        masters = existing_masters(half)
        self._make(module, half, masters)
        exact = sum(id(p) in masters for p in half)
        source = "their masters' values" if exact else "their rounded values"
        if 0 < exact < len(half):
            source += f" ({len(half) - exact} of them from rounded values, without masters)"
        return (
            f"{len(half)} trainable half-precision parameters became float32, {in_units(more)} more, and start from"
            f" {source}"
        )

    def undo_cast(self, module: Module, masters: Mapping[int, Tensor], *, all_cast: bool = True) -> None:
        """Make the parameters float32 that a plugin has cast, with ``masters``, by ``id(parameter)``, where known.

        With ``all_cast=False`` only those of ``masters``.
        """
        half = [p for p in module.parameters() if p.dtype in HALF_DTYPES and is_marked(p)]
        half = [p for p in half if all_cast or id(p) in masters]
        if half:
            self._make(module, half, masters)

    def _make(self, module: Module, half: list[Parameter], masters: Mapping[int, Tensor]) -> None:
        _make_float32(half, masters)
        for p in half:
            mark(p)
        for group in coupled(module):
            if any(map(_is_made_float32, group.params)):
                for buffer in group.buffers:
                    buffer.data = buffer.data.float()
        self._fqns.update(fqn for fqn, p in module.named_parameters() if _is_made_float32(p))

    def note_sharded(self, module: Module) -> None:
        """Note that sharding has replaced the parameters of ``module``."""
        for fqn, p in module.named_parameters():
            if fqn in self._fqns:
                mark(p)

    def follow(self, optimizer: Optimizer) -> None:
        """Remove masters that ``optimizer`` has of these parameters, and make its half-precision state float32."""
        if parameters_of_copies(optimizer) is not None:  # its own optimizers were never any other precision's
            return
        params = list(filter(_is_made_float32, parameters_of(optimizer)))
        if params:
            remove_masters(optimizer)
        for p in [p for p in params if p in optimizer.state]:
            optimizer.state[p] = float32_state(optimizer.state[p])
        decode_on_load(optimizer)


def _is_made_float32(parameter: Tensor) -> bool:
    return parameter.dtype is torch.float32 and is_marked(parameter)


def unmark(parameter: Tensor) -> None:
    """Forget what :func:`mark` has noted."""
    for name in (MARK, NO_PLAIN_STEP, KEPT):
        vars(parameter).pop(name, None)


def cast_parameters(
    module: Module,
    dtype: torch.dtype,
    *,
    keep: bool,
    buffer_dtype: torch.dtype | None = None,
    skip: Collection[str] = (),
) -> dict[int, Tensor]:
    """Cast the floating-point parameters of ``module`` in place; the Parameter objects and their ties stay.

    Frozen parameters and existing gradients are cast too. With ``keep``, return the float32 original of every parameter
    that was cast, by ``id(parameter)``. ``buffer_dtype`` None leaves buffers alone (running statistics need float32).
    Parameters and buffers that ``skip`` names stay; one name of a tied parameter is enough.
    """
    skipped = {id(p) for name, p in module.named_parameters(remove_duplicate=False) if name in skip}
    originals = {}
    for parameter in module.parameters():
        if parameter.dtype in _CASTABLE and parameter.dtype != dtype and id(parameter) not in skipped:
            if keep and not is_lazy(parameter):
                originals[id(parameter)] = parameter.data.float()
            cast_parameter(parameter, dtype)
    if any(hasattr(parameter, "to_local") for parameter in module.parameters()):
        reset_shards(module)
    if buffer_dtype is not None:
        for name, buffer in module.named_buffers():
            if buffer.dtype in _CASTABLE and name not in skip:
                buffer.data = buffer.data.to(buffer_dtype)
    return originals


def _make_float32(params: Collection[Parameter], masters: Mapping[int, Tensor]) -> None:
    """Cast ``params`` to float32 in place; ``masters`` are their values by ``id(parameter)``, where known."""
    for p in params:
        cast_parameter(p, torch.float32)
        drop(p)
        if id(p) in masters:
            p.data.copy_(masters[id(p)])


def cast_parameter(parameter: nn.Parameter, dtype: torch.dtype) -> None:
    """Cast one parameter and its gradient in place; a lazy parameter gets its values in the new dtype later."""
    grad, parameter.grad = parameter.grad, None  # torch refuses a gradient of another dtype
    if hasattr(parameter, "to_local"):  # `.data =` would leave the shard of a DTensor unchanged
        swapped = nn.Parameter(parameter.data.to(dtype), parameter.requires_grad)
        torch.utils.swap_tensors(parameter, swapped)  # type: ignore[no-untyped-call]
    else:
        parameter.data = parameter.data.to(dtype)
    if parameter.grad_dtype != dtype:  # set for the old dtype; a parameter without a setting follows its dtype
        parameter.grad_dtype = dtype
    parameter.grad = None if grad is None else grad.to(dtype)
