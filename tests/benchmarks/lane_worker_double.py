"""Stands in for a worker process of the GPU lane: the item's key says how it ends."""

import json
import os
import sys
import time


def main() -> None:
    batch = json.loads(sys.argv[2])["batch"]
    fd = int(os.environ["GPU_LANE_FD"])

    def send(**message: object) -> None:
        os.write(fd, (json.dumps(message) + "\n").encode())

    for line in sys.stdin:
        key = json.loads(line)["key"]
        send(stage="warm-up", figures={"batch": batch, "first_step_s": 1.5})
        if key == "crash":
            print("a library's last words", flush=True)
            os._exit(17)
        if key == "hang":
            time.sleep(60)
        if key == "large" and batch == 4:
            send(status="failed", reason="OutOfMemoryError: CUDA out of memory")
        elif key == "error":
            send(status="failed", reason="ValueError: no", reusable=True)
        else:
            send(status="ok", figures={"pid": os.getpid(), "batch": batch})


if __name__ == "__main__":
    main()
