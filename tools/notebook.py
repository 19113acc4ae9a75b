"""Execute the notebook of the examples and write it with its outputs: the same notebook on every machine.

    python -m tools.notebook

Every cell keeps a digest of the source that was executed; what differs from run to run for no reason is left out.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

ROOT: Final = Path(__file__).parents[1]
NOTEBOOK: Final = ROOT / "examples" / "first_steps.ipynb"
EXECUTED: Final = "executed"
"""The key in the metadata of a cell with the digest of the source that made the outputs."""
_PATH: Final = re.compile(r"(?<![\w.>/\\])(?:~|[A-Za-z]:)?[/\\](?:[^\s'\"`:;,()<>|/\\]+[/\\])+")
"""The folders of an absolute path."""
TIMEOUT: Final = 600  # seconds for one cell; on a quiet machine the longest takes 30


def execute(notebook: NotebookNode, folder: Path) -> NotebookNode:
    """Execute all cells in a fresh kernel of this Python, in ``folder``, and return the notebook with its outputs.

    Raises:
        CellExecutionError: a cell failed.
    """
    found = os.environ.get("PYTHONPATH")
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *([found] if found else [])])}
    environ |= {"IPYTHONDIR": str(folder / ".ipython"), "MPLCONFIGDIR": str(folder / ".matplotlib")}
    notebook = nbformat.from_dict(notebook)
    client = NotebookClient(
        notebook,
        timeout=TIMEOUT,
        kernel_name="python3",
        resources={"metadata": {"path": str(folder)}},
        startup_timeout=TIMEOUT,
    )
    client.execute(env=environ)
    return cleaned(notebook)


def cleaned(notebook: NotebookNode) -> NotebookNode:
    """Leave out times and versions of the execution, number the cells, and note what was executed."""
    notebook.metadata = NotebookNode(
        kernelspec=NotebookNode(display_name="Python 3", language="python", name="python3"),
        language_info=NotebookNode(name="python"),
    )
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number}"
        cell.metadata = NotebookNode()
        if cell.cell_type == "code":
            cell.metadata[EXECUTED] = digest(cell.source)
            cell.outputs = _joined(cell.outputs)
    return notebook


def _joined(outputs: list[Any]) -> list[Any]:
    """Join outputs of one stream: how a kernel cuts them is chance."""
    joined: list[Any] = []
    for output in outputs:
        if output.output_type == "stream" and joined and joined[-1].get("name") == output.name:
            joined[-1].text += output.text
        else:
            joined.append(output)
    return joined


def digest(source: str) -> str:
    """Return a short digest of the source of a cell."""
    return hashlib.sha256(source.encode()).hexdigest()[:16]


def code_cells(notebook: NotebookNode) -> list[NotebookNode]:
    """Return the cells with code."""
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def complaints(notebook: NotebookNode) -> list[str]:
    """Return what must not be published: errors, warnings and the like on stderr, paths of this machine."""
    found = []
    for cell in code_cells(notebook):
        for output in cell.outputs:
            pieces = [text for kind, text in output.get("data", {}).items() if kind != "image/png"]
            for shown in (output.get("text", ""), *pieces):
                if _PATH.search(shown):
                    found.append(f"{cell.source!r} tells about this machine: {shown}")
            said = output.get("text", "") if output.get("name") == "stderr" else ""
            if output.output_type == "error" or re.search(r"warn|error|traceback|fail", said, flags=re.IGNORECASE):
                found.append(f"{cell.source!r}: {said or output.get('evalue')}")
    return found


def load(path: Path = NOTEBOOK) -> NotebookNode:
    """Read the notebook."""
    return nbformat.read(path, as_version=4)


def main() -> int:
    """Execute the notebook and write it; return 1, with nothing written, if a cell complains."""
    with tempfile.TemporaryDirectory() as folder:
        notebook = execute(load(), Path(folder))
    found = complaints(notebook)
    if found:
        print("\n".join(found), file=sys.stderr)
        return 1
    nbformat.write(notebook, NOTEBOOK)
    print(f"{NOTEBOOK.relative_to(ROOT)} is executed and written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
