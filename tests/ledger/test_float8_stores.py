"""From torch 2.14 on: no compiled kernel stores float8 beside a minimum or maximum that spoils it."""

import json
import subprocess
import sys

import pytest
import torch

from benchmarks.ledger import launch
from tests.ledger import float8_stores

WITHOUT = (
    "import lightning_lowprec.private.torch_modules as mended; assert mended._FAULTY_FROM; "
    "mended._FAULTY_FROM = (99,); "
    "from tests.ledger import float8_stores as script; script.main(['msamp-o2'])"
)
pytestmark = pytest.mark.skipif(torch.__version__ < (2, 14), reason="older inductors write no such instruction")


def counted(device, *arguments):
    command = [sys.executable, *arguments]
    done = subprocess.run(command, env=launch.environment(device), text=True, capture_output=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.timeout(900)
@pytest.mark.parametrize("device", float8_stores.NAMES)
def test_no_name_has_such_a_kernel(device):
    names = float8_stores.NAMES[device]
    found = counted(device, "-m", float8_stores.__name__, *names)
    assert [*found] == [*names]
    for name, (stores, spoiled) in found.items():
        assert (stores > 0) == (name != "bf16-8bit"), name
        assert spoiled == 0, name


def test_without_the_mend_there_are_some():
    (found,) = counted("h200", "-c", WITHOUT).values()
    assert found[1] > 0
