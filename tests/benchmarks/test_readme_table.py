"""The README's performance section follows from committed results, and says so while there are none."""

import json

import pytest

from benchmarks.gpu_lane.contenders import BASELINE, MAIN
from benchmarks.readme_table import BEGIN, END, NOTHING, RESULTS, ROOT, main, section, updated


def test_the_readme_is_what_the_command_writes():
    readme = (ROOT / "README.md").read_text()
    assert updated(readme, ROOT) == readme, "run python -m benchmarks.readme_table"
    assert main(["--check"]) == 0


def test_without_results_it_promises_nothing_and_names_the_command(tmp_path):
    assert section(tmp_path) == NOTHING
    assert "Nothing has been measured on a GPU yet" in NOTHING
    assert "`make gpu-lane`" in NOTHING
    assert "\ngpu-lane:" in (ROOT / "Makefile").read_text()
    assert (ROOT / RESULTS / "README.md").exists()


def step(ms, tokens_per_s, peak_bytes=None):
    figures = {
        "ms": ms, "tokens_per_s": tokens_per_s, "tokens": 1, "linear": None, "fp8_shapes": {}, "fp8_share": 0.0,
    }  # fmt: skip
    return {"status": "ok", "figures": figures | ({} if peak_bytes is None else {"peak_bytes": peak_bytes})}


def commit_results(root, folder, device, date, steps, smoke=False, commit="abc"):
    run = {"date": date, "commit": commit, "smoke": smoke, "parts": ["step8b"],
           "machine": {"device": device, "versions": {"torch": "2.11.0", "lightning": None}}}  # fmt: skip
    parts = {part: {"seconds": 1.0, "settings": {}, "items": items} for part, items in steps.items()}
    path = root / RESULTS / folder
    path.mkdir(parents=True)
    (path / "results.json").write_text(json.dumps({"schema": 1, "runs": [run], "parts": parts}))


def test_the_table_has_a_row_per_contender_that_was_measured(tmp_path):
    steps8b = {
        MAIN: step(80.0, 125.4, 2.04e9),
        BASELINE: step(100.0, 100.0, 3e9),
        "te delayed": {"status": "failed", "reason": "x"},
        "ours half-auto": step(1.0, 1.0),
    }
    commit_results(tmp_path, "h200", "NVIDIA H200", "2030-01-02", {"step8b": steps8b})
    text = section(tmp_path)
    assert text.startswith("**NVIDIA H200**, 2030-01-02, torch 2.11.0, commit abc:\n")
    assert [line for line in text.splitlines() if line.startswith("|")] == [
        "|  | 8B-shaped stack, tokens/s | peak GB |",
        "|---|---|---|",
        f"| {BASELINE} | 100 (1.00x) | 3.0 |",
        f"| **{MAIN}** | 125 (1.25x) | 2.0 |",
    ]
    # 1.25 of the 1.35 that is wanted over bf16-mixed and over the best bf16; the other targets lack their figures
    assert "0 are met, 2 missed," in text
    assert f"({RESULTS}/h200/report.md)" in text


def test_the_newest_of_every_device_is_shown_the_newest_device_first(tmp_path):
    for folder, device, date in (
        ("h100-b", "NVIDIA H100", "2030-02-01"),
        ("h200-z-old", "NVIDIA H200", "2029-12-31"),
        ("h200-a-new", "NVIDIA H200", "2030-03-01"),
        ("h200-m", "NVIDIA H200", "2030-02-15"),
    ):
        commit_results(tmp_path, folder, device, date, {"step8b": {BASELINE: step(1.0, 1.0)}}, commit=folder)
    lines = [line for line in section(tmp_path).splitlines() if line.startswith("**NVIDIA")]
    assert lines == [
        "**NVIDIA H200**, 2030-03-01, torch 2.11.0, commit h200-a-new:",
        "**NVIDIA H100**, 2030-02-01, torch 2.11.0, commit h100-b:",
    ]


def test_results_of_toy_sizes_are_refused(tmp_path, capsys):
    (tmp_path / "README.md").write_text(f"{BEGIN}\n{END}\n")
    commit_results(tmp_path, "toy", "cpu", "2030-01-02", {}, smoke=True)
    assert main([], tmp_path) == 2
    assert "toy has figures of toy sizes" in capsys.readouterr().err
    assert (tmp_path / "README.md").read_text() == f"{BEGIN}\n{END}\n"


def test_results_of_several_devices_in_one_folder_are_refused(tmp_path):
    commit_results(tmp_path, "two", "NVIDIA H200", "2030-01-02", {})
    path = tmp_path / RESULTS / "two" / "results.json"
    data = json.loads(path.read_text())
    data["runs"].append({**data["runs"][0], "machine": {"device": "NVIDIA H100"}})
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match="two is of several devices: NVIDIA H100, NVIDIA H200"):
        section(tmp_path)


def test_writing_twice_changes_nothing_and_leaves_the_rest_alone(tmp_path, capsys):
    path = tmp_path / "README.md"
    path.write_text(f"above\n{BEGIN}\nold\n{END}\nbelow\n")
    assert main(["--check"], tmp_path) == 1
    assert "old" in path.read_text()
    assert main([], tmp_path) == 0
    assert path.read_text() == f"above\n{BEGIN}\n{NOTHING}\n{END}\nbelow\n"
    assert main(["--check"], tmp_path) == 0
    for broken in (f"{BEGIN}\n", f"{END}\n{BEGIN}\n", f"{BEGIN}{END}{BEGIN}{END}"):
        path.write_text(broken)
        assert main([], tmp_path) == 2
        assert path.read_text() == broken
    assert "once each" in capsys.readouterr().err
