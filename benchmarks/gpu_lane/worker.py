"""A worker process: imports, then runs the items whose keys come on its input, until one fails.

Results go through a pipe of their own, so that nothing a library prints gets between them.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import traceback
from typing import Any

from benchmarks.gpu_lane.item import PROTOCOL_FD, missing_library, send
from benchmarks.gpu_lane.measure import describe, start_afresh
from benchmarks.gpu_lane.results import FAILED, OK, clean
from benchmarks.gpu_lane.settings import Settings
from benchmarks.gpu_lane.values import left_as_found, use_what_the_device_has, values_exist

PR_SET_PDEATHSIG = 1


def main() -> None:
    _end_with_the_parent()
    name, settings, needs = sys.argv[1], Settings.from_json(sys.argv[2]), sys.argv[3:]
    fd = int(os.environ[PROTOCOL_FD])
    os.set_inheritable(fd, False)  # what this process starts must not hold the pipe open
    from benchmarks.gpu_lane.parts import PARTS

    use_what_the_device_has()
    missing_library(needs)  # imported while another worker has the device; what is missing will show itself
    if not settings.cuda:
        import torch

        torch.set_num_threads(1)
    for line in sys.stdin:
        order = json.loads(line)
        entry = _run(PARTS[name], order["key"], settings)
        send(fd, entry)
        if entry["status"] != OK and not entry["reusable"]:
            break
    sys.stdout.flush()
    os._exit(0)  # no teardown of a CUDA context that may be broken


def _end_with_the_parent() -> None:
    """A parent that is killed at a time limit must not leave a process on the GPU beside the next call's."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


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
