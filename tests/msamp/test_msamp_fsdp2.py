"""precision="msamp-o3" with strategy="fsdp2" on two gloo ranks."""

import warnings
from pathlib import Path

import pytest
import torch

from lightning_lowprec import MSAMP
from lightning_lowprec.msamp.linear import scaled_linears
from lightning_lowprec.msamp.weight_state import required_state_of
from lightning_lowprec.private.torch_modules import is_compiled
from tests.fsdp2.models import Net
from tests.fsdp2.ranks import run
from tests.fsdp2.toy import differences, everything, full, setup, train
from tests.fsdp2.trained import Module, loader, trainer_for

GRAPHS = {"backend": "aot_eager"}
pytestmark = [pytest.mark.slow, pytest.mark.distributed]


def in_trainer(folder):
    """Two epochs; one epoch, saved, and another from there in a model with other weights."""

    def fit(seed, epochs, path=None):
        model = Module()
        model.net = Net(seed)
        trainer = trainer_for("msamp-o3", max_epochs=epochs, gradient_clip_val=0.5)
        trainer.fit(model, loader(), loader(), ckpt_path=path)
        return model, trainer

    straight, _ = fit(0, 2)
    first, trainer = fit(0, 1)
    trainer.save_checkpoint(folder / "trainer.ckpt")
    resumed, _ = fit(1, 2, folder / "trainer.ckpt")
    gathers = [gather for fqn, gather in straight.gathers.items() if fqn]
    return {
        "weights": [full(dict(model.state_dict())) for model in (straight, resumed)],
        "losses": (straight.losses, first.losses + resumed.losses),
        "sent": [(set(t.sent), t.sent.total() / t.calls.total()) for t in gathers],
        "codes": [
            (fqn, required_state_of(layer.weight).for_products()[0].dtype)
            for fqn, layer in scaled_linears(straight).items()
        ],
    }


def compiled():
    """Trained with compiled blocks, by the strategy's option and by the precision's, and without."""
    found = []
    for options, precision in (({}, {"compile": False}), ({"compile": GRAPHS}, {}), ({}, {"compile": GRAPHS})):
        fabric, model, optimizer = setup(MSAMP("O3", **precision), 2, **options)
        assert all(is_compiled(block) == bool(options or precision["compile"]) for block in model.blocks)
        train(fabric, model, optimizer, range(2), 2)
        found.append(everything(model, optimizer, fabric.strategy.precision))
    return [differences(found[0], other) for other in found[1:]]


def refused():
    errors = []
    for options in ({"cpu_offload": True}, {"sync_module_states": True}):
        with pytest.raises(ValueError, match="does not go with weights that are kept as codes") as error:
            setup("msamp-o3", 2, **options)
        errors.append(str(error.value))
    with pytest.raises(ValueError, match=r"`fp8_all_gather=False` is not possible: .* gathered as they are"):
        setup("msamp-o3", 2, fp8_all_gather=False)
    return errors


def worker(rank, folder):
    warnings.simplefilter("ignore")
    folder = Path(folder)
    return {
        "trainer": in_trainer(folder),
        "compiled": compiled(),
        "refused": refused(),
    }


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("msamp-fsdp2")
    return run(worker, 2, folder, str(folder))


def test_the_trainer_learns_and_resumes_bit_for_bit(results):
    for found in (result["trainer"] for result in results):
        straight, resumed = found["weights"]
        assert not differences(straight, resumed)
        assert found["losses"][0] == found["losses"][1]
        assert sum(found["losses"][0][-4:]) < 0.95 * sum(found["losses"][0][:4])
        assert {value.dtype for value in straight.values()} == {torch.float32}
    assert not differences(*(result["trainer"]["weights"][0] for result in results))


def test_blocks_are_gathered_as_codes(results):
    for found in (result["trainer"] for result in results):
        assert {dtype for _, dtype in found["codes"]} == {torch.float8_e4m3fn}
        assert len(found["codes"]) == 4
        # up and down; a norm's two vectors and two biases in bf16; each rank puts in half
        assert found["sent"] == [({torch.uint8}, (2 * 64 * 128 + 2 * (64 + 64 + 128 + 64)) / 2)] * 2


def test_compiled_blocks_train_to_the_same_bits(results):
    assert results[0]["compiled"] == results[1]["compiled"]
    assert not any(results[0]["compiled"])


def test_what_does_not_go_with_codes_is_refused(results):
    offload, sync = results[0]["refused"]
    assert offload.startswith("`cpu_offload=True`")
    assert sync.startswith("`sync_module_states=True`")
