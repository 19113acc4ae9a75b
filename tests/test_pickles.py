"""Every public object pickles, because ``ddp_spawn`` and notebooks send plugins, strategies and callbacks along."""

import inspect
import pickle
from importlib.util import find_spec

import pytest

import lightning_lowprec
from lightning_lowprec import callbacks

ARGUMENTS = {
    "HalfMixed": [{"dtype": "bf16", "master_weights": True}, {"dtype": "fp16"}],
    "NumericsMonitor": [{}, {"rows": 1.0}],
}
PUBLIC = [
    getattr(package, name)
    for package in (lightning_lowprec, callbacks)
    for name in package.__all__
    if inspect.isclass(getattr(package, name)) and name != "Reading"  # a row of numbers that monitors make
]


@pytest.mark.parametrize("cls", PUBLIC, ids=lambda cls: cls.__name__)
def test_it_pickles_and_comes_back(cls):
    if cls.__name__ == "FP8TE" and not find_spec("transformer_engine"):
        pytest.skip("needs transformer_engine")
    for options in ARGUMENTS.get(cls.__name__, [{}]):
        made = cls(**options)
        again = pickle.loads(pickle.dumps(made))
        assert type(again) is cls
        assert vars(again).keys() == vars(made).keys()
