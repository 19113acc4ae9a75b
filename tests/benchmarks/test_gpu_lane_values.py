"""A device that computes nothing: checks of values and limits of time are off, in one place; nothing is committed."""

import time
from pathlib import Path

import pytest
import torch
from torch import distributed as dist

from benchmarks.gpu_lane import runner, values, worker
from benchmarks.gpu_lane.item import Item
from benchmarks.gpu_lane.machine import ROOT
from benchmarks.gpu_lane.results import Results, folder_name, merge
from benchmarks.gpu_lane.settings import Settings

RUN = {"date": "2030-01-02", "commit": "abc", "smoke": False, "parts": ["x"], "machine": {"device": "NVIDIA H200"}}
CUDA = torch.device("cuda", 0)


@pytest.fixture
def no_values(monkeypatch):
    monkeypatch.setenv(values.NO_VALUES, "1")
    yield
    torch.backends.cuda.enable_cudnn_sdp(True)


@pytest.mark.parametrize(("text", "exist"), [(None, True), ("", True), ("0", True), ("1", False)])
def test_one_variable_says_whether_values_exist(text, exist, monkeypatch):
    if text is None:
        monkeypatch.delenv(values.NO_VALUES, raising=False)
    else:
        monkeypatch.setenv(values.NO_VALUES, text)
    assert values.values_exist() == exist
    assert values.time_limit(5.0) == (5.0 if exist else values.NO_LIMIT)


def test_only_one_file_of_the_lane_and_of_the_gpu_tests_reads_it():
    files = [path for part in ("benchmarks/gpu_lane", "tests/gpu") for path in (ROOT / part).glob("*.py")]
    texts = {path: path.read_text() for path in files}
    assert len(texts) > 30
    reading = [path.relative_to(ROOT) for path, text in texts.items() if f'"{values.NO_VALUES}"' in text]
    assert reading == [Path("benchmarks/gpu_lane/values.py")]


@pytest.mark.usefixtures("no_values")
def test_no_item_is_too_late_and_no_worker_is_taken_for_broken(tmp_path, monkeypatch):
    class Part:
        name = "fake"

        def items(self, settings):
            return [Item(key="slow", limit=0.0)]

        def run(self, key, settings):
            return {"timeout": 1}

    given = []
    monkeypatch.setattr(
        runner.Inline,
        "run",
        lambda self, item, timeout: given.append(timeout) or {"status": "ok", "figures": {}},
    )
    deadline = time.monotonic() + values.time_limit(1.0)
    runner.run_part(Part(), Settings(), Results(tmp_path, RUN), isolate=False, deadline=deadline)
    assert given[0] > 1e4
    monkeypatch.setattr(worker, "start_afresh", lambda device: None)
    monkeypatch.setattr(torch, "ones", lambda *size, device: torch.zeros(*size))
    assert worker._still_works(Settings())
    monkeypatch.delenv(values.NO_VALUES)
    assert not worker._still_works(Settings())


@pytest.mark.usefixtures("no_values")
def test_the_group_is_torchs_fake_one_and_attention_is_not_cudnns():
    values.use_what_the_device_has()
    assert not torch.backends.cuda.cudnn_sdp_enabled()
    with values.left_as_found():
        values.stand_in_for_nccl(CUDA)
        assert (dist.get_backend(), dist.get_world_size()) == ("fake", 1)
    assert not dist.is_initialized()
    with values.left_as_found():
        values.stand_in_for_nccl(CUDA, real=True)
        assert dist.get_backend() == "gloo"
    values.stand_in_for_nccl(torch.device("cpu"))
    assert not dist.is_initialized(), "gloo is there"


def test_where_values_exist_nothing_stands_in():
    values.use_what_the_device_has()
    assert torch.backends.cuda.cudnn_sdp_enabled()
    values.stand_in_for_nccl(CUDA)
    assert not dist.is_initialized()


def test_figures_of_such_a_device_are_never_committed():
    """It says that it is an H200."""
    fake = {"schema": 1, "runs": [{**RUN, "values": False}], "parts": {}}
    with pytest.raises(ValueError, match="a device that computes nothing mean nothing"):
        folder_name(fake)
    with pytest.raises(ValueError, match=r"do not merge: .*NVIDIA H200 \(a device that computes nothing\)"):
        merge([fake, {"schema": 1, "runs": [{**RUN, "values": True}], "parts": {}}])
