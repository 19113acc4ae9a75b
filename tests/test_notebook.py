"""The notebook of the examples runs as a user runs it, and what is committed is what its cells print."""

import copy
import re

import pytest

from tools import notebook as tool

COMMITTED = tool.load()
CODE = tool.code_cells(COMMITTED)
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # one fixture runs all cells: a minute, or more


def shown(cell) -> str:
    return "".join(output.data["text/plain"] for output in cell.outputs if "data" in output)


def cell_with(notebook, text: str):
    (cell,) = [cell for cell in tool.code_cells(notebook) if text in cell.source]
    return cell


FEWER = {
    "max_steps=60": "max_steps=4", "val_every=20": "val_every=2", "val_batches=10": "val_batches=2",
    "max_steps=30": "max_steps=3", "val_check_interval=30": "val_check_interval=3", '"bf16-mixed", ': "",
}  # fmt: skip
"""Steps and names of the notebook, and those of a run in these tests; the committed outputs are those of all."""


@pytest.fixture(scope="module")
def executed(tmp_path_factory):
    notebook = copy.deepcopy(COMMITTED)
    for steps, fewer in FEWER.items():
        assert any(steps in cell.source for cell in tool.code_cells(notebook)), steps
        for cell in tool.code_cells(notebook):
            cell.source = cell.source.replace(steps, fewer)
    return tool.execute(notebook, tmp_path_factory.mktemp("notebook"))


def test_it_runs_without_a_complaint_and_so_did_the_committed_outputs(executed):
    for notebook, steps in ((COMMITTED, 30), (executed, 3)):
        assert tool.complaints(notebook) == []
        said = cell_with(notebook, "trainer.fit").outputs[-1].text.strip()
        assert re.search(rf"val_loss after {steps} steps: \d\.\d\d$", said)
        assert "within 1%" in shown(cell_with(notebook, "lowprec.compare"))
        assert "image/png" in cell_with(notebook, "loss.png").outputs[0].data
        assert [o.output_type for o in cell_with(notebook, "lowprec.compare").outputs] == ["execute_result"], "no bar"
        assert "Try first" in shown(cell_with(notebook, "lowprec.doctor()"))


@pytest.mark.parametrize("mark", ["ByteGPT()\nlowprec.plan", "with torch.device", "trainer.precision_plugin.plan"])
def test_a_plan_is_the_committed_one(executed, mark):
    assert shown(cell_with(executed, mark)) == shown(cell_with(COMMITTED, mark)) != ""


def test_committed_outputs_are_of_the_committed_cells_which_use_public_names_and_links_that_lead_somewhere():
    assert [cell.metadata[tool.EXECUTED] for cell in CODE] == [tool.digest(cell.source) for cell in CODE]
    assert [cell.execution_count for cell in CODE] == list(range(1, len(CODE) + 1))
    silent = [cell.source for cell in CODE[2:] if not cell.outputs]
    assert silent == [], "every cell but the first two shows something"
    source = "\n".join(cell.source for cell in CODE)
    assert not re.findall(r"import _(?!_)|\._(?!_)", source)
    assert source.count("\n") <= 100
    prose = "\n".join(cell.source for cell in COMMITTED.cells if cell.cell_type == "markdown")
    links = re.findall(r"\]\(([^)#]+)\)", prose)
    assert len(links) >= 5
    assert [link for link in links if not (tool.NOTEBOOK.parent / link).is_file()] == []
