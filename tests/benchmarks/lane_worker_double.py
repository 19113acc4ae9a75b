"""Stands in for a worker process of the GPU lane: the item's key says how it ends."""

import os
import time

from benchmarks.gpu_lane import item


def main():
    pipe = item.begin()
    _, settings, _ = pipe.recv()
    while True:
        key = pipe.recv()
        item.stage("warm-up", batch=settings.batch, first_step_s=1.5)
        if key == "crash":
            print("a library's last words", flush=True)
            os._exit(17)
        if key == "hang":
            time.sleep(60)
        if key == "large" and settings.batch == 4:
            pipe.send({"status": "failed", "reason": "OutOfMemoryError: CUDA out of memory"})
        elif key == "error":
            pipe.send({"status": "failed", "reason": "ValueError: no", "reusable": True})
        else:
            pipe.send({"status": "ok", "figures": {"pid": os.getpid(), "batch": settings.batch}})


if __name__ == "__main__":
    main()
