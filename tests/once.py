"""What takes long to make and several workers of pytest-xdist want: the first one makes it, the others wait and read.

``--dist worksteal`` gives tests of one file to two workers, and each would fill the fixtures of the module.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock


@contextmanager
def once(folder: Path, name: str) -> Iterator[tuple[Path, bool]]:
    """Yield a folder that all workers share, and whether it is still to be filled.

    Args:
        folder: a temporary folder of pytest, which tells where those of all workers lie.
        name: of the shared folder; one in a run of pytest. Without workers the folder is in ``folder``.
    """
    root = next((parent.parent for parent in folder.parents if parent.name.startswith("popen-gw")), folder)
    shared, complete = root / name, root / f"{name}.complete"
    with FileLock(root / f"{name}.lock"):
        shared.mkdir(exist_ok=True)
        yield shared, not complete.exists()
        complete.touch()
