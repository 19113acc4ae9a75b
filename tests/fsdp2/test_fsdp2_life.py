"""What happens to a sharded model in its life: optimizers early and late, evaluation, accumulation, loading."""

import itertools

import pytest
import torch

from tests.fsdp2.life_runs import MONITORED, worker
from tests.fsdp2.models import Net
from tests.fsdp2.ranks import run

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return run(worker, 2, tmp_path_factory.mktemp("ranks"))


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_optimizers_built_early_late_or_jointly_train_alike(results):
    weights, moved = results[0]["optimizers"]
    untrained = Net().state_dict()
    assert not any(torch.equal(untrained[name], weight) for name, weight in weights["joint"].items())
    assert same(weights["joint"], weights["early"])
    assert same(weights["joint"], weights["late"])
    assert moved, "state from before the set-up is sharded with its parameter"


def test_inference_mode_changes_nothing(results):
    plain, inferred = results[0]["evaluation"]
    assert plain[0] == inferred[0]
    assert same(plain[1], inferred[1])


def test_scales_are_reduced_once_per_real_step(results):
    counts = results[0]["scale_reductions"]
    assert counts["accumulated"] == 3
    assert counts["after the last step, and three evaluations"] == 4
    assert counts["skipped"] == (1, 2.0**15)
    assert results[1]["scale_reductions"]["skipped"] == (1, 2.0**15), "the rank with finite gradients skips too"
    assert counts["unchanged"]
    assert counts["after a skipped step"] == 0


def test_a_value_that_is_not_finite_on_one_rank_costs_all_ranks_the_step(results):
    for rank, masters in itertools.product(range(2), (False, "remainder")):
        (weights, skipped), (wanted, none) = (results[rank]["skipping"][masters, bad] for bad in (1, None))
        assert (skipped, none) == (1, 0)
        assert same(weights, wanted)


def test_loaded_and_edited_weights_get_scales_of_their_own(results):
    want, loaded, edited = results[0]["loading"]
    assert loaded == want
    assert edited == want


def test_options_change_where_not_what(results):
    losses = results[0]["variants"]
    for name, values in losses.items():
        assert values == losses["plain"], name


def test_groups_of_float8_alone_travel_as_uint8(results):
    losses, sent = results[0]["without_bias"]
    assert all(0 < loss < 10 for loss in losses)
    assert set(sent["blocks.0.up"]) == {torch.float8_e4m3fn}
    assert sent["blocks.0.up"][torch.float8_e4m3fn] == 4 * 2 * (64 * 128 // 2)  # 4 steps, forward and backward


def test_float8_is_half_of_bf16_on_a_llama_block(results):
    sent = results[0]["llama_bytes"]
    weights = 2 * 256 * 256 + 2 * 256 * 64 + 3 * 256 * 896
    assert sent["bf16-mixed"]["1.0"] == (weights + 2 * 256) * 2 // 2, "half of the elements, two bytes each"
    assert sent["fp8-hybrid"]["1.0"] == (weights + 2 * 256 * 2) // 2
    assert sent["fp8-hybrid"]["1.0"] <= 0.51 * sent["bf16-mixed"]["1.0"]


def test_weights_from_rank_0_from_nowhere(results):
    (sent, _, made), (also_sent, _, also_made) = (results[rank]["origins"] for rank in range(2))
    assert all(sent.values())
    assert all(also_sent.values())
    assert same(made, also_made)
    assert results[0]["origins"][1] < 10
    assert made["blocks.0.up.weight"].std() > 0.01, "initialised by the modules themselves"


@pytest.mark.parametrize("precision", MONITORED)
def test_a_monitor_reads_the_whole_weight_from_shards(results, precision):
    """Gathered as float8, gathered in high precision, and codes; the same readings on both ranks."""
    plain, watched = results[0]["monitored"][precision].values()
    assert same(plain[0], watched[0])
    _, readings, weight, largest, output_db = watched
    assert repr(readings) == repr(results[1]["monitored"][precision][True][1])
    assert [r.tensor for r in readings] == ["input", "weight", "gradient"] * 4
    of = {r.tensor: r for r in readings if r.fqn == "blocks.0.up"}
    assert of["input"].amax == largest
    rows = precision == "fp8-rowwise"
    weight = weight.bfloat16().float() if rows else weight  # as it is gathered
    assert of["weight"].amax == weight.abs().max().item()
    scale = 448 / (weight.abs().amax(1, keepdim=True) if rows else weight.abs().amax())
    scale = scale if precision == "fp8-hybrid" else scale.log2().floor().exp2()
    assert of["weight"].scale == pytest.approx(scale.min().item(), rel=1e-6)
    lost = ((weight * scale).to(torch.float8_e4m3fn).float() == 0) & (weight != 0)
    assert of["weight"].underflow == pytest.approx(lost.sum().item() / (weight != 0).sum().item(), abs=1e-9)
    assert lost.any() or precision == "msamp-o3"  # whose codes under FSDP2 are the values
    if precision != "msamp-o3":
        assert of["weight"].output_db == pytest.approx(output_db, abs=0.01)


def test_ranks_demote_a_layer_together_and_as_by_hand(results):
    (weights, demoted), (by_hand, _) = results[0]["demoted"]
    (others, demoted_there), _ = results[1]["demoted"]
    assert demoted == demoted_there == {"blocks.0.up": "bf16"}
    assert same(weights, by_hand)
    assert same(weights, others)


@pytest.mark.parametrize("precision", ["fp8-hybrid", "msamp-o3"])
def test_plain_of_a_sharded_model_names_a_way_out_that_works(results, precision):
    messages, weights, fresh, count = results[0]["plain_of_shards"][precision]
    for message in messages:
        assert message.startswith(f"`plain(model)` needs whole weights, and {count} parameters of FSDPNet are sharded.")
        assert (
            "get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))" in message
        )
    assert same(weights, fresh)
