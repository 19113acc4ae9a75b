"""Spare the null GPU the tuning of Triton kernels, which would compile every variant and learn nothing."""

import functools
from typing import Any

from torch.utils._triton import has_triton


@functools.cache
def take_first_variant() -> None:
    """Let kernels that are tuned, Triton's and inductor's, have one variant in place of many, in this process."""
    if not has_triton():
        return
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner
    from triton.runtime.autotuner import Autotuner

    run, make = Autotuner.run, CachingAutotuner.__init__

    @functools.wraps(run)
    def run_first(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.configs = self.configs[:1]
        return run(self, *args, **kwargs)

    @functools.wraps(make)
    def make_with_first(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        self.configs = self.configs[:1]

    Autotuner.run = run_first
    CachingAutotuner.__init__ = make_with_first  # type: ignore[method-assign]
