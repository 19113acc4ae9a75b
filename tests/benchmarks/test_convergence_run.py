"""The whole way of `python -m benchmarks.convergence` in toy sizes: training, going on, report, pictures."""

import json
import re
import shutil
from pathlib import Path

import pytest

from benchmarks.convergence import page
from benchmarks.convergence.__main__ import SMOKE_NAMES, main
from benchmarks.convergence.precisions import FAST
from benchmarks.convergence.results import Results
from benchmarks.convergence.runs import Runs, Task, record, train_all
from benchmarks.convergence.subjects import smoke
from lightning_lowprec.tools.compare import runner
from lightning_lowprec.tools.compare.result import Interval
from tests.once import once


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """The results of one seed, to which a second call added another seed."""
    own = tmp_path_factory.mktemp("convergence")
    with once(own, "convergence-of-all") as (out, missing):
        if missing:
            _trained_twice(out)
        return shutil.copytree(out, own / "out")


def _trained_twice(out: Path) -> None:
    assert main(["--smoke", "--seeds", "1", "--out", str(out)]) == 0
    first = (out / "runs.jsonl").read_text()
    assert first.count('{"run"') == 8
    with (out / "runs.jsonl").open("a") as file:
        file.write('{"run": {"subject": "lla')  # the machine stopped in the middle of a line
    assert main(["--smoke", "--seeds", "2", "--out", str(out)]) == 0
    again = (out / "runs.jsonl").read_text()
    assert again.startswith(first), "finished runs are kept as they are"
    assert again.count('{"run"') == 16


def test_every_run_is_there_and_pairs_begin_alike(folder):
    data = json.loads((folder / "results.json").read_text())
    runs = {(run["subject"], run["precision"], run["seed"]): run for run in data["runs"]}
    assert set(runs) == {(s, name, seed) for s in ("llama", "lora") for name in SMOKE_NAMES for seed in (0, 1)}
    for (subject, name, seed), run in runs.items():
        assert run["error"] is None
        assert (
            run["val_losses"][-1]
            == run["val_loss"]
            == pytest.approx(runs[subject, "32-true", seed]["val_loss"], rel=0.01)
        )
        assert run["digest"] != runs[subject, name, 1 - seed]["digest"]
        assert name == "32-true" or run["digest"] != runs[subject, "32-true", seed]["digest"]
    said = " ".join(runs["lora", "fp8-hybrid", 0]["notes"])
    assert "converted 5 of 22 linear layers" in said, "less keys, values and adapters, which are narrow"
    assert "FP8 is emulated on cpu" in said
    assert {base["seed"] for base in data["bases"]} == {0, 1}


def test_the_report_has_the_gaps_of_the_runs(folder):
    results = Results.read(folder)
    runs = {(run["subject"], run["precision"], run["seed"]): run["val_loss"] for run in results.data["runs"]}
    gaps = [runs["llama", "fp8-hybrid", seed] / runs["llama", "32-true", seed] - 1 for seed in (0, 1)]
    report = (folder / "report.md").read_text()
    rows = re.findall(r"^\| fp8-hybrid +\|.*", report, flags=re.M)
    assert Interval.of(gaps).percent() in rows[0]
    assert "Toy sizes" in report
    of_sums = re.search(r"^\| Llama +\| +(\S+ ± \S+) \| +(\S+ ± \S+) \| +- \|$", report, flags=re.M)
    as_on_hopper = [runs["llama", FAST, seed] / runs["llama", "32-true", seed] - 1 for seed in (0, 1)]
    assert of_sums.groups() == (Interval.of(gaps).percent(), Interval.of(as_on_hopper).percent())
    assert gaps != as_on_hopper, "products of Hopper differ from products in float32"
    assert f"{results.data['settings']['text']['sha256'][:16]}" in report
    for name in results.data["left_out"]:
        assert f"`{name}`" in report
    assert (folder / "gaps.png").read_bytes().startswith(b"\x89PNG")


def test_report_writes_the_same_again(folder):
    before = (folder / "report.md").read_text()
    (folder / "report.md").unlink()
    assert main(["--report", str(folder)]) == 0
    assert (folder / "report.md").read_text() == before


def test_other_settings_are_refused_with_a_way_out(folder, capsys, monkeypatch):
    monkeypatch.setattr(
        "benchmarks.convergence.subjects.SMOKE", dict.fromkeys(("gpt", "llama", "vit", "lora", "base", "control"), 7)
    )
    assert main(["--smoke", "--out", str(folder)]) == 1
    assert "other settings (subjects)" in (said := capsys.readouterr().err)
    assert "--force" in said


def test_toy_sizes_are_not_committed(folder, tmp_path):
    at = tmp_path / "benchmarks" / "results" / "cpu-2026-01-01" / "convergence"
    at.mkdir(parents=True)
    (at / "results.json").write_text((folder / "results.json").read_text())
    with pytest.raises(ValueError, match="toy sizes"):
        page.section(tmp_path)


def test_a_run_depends_on_nothing_but_its_task(folder, tmp_path, monkeypatch):
    """The same run again, in a process that imported everything itself instead of a fork of the server."""
    task = Task(subject=smoke()[0], precision="fp8-hybrid", seed=1, work=tmp_path)
    monkeypatch.setattr(runner, "START", "spawn")
    written = {(r["subject"], r["precision"], r["seed"]): r for r in Results.read(folder).data["runs"]}
    assert record(task) == written[task.key]


def test_a_base_that_is_not_repeated_is_refused(folder, tmp_path):
    runs = Runs(tmp_path / "runs", {}, "c")
    runs.add("base", {"subject": "lora", "seed": 0, "sha256": "x"})
    task = Task(subject=smoke()[1], precision="32-true", seed=0, work=tmp_path)
    with pytest.raises(RuntimeError, match="does not repeat"):
        train_all([task], runs, 1)
