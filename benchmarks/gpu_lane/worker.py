"""A worker process: imports, then runs the items whose keys come through its pipe, until one fails."""

from __future__ import annotations

import os
import sys
import traceback
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.gpu_lane.item import begin, missing_library
from benchmarks.gpu_lane.measure import describe, start_afresh
from benchmarks.gpu_lane.results import FAILED, OK, clean
from benchmarks.gpu_lane.settings import Settings
from benchmarks.gpu_lane.values import left_as_found, use_what_the_device_has, values_exist


def main() -> None:
    """Run items of a part until the parent closes the pipe, or a failed item has left the device broken."""
    pipe = begin()
    part, settings, needs = pipe.recv()
    from benchmarks.gpu_lane.parts import PARTS

    use_what_the_device_has()
    missing_library(needs)  # imported while another worker has the device; what is missing will show itself
    if not settings.cuda:
        import torch

        torch.set_num_threads(1)
    while (key := _next(pipe)) is not None:
        entry = _run(PARTS[part], key, settings)
        pipe.send(entry)
        if entry["status"] != OK and not entry["reusable"]:
            break
    sys.stdout.flush()
    os._exit(0)  # no teardown of a CUDA context that may be broken


def _next(pipe: Connection) -> str | None:
    """The key of the next item, or None at the end."""
    try:
        return str(pipe.recv())
    except EOFError:
        return None


def _run(part: Any, key: str, settings: Settings) -> dict[str, Any]:
    try:
        with left_as_found():
            return {"status": OK, "figures": clean(part.run(key, settings))}
    except BaseException as error:  # SystemExit of a library too: the parent must hear of it
        traceback.print_exc()
        reason = describe(error)
    return {"status": FAILED, "reason": reason, "reusable": _still_works(settings)}


def _still_works(settings: Settings) -> bool:
    """Whether the device still computes after an error; most CUDA errors stay for the life of a process."""
    import torch

    try:
        start_afresh(settings.torch_device)
        found = float(torch.ones(2, device=settings.torch_device).sum())
        return found == 2.0 or not values_exist()
    except BaseException:
        return False


if __name__ == "__main__":
    main()
