"""From the lane's gains.json to what plans and ``min_gain`` go by."""

import importlib.util
import json
from pathlib import Path

import pytest

from benchmarks import measured_gains
from benchmarks.gpu_lane.__main__ import main as lane
from benchmarks.measured_gains import EMPTY, TABLE, main
from lightning_lowprec import conversion
from lightning_lowprec.conversion import gains

RESULTS = Path(measured_gains.__file__).parent / "results"


def load(path, name):
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def entry(recipe, tokens, k, n, ratio, **other):
    known = {"device": "NVIDIA H200", "date": "2030-01-02", "smoke": False, "backend": "torchao"}
    shape = {"recipe": recipe, "tokens": tokens, "in_features": k, "out_features": n}
    return {**known, **shape, "ratio": ratio, **other}


@pytest.fixture
def gains_by(monkeypatch, tmp_path):
    """``gains`` as it is on a machine where these entries are the table."""

    def make(entries):
        source, table = tmp_path / "gains.json", tmp_path / "table.py"
        source.write_text(json.dumps(entries))
        assert main([str(source), "--out", str(table)]) == 0
        monkeypatch.setattr(conversion, "measured_gains", load(table, "table"))
        return load(gains.__file__, "gains_again")

    return make


def test_what_the_lane_writes_becomes_the_table(gains_by, tmp_path, capsys):
    folder = tmp_path / "lane"
    lane(["--part", "linear", "--smoke", "--out", str(folder), "--only", "32x64x128", "--date", "2030-01-02"])
    entries = json.loads((folder / "gains.json").read_text())
    assert {e["recipe"] for e in entries} == {"tensorwise", "rowwise", "rowwise_with_gw_hp"}
    found = gains_by(entries)
    assert found.SOURCE == "measured on one cpu, 2030-01-02"
    for e in entries:
        assert found.measured_gains.GAINS[e["recipe"]] == {(32, 64, 128): e["ratio"]}
    before = TABLE.read_text()
    assert main([str(folder / "gains.json")]) == 2, "toy sizes never become the package's table"
    assert "toy sizes" in capsys.readouterr().err
    assert TABLE.read_text() == before


def test_the_nearest_measured_shape_decides(gains_by):
    found = gains_by([
        entry("tensorwise", 8192, 4096, 4096, 1.25),
        entry("tensorwise", 16384, 8192, 8192, 1.5),
        entry("tensorwise", 8192, 2048, 8192, 0.9),
        entry("delayed", 8192, 4096, 4096, 9.0, backend="te"),
    ])  # fmt: skip
    assert found.expected_gain("tensorwise", 4096, 4096, 8192) == 1.25
    assert found.expected_gain("tensorwise", 6000, 6000, 16384) == 1.5
    assert found.expected_gain("tensorwise", 2048, 8192, 8192) is None, "measured to be slower"
    assert gains.expected_gain("tensorwise", 2048, 8192, 8192) is not None, "the published thresholds differ"
    assert found.expected_gain("tensorwise", 4096, 1024, 8192) is None, "smaller than all that was measured"
    assert found.expected_gain("rowwise", 8192, 7168) == gains.expected_gain("rowwise", 8192, 7168) == 1.73
    assert set(found.measured_gains.GAINS) == {"tensorwise"}
    assert found.SOURCE == "measured on one NVIDIA H200, 2030-01-02"


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([], "no entries"),
        ([entry("rowwise", 1, 2, 3, 1.0), entry("rowwise", 1, 2, 3, 1.0, device="NVIDIA H100")], "of one device"),
        ([entry("delayed", 1, 2, 3, 1.0, backend="te")], "no entry is of torchao's recipes"),
        ([{"device": "NVIDIA H200"}], "'smoke'"),
    ],
)
def test_a_file_that_does_not_do_is_refused(entries, message, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(measured_gains, "TABLE", tmp_path / "table.py")
    (tmp_path / "gains.json").write_text(json.dumps(entries))
    assert main([str(tmp_path / "gains.json")]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "table.py").exists()


def test_the_committed_table_is_empty_or_follows_from_committed_results():
    committed = [json.loads(path.read_text()) for path in RESULTS.glob("*/gains.json")]
    assert TABLE.read_text() in ([measured_gains.render(entries) for entries in committed] or [EMPTY])
