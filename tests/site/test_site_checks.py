"""The tools of the site find what is wrong, and the list of names is the table of the code."""

import json
import re

import pytest

from tests.representatives import TABLE
from tests.site.pages import DOCS
from tools.site import check, hooks, notebook


def a_site(folder, body: str):
    (folder / "search").mkdir()
    (folder / "search" / "search_index.json").write_text(json.dumps({"docs": [{"location": "index.html#top"}]}))
    (folder / "index.html").write_text(f'<h1 id="top">Title</h1><img src="p.png">{body}')
    (folder / "p.png").write_bytes(b"")
    return folder


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        ('<a href="#top">x</a><a href="index.html">x</a><a href="https://example.org">x</a>', None),
        ('<a href="none.html">x</a>', "index.html: none.html leads nowhere"),
        ('<a href="index.html#none">x</a>', "index.html: index.html#none has no such anchor"),
        ('<img src="none.png">', "index.html: none.png leads nowhere"),
        ('<script src="https://example.org/a.js"></script>', "index.html: loads https://example.org/a.js"),
    ],
    ids=["whole", "no-page", "no-anchor", "no-picture", "another-host"],
)
def test_every_fault_is_found(body, fault, tmp_path, capsys: pytest.CaptureFixture[str]):
    site = a_site(tmp_path, body)
    assert check.faults(site) == ([] if fault is None else [fault])
    assert check.main([str(site)]) == (fault is not None)
    assert (fault or "every link") in capsys.readouterr().out


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
