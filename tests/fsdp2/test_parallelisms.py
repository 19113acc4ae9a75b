"""FP8 layers under torch's sequence, context and pipeline parallelism, on two gloo ranks, against one process."""

import math

import pytest
import torch

from tests.fsdp2.models import Net
from tests.fsdp2.parallel_runs import Sequences, contexts_of_one, one_step, worker
from tests.fsdp2.ranks import run

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return run(worker, 2, tmp_path_factory.mktemp("parallelisms"))


def snr(found, expected):
    """Signal to noise of all gradients together, in dB."""
    assert found.keys() == expected.keys()
    noise = sum((found[name] - expected[name]).float().square().sum() for name in expected)
    return 10 * math.log10(sum(grad.float().square().sum() for grad in expected.values()) / noise)


def as_close_as_fp8_is(found, one_process, in_float32):
    """The two roundings of FP8, with other scales, are nearer to each other than FP8 is to float32."""
    loss, grads = found[:2]
    assert loss == pytest.approx(one_process[0], rel=1e-3)
    assert snr(grads, one_process[1]) > max(30, snr(one_process[1], in_float32))


def in_float32(model, step):
    loss = step(model)
    loss.backward()
    return {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("precision", ["tensorwise", "rowwise", "bf16"])
def test_a_sequence_parallel_plan(results, precision):
    from tests.fsdp2.models import batch, loss_of

    exact = in_float32(Net(), lambda model: loss_of(model, batch(0, 0)))
    for rank in results:
        as_close_as_fp8_is(rank["sequence"][precision], one_step(precision), exact)


@pytest.fixture
def float8_activations(results):
    if results[0]["float8 activations"] is None:
        pytest.skip("the float8 tensors of this torchao do not know this torch's all-gather")
    return [rank["float8 activations"] for rank in results]


@pytest.mark.parametrize("kind", ["", ", prepared"], ids=["linears", "modules"])
def test_activations_gathered_as_float8_by_torchaos_styles(float8_activations, kind):
    """Our layers compute what torchao's compute, bit for bit."""
    for found in float8_activations:
        (loss, grads), (their_loss, their_grads) = found[f"ours{kind}"], found[f"torchao's{kind}"]
        assert loss == their_loss
        assert grads.keys() == their_grads.keys()
        assert all(torch.equal(grad, their_grads[name]) for name, grad in grads.items())
        assert kind or snr(found["ours"][1], one_step("tensorwise")[1]) > 30


def test_what_torchaos_styles_cannot_do_raises_with_the_way_out(float8_activations):
    for found in float8_activations:
        assert "the recipe of the layer has a scale per row. Use `FP8TorchAO(recipe='tensorwise')`" in found["rowwise"]
        assert "computes in high precision now. Use `FP8TorchAO(fp8_eval=True)`" in found["evaluation in bf16"]
        assert "Use `FP8TorchAO(saved_inputs='values')`" in found["saved codes"]


@pytest.mark.parametrize("precision", ["tensorwise", "rowwise", "bf16"])
def test_a_sequence_cut_by_context_parallel(results, precision):
    def step(model):
        from tests.fsdp2.parallel_runs import cross_entropy, tokens

        x, y, positions = tokens()
        return cross_entropy(model(x, positions), y)

    exact = in_float32(Sequences(), step)
    for rank in results:
        found = rank["contexts"][precision]
        assert found[2] == (4, 16), "half of 32 tokens"
        as_close_as_fp8_is(found, contexts_of_one(precision), exact)
    halves = [rank["contexts"][precision][3] for rank in results]
    assert sorted(halves[0] + halves[1]) == list(range(32))


def test_torch_has_no_ring_attention_on_cpu(results):
    """docs/many-machines.md says so."""
    for rank in results:
        assert "_scaled_dot_product_flash_attention_for_cpu" in rank["ring"]


@pytest.mark.parametrize("sharded", [False, True], ids=["whole stages", "sharded stages"])
@pytest.mark.parametrize("precision", ["tensorwise", "rowwise", "msamp-o3", "bf16"])
def test_a_pipeline_computes_the_bits_of_one_process(results, precision, sharded):
    schedule = "ScheduleGPipe" if sharded else "Schedule1F1B"
    names = set()
    for rank in results:
        (losses, grads), (expected_losses, expected) = rank["pipelines"][precision, schedule, sharded]
        assert losses in ([], expected_losses)
        assert all(torch.equal(grad, expected[name]) for name, grad in grads.items())
        names |= grads.keys()
    assert names == expected.keys()
    assert results[1]["pipelines"][precision, schedule, sharded][0][0] == expected_losses
