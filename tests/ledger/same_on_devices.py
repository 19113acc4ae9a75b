"""Show that weights in half precision and masters do on every GPU what they do on an H200.

python -m tests.ledger.same_on_devices

Trains every such name on the null GPU as each device, and compares what a step waits for, copies and multiplies. Takes
a minute per device; ``tests/ledger/test_every_name.py`` trains one of the names in CI.
"""

import json
import subprocess
import sys

from benchmarks.ledger import launch
from tests.ledger import names_on
from tests.ledger.test_every_name import REFUSES, of_masters
from tests.representatives import once, representatives


def main() -> int:
    """Return 1 if any name does otherwise on a device that does not refuse it."""
    names = [name for name in once(representatives()) if of_masters(name)]
    outcomes = {}
    for device in ("h200", "b200", "rtx5090", "rtx4090", "a100"):
        command = [sys.executable, "-m", names_on.__name__, *names]
        ended = subprocess.run(command, env=launch.environment(device), text=True, capture_output=True, check=True)
        outcomes[device] = json.loads(ended.stdout.splitlines()[-1])
    others = 0
    for device in ("b200", "rtx5090", "rtx4090", "a100"):
        run = [name for name in names if name not in REFUSES[device]]
        apart = [name for name in run if outcomes[device][name] != outcomes["h200"][name]]
        others += len(apart)
        print(f"{device}: {len(run) - len(apart)} of {len(run)} names as on an h200; otherwise: {apart}")
    return int(others > 0)


if __name__ == "__main__":
    sys.exit(main())
