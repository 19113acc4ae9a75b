"""What the hooks of the site write: the list of names is the table of the code, the notebook a page."""

import json
import re

from tests.representatives import TABLE
from tests.site.pages import DOCS
from tools.site import hooks, notebook


def test_the_list_of_names_has_every_name_with_its_plugin_and_options():
    written = hooks.on_page_markdown((DOCS / "names.md").read_text(), page=None)
    rows = re.findall(r"^\| `([\w-]+)` \| `(\w+)` \| (.*?) \| `[\w-]+` \| .+ \|$", written, flags=re.MULTILINE)
    assert [row[:2] for row in rows] == [(name, row.plugin.__name__) for name, row in TABLE.items()]
    assert dict(zip(TABLE, rows, strict=True))["fp8-rowwise-sr"][2] == (
        "`recipe='rowwise'`, `master_weights='stochastic'`"
    )
    assert "`make docs` writes the list here" not in written
    assert hooks.on_page_markdown("# Other", page=None) == "# Other"


def test_the_page_of_the_notebook_has_every_cell_and_output():
    written = hooks.on_page_markdown((DOCS / "getting-started.md").read_text(), page=None)
    cells = json.loads(notebook.NOTEBOOK.read_text())["cells"]
    for cell in cells[1:]:
        source = "".join(cell["source"])
        shown = source.replace("](../docs/", "](") if cell["cell_type"] == "markdown" else f"```python\n{source}\n```"
        assert shown in written
    shown = [line for line in written.splitlines() if line.startswith("<pre ")]
    assert len(shown) == sum(len(cell.get("outputs", [])) for cell in cells) - 1, "the picture"
    assert all(line.endswith("</pre>") for line in shown), "Markdown leaves a line of HTML alone"
    assert len([line for line in written.splitlines() if 'src="data:image/png;base64,' in line]) == 1
    assert re.findall("^# .*", written, flags=re.MULTILINE)[0] == "# Getting started"
    assert "](../" not in written
