"""The part that runs tests/gpu: which files, what it reads, what is left when one hangs."""

from benchmarks.gpu_lane import part_tests
from benchmarks.gpu_lane.part_tests import parse
from benchmarks.gpu_lane.settings import Settings


def test_every_file_of_gpu_tests_is_run_the_most_valuable_first():
    keys = [item.key for item in part_tests.Tests().items(Settings(device="cuda"))]
    files = {f"tests/gpu/{path.name}" for path in (part_tests.ROOT / "tests" / "gpu").glob("test_*.py")}
    assert set(keys) == files
    assert keys[: len(part_tests.FIRST)] == [f"tests/gpu/test_{name}.py" for name in part_tests.FIRST]


def test_pytest_output_is_read_even_if_it_was_cut_short():
    text = (
        "tests/gpu/test_a.py::test_x[a b] PASSED [ 10%]\ntests/gpu/test_a.py::test_y FAILED [ 20%]\n"
        "tests/gpu/test_a.py::test_z SKIPPED (no) [ 30%]\n"
        "FAILED tests/gpu/test_a.py::test_y - AssertionError: 1 == 2\n"
    )
    found = parse(text, 1)
    assert found["counts"] == {"passed": 1, "failed": 1, "skipped": 1}
    assert found["reasons"] == {"tests/gpu/test_a.py::test_y": "AssertionError: 1 == 2"}
    assert parse(text, None)["headline"].endswith("stopped at the time limit")


def test_a_file_that_hangs_says_what_it_found_before(tmp_path, monkeypatch):
    (tmp_path / "test_slow.py").write_text(
        "import time\n"
        "def test_measures(record_property):\n    record_property('sqnr_db', 41.5)\n"
        "def test_fails():\n    assert 1 == 2\n"
        "def test_hangs():\n    time.sleep(60)\n"
    )
    monkeypatch.setattr(part_tests, "ROOT", tmp_path)
    (tmp_path / "tests").mkdir()
    (tmp_path / "test_slow.py").rename(tmp_path / "tests" / "test_slow.py")
    found = part_tests.run_pytest("tests/test_slow.py", 8.0)
    assert found["cut_short"]
    assert found["exit_status"] is None
    assert found["counts"] == {"passed": 1, "failed": 1}
    assert found["measured"] == {"test_slow::test_measures": {"sqnr_db": "41.5"}}
    assert found["reasons"] == {"tests/test_slow.py::test_fails": "assert 1 == 2"}
