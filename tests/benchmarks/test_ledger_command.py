"""What `make ledger` says where it cannot run."""

import subprocess
import sys

import pytest
import torch

from benchmarks.ledger import __main__ as command

pytestmark = pytest.mark.slow

no_cuda = pytest.mark.skipif(torch.version.cuda is not None, reason="this torch was built for CUDA")


@no_cuda
def test_a_torch_without_cuda_is_answered_with_what_to_install(capsys):
    assert command.main([]) == 1
    assert "`make ledger` sets up an environment with the CUDA build" in capsys.readouterr().err


@no_cuda
def test_the_null_gpu_says_which_headers_are_missing():
    run = [sys.executable, "-m", "benchmarks.ledger.launch", "true"]
    done = subprocess.run(run, text=True, capture_output=True)
    assert done.returncode == 1
    assert "nvidia-cuda-crt" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_command_of_a_report_names_no_folder():
    options = command.parsed(
        ["--contenders", "a b", "--layers", "2", "--device", "b200", "--out", "somewhere", "--keep"]
    )
    assert command.command(options) == "python -m benchmarks.ledger --contenders 'a b' --device b200 --layers 2"


def test_an_unknown_contender_is_refused_with_the_list(monkeypatch, capsys):
    monkeypatch.setattr(command, "has_cuda_torch", lambda: True)
    assert command.main(["--contenders", "ours fp9"]) == 1
    assert (
        "--contenders ['ours fp9'] are not valid; expected some of: lightning bf16-mixed, compiled"
        in capsys.readouterr().err
    )
