"""Look at one micro-batch: hooks on converted layers write numbers into one buffer, the only one that the host reads.

    arm      hooks on the layers, a buffer of zeros
    forward  input, weight, output  -> buffer        first call of each layer only: a checkpoint calls it again
    backward gradient of the output -> buffer
    disarm   hooks away
    read     one all-reduce, one copy to the host

Between `disarm` and the next `arm` nothing of this exists.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from lightning_lowprec.callbacks.readings import TENSORS, Reading, Tensor3
from lightning_lowprec.checkpoints.optimizer_state import clean
from lightning_lowprec.conversion import backends
from lightning_lowprec.conversion.backends import Backend
from lightning_lowprec.numerics import casts
from lightning_lowprec.private.torch import local_tensor, outside_of_checkpoints
from lightning_lowprec.private.torch_modules import whole

_PER_TENSOR: Final = len(casts.FIELDS)
_OUTPUT: Final = len(TENSORS) * _PER_TENSOR
"""The column where the norms of the exact output and of its error stand."""
_WIDTH: Final = _OUTPUT + 2
_PEAKS: Final = 2
"""Of the numbers of a tensor, the first two (amax and scale) are no sums over the ranks."""
_NOT_CALLED: Final = "it was not called, or in compiled code alone"
_CUT: Final = "tensor parallelism cuts the weight"


@dataclass
class Site:
    """One layer that is looked at."""

    fqn: str
    layer: nn.Module
    backend: Backend
    shard: Tensor | None
    """The weight between forwards: under FSDP2 the shard of this rank."""
    seen: bool = False
    gradient_seen: bool = False
    missing: str | None = None


@final
class Sampler:
    """The samplings of one model that has been set up: every ``every``-th row, on the device of the layers."""

    def __init__(self, model: nn.Module, *, every: int, device: torch.device) -> None:
        self.model, self.every, self.device = model, every, device
        self.sites: list[Site] = []
        self.missing: dict[str, str] = {}
        """By fqn, why a converted layer was not looked at in the last sampling."""
        self.is_armed = False
        """Whether the next forward is looked at."""
        self._numbers = torch.empty(0)
        self._offset = 0
        self._handles: list[RemovableHandle] = []

    def arm(self, turn: int) -> None:
        """Look at the next forward and its backward; ``turn`` chooses the rows."""
        self.disarm()
        self._offset = turn
        self.sites = []
        for fqn, layer in self.model.named_modules():
            if (owner := backends.owner(layer)) is not None:
                name = clean(f"{fqn}.").removesuffix(".")  # that the layer has without compilation and checkpointing
                self.sites.append(Site(name, layer, owner, layer._parameters.get("weight")))
        with torch.inference_mode(False):
            self._numbers = torch.zeros(len(self.sites), _WIDTH, device=self.device)
        for index, site in enumerate(self.sites):
            hook = partial(self._on_forward, index, self._numbers)
            self._handles.append(site.layer.register_forward_hook(hook, prepend=True, with_kwargs=True))
        self.is_armed = True

    def disarm(self) -> None:
        """Take the hooks away, if there are any."""
        for handle in self._handles:
            handle.remove()
        self._handles, self.is_armed = [], False

    # ---- the hooks; `numbers` is the buffer of the sampling in which they were made

    def _on_forward(
        self, index: int, numbers: Tensor, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        if not self.is_armed or numbers is not self._numbers or not (layer.training or torch.is_grad_enabled()):
            return
        input = args[0] if args else kwargs.get("input")
        if not (isinstance(input, Tensor) and isinstance(output, Tensor) and input.numel() and not input.is_meta):
            return
        site = self.sites[index]
        if not site.seen:
            site.seen = True
            with _aside(output.device.type):
                self._look(site, numbers[index], input.detach(), output.detach())
        if output.requires_grad and not site.gradient_seen and site.missing is None:
            site.gradient_seen = True
            numerics = site.backend.numerics(layer)
            if isinstance(numerics, casts.LayerNumerics):
                register: Any = whole(output).register_hook  # `output` may be a part of padded rows
                register(partial(self._on_gradient, numbers[index], numerics))

    def _look(self, site: Site, numbers: Tensor, input: Tensor, output: Tensor) -> None:
        numerics, layer = site.backend.numerics(site.layer), site.layer
        if not isinstance(numerics, casts.LayerNumerics):
            site.missing = numerics or ""
            return
        if isinstance(input, DTensor) or isinstance(numerics.values, DTensor):
            site.missing = _CUT
            return
        rows = casts.sampled(input, self.every, self._offset).to(output.dtype)
        self._write(numbers, "input", input, rows, numerics.input, output.dtype)
        values, first = _values(site, numerics)
        if values is None or not values.numel():
            return
        values = values.to(output.device)
        self._write(
            numbers, "weight", values, casts.sampled(values, self.every, self._offset), numerics.weight, values.dtype
        )
        bias = layer._parameters.get("bias")
        last = first + len(values)
        of_rows = casts.sampled(output, self.every, self._offset)[:, first:last]
        own_bias = None if bias is None else local_tensor(bias.detach())[first:last]
        numbers[_OUTPUT:].copy_(casts.output_error(of_rows, rows, values, own_bias))

    def _on_gradient(self, numbers: Tensor, numerics: casts.LayerNumerics, gradient: Tensor) -> None:
        with _aside(gradient.device.type):
            rows = casts.sampled(gradient, self.every, self._offset)
            self._write(numbers, "gradient", gradient, rows, numerics.gradient, gradient.dtype)

    def _write(
        self, numbers: Tensor, tensor: Tensor3, x: Tensor, rows: Tensor, cast: casts.Cast | str, dtype: torch.dtype
    ) -> None:
        start = TENSORS.index(tensor) * _PER_TENSOR
        values = casts.measure(x, rows, cast if isinstance(cast, casts.Cast) else None, dtype)
        numbers[start : start + _PER_TENSOR].copy_(values)

    # ---- the numbers

    def read(self, step: int) -> list[Reading]:
        """Return the readings of the last sampling, the same on all ranks; every rank must call this."""
        reasons = {site.fqn: site.missing if site.seen else _NOT_CALLED for site in self.sites}
        self.missing = {fqn: reason for fqn, reason in reasons.items() if reason}
        counts, peaks = self._reduced()
        readings = []
        for site, counted, peak in zip(self.sites, counts.tolist(), peaks, strict=True):
            output_db = _decibels(*counted[_OUTPUT:])
            for index, tensor in enumerate(TENSORS):
                reading = _reading(counted[index * _PER_TENSOR :], peak[:, index])
                if reading is not None:
                    readings.append(Reading(step=step, fqn=site.fqn, tensor=tensor, output_db=output_db, **reading))
        return readings

    def _reduced(self) -> tuple[Tensor, Tensor]:
        """Return the sums over all ranks (L, 14), and amax and scale of each rank (L, ranks, 3, 2), on the host."""
        ranks, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
        numbers, layers = self._numbers, len(self._numbers)
        numbers[:, _OUTPUT:].square_()
        peaks = numbers.new_zeros(ranks, layers, len(TENSORS), _PEAKS)
        peaks[rank] = numbers[:, :_OUTPUT].view(layers, len(TENSORS), _PER_TENSOR)[..., :_PEAKS]
        both = torch.cat([numbers.flatten(), peaks.flatten()])
        if ranks > 1:
            dist.all_reduce(both)
        host = both.cpu()
        sums = host[: numbers.numel()].view(layers, _WIDTH)
        return sums, host[numbers.numel() :].view(ranks, layers, len(TENSORS), _PEAKS).transpose(0, 1)


def _decibels(signal: float, noise: float) -> float | None:
    return 10 * math.log10(signal / noise) if 0 < noise < math.inf and 0 < signal < math.inf else None


def _values(site: Site, numerics: casts.LayerNumerics) -> tuple[Tensor | None, int]:
    """Return rows of the weight in high precision, and the index of the first of them in the whole weight."""
    if numerics.values is not None:
        return numerics.values.detach(), 0
    shard = site.shard
    if not isinstance(shard, DTensor):
        return None, 0
    local = local_tensor(shard.detach())
    dim = next(dim for dim, placement in enumerate(shard.placements) if placement.is_shard(0))
    return local, shard.device_mesh.get_local_rank(dim) * len(local)  # shards of codes are equal


def _reading(counted: list[float], peaks: Tensor) -> dict[str, Any] | None:
    """Return the numbers of one tensor from its counts over all ranks and the (ranks, 2) amax and scale of each."""
    amax, scales = float(peaks[:, 0].amax()), peaks[:, 1]
    _, _, values, codes = counted[:_PER_TENSOR]
    seen = scales[peaks.any(dim=1)]  # the scale of an infinite amax is 0
    if not len(seen):  # no rank has called the layer, or no backward has reached it
        return None
    is_known = math.isfinite(amax) and float(seen.amin()) != casts.UNKNOWN
    return {
        "amax": amax if math.isfinite(amax) else math.nan,
        "underflow": (values - codes) / max(values, 1.0) if is_known else None,
        "scale": float(seen.amin()) if is_known else None,
    }


@contextmanager
def _aside(device_type: str) -> Iterator[None]:
    """Surround operations that autograd, autocast and selective checkpoints must not see."""
    with torch.no_grad(), torch.autocast(device_type, enabled=False), outside_of_checkpoints():
        yield
