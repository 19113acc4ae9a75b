"""Counts what this rank puts into the all-gathers of a sharded model."""

from collections import Counter

from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather


class CountedGather(DefaultAllGather):
    """The all-gathers of one FSDP2 group, by the dtype that is sent: calls, and bytes."""

    def __init__(self):
        self.calls, self.sent = Counter(), Counter()

    def __call__(self, output_tensor, input_tensor, *args, **kwargs):
        self.calls[input_tensor.dtype] += 1
        self.sent[input_tensor.dtype] += input_tensor.nbytes
        return super().__call__(output_tensor, input_tensor, *args, **kwargs)


def count_gathers(model):
    """Begin to count, by the fqn of the module that is a group; the model is sharded already."""
    model = getattr(model, "module", model)  # of a wrapper of Fabric's
    gathers = {fqn: CountedGather() for fqn, group in model.named_modules() if isinstance(group, FSDPModule)}
    for fqn, gather in gathers.items():
        model.get_submodule(fqn).set_custom_all_gather(gather)
    return gathers
