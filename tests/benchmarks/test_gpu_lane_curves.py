"""Curves of ``convergence`` by hand: readings at equal steps and seconds, differences, the report, predictions."""

import json
import math

import pytest

from benchmarks.gpu_lane import curves, plots, predictions, report
from benchmarks.gpu_lane.contenders import BASELINE, MAIN
from benchmarks.gpu_lane.machine import ROOT
from benchmarks.gpu_lane.part_convergence import CONTENDERS

COMMON = {
    "model": "124m", "layers": 12, "batch": 32, "tokens": 32768, "text": "abc", "text_tokens": "def",
    "learning_rate": 6e-4, "warm_up": 100, "parameters": 123_587_328, "diverged": False, "cut_short": False,
    "epochs": 0.5, "matrix_tflops": 300.0, "compile_s": 20.0, "validation_s": 5.0, "peak_bytes": 30e9,
}  # fmt: skip


def run(points, ms=100.0, **other):
    last = points[-1]
    return {
        **COMMON, "points": points, "ms": ms, "steps": last[0], "training_s": last[1],
        "tokens_per_s": 32768 / ms * 1e3, **other,
    }  # fmt: skip


def results(**runs):
    items = {
        "text": {"status": "ok", "figures": {"train_tokens": 40_000_000, "val_tokens": 1_000_000}},
        **{key: {"status": "ok", "figures": figures} for key, figures in runs.items()},
    }
    origin = {"date": "2030-01-02", "commit": "a", "smoke": False, "parts": [], "machine": {"device": "NVIDIA H200"}}
    return {"schema": 1, "runs": [origin], "parts": {"convergence": {"seconds": 1.0, "items": items}}}


SLOW = [[100, 10.0, 6.0], [200, 20.0, 5.0], [220, 22.0, 4.9]]
FAST = [[100, 5.0, 6.1], [200, 10.0, 5.1], [400, 20.0, 4.3], [460, 23.0, 4.2]]
DATA = results(**{
    f"{BASELINE}, seed 0": run(SLOW),
    f"{BASELINE}, seed 1": run([[at, s, loss + 0.2] for at, s, loss in SLOW]),
    f"{MAIN}, seed 0": run(FAST, ms=50.0),
    f"{MAIN}, seed 1": run([[at, s, loss + 0.4] for at, s, loss in FAST], ms=50.0),
})  # fmt: skip


def test_a_curve_is_read_at_steps_and_between_seconds():
    curve = run(SLOW)
    assert curves.at_step(curve, 200) == 5.0
    assert curves.at_step(curve, 150) is None
    assert curves.at_second(curve, 20.0) == 5.0
    assert curves.at_second(curve, 12.5) == 5.75
    assert curves.at_second(curve, 21.0) == pytest.approx(4.95)
    assert curves.at_second(curve, 9.9) is None
    assert curves.at_second(curve, 22.1) is None
    assert curves.at_second(run([[20, 2.0, 7.0]]), 2.0) == 7.0


def test_everyone_is_read_where_everyone_was():
    """Steps 100 and 200 have a loss in all runs; the slower runs end at 22 seconds."""
    compared, others = curves.runs(DATA)
    assert others == {}
    assert curves.common_steps(compared) == [100, 200]
    assert curves.common_second(compared) == 22.0
    assert curves.common_seconds(compared) == [5.5, 11.0, 22.0]
    assert curves.steps_within(compared[MAIN][0], 22.0) == 440.0


def test_differences_are_between_runs_of_one_seed():
    compared, _ = curves.runs(DATA)
    mean, deviation = curves.less_baseline(compared, MAIN, lambda curve: curves.at_step(curve, 200))
    assert mean == pytest.approx((0.1 + 0.3) / 2)
    assert deviation == pytest.approx(math.sqrt(0.02)), "of 0.1 and 0.3"
    mean, _ = curves.over_seeds(compared, MAIN, lambda curve: curves.at_second(curve, 20.0))
    assert mean == pytest.approx(4.5)
    assert curves.less_baseline(compared, BASELINE, lambda curve: curves.at_step(curve, 200)) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"diverged": True}, "diverged before step 460"),
        ({"cut_short": True}, "cut short after 23 s"),
        ({"text": "other"}, "another text"),
        ({"batch": 16, "warm_up": 1}, "another batch, warm_up"),
    ],
)
def test_what_does_not_compare_is_named_and_shortens_nobody(change, why):
    data = results(**{f"{BASELINE}, seed 0": run(SLOW), f"{MAIN}, seed 0": run(FAST, ms=50.0, **change)})
    compared, others = curves.runs(data)
    assert others == {f"{MAIN}, seed 0": why}
    assert list(compared) == [BASELINE]
    assert curves.common_steps(compared) == [100, 200, 220]
    assert f"Not compared: {MAIN}, seed 0 ({why})." in report.render(data)


def section(data):
    text = report.render(data)
    assert "could not be rendered" not in text
    found = text.split("## Convergence, 124M parameters")[1].split("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in found.splitlines() if line[:2] == "| "]
    heads = [row for row in rows if row[0] == "contender"]
    by_head = [[row for row in rows if row[0] != "contender" and len(row) == len(head)] for head in heads]
    return found, [
        {row[0]: dict(zip(head, row, strict=True)) for row in several}
        for head, several in zip(heads, by_head, strict=True)
    ]


def test_the_report_has_both_readings_and_the_prediction():
    text, (losses, speed) = section(DATA)
    assert losses[MAIN]["seeds"] == "2"
    assert losses[MAIN]["step 100"] == "6.3000 ± 0.2828"
    assert losses[MAIN]["difference at step 200"] == "0.2000 ± 0.1414"
    assert losses[BASELINE]["22.0 s"] == "5.0000 ± 0.1414"
    assert losses[BASELINE]["5.5 s"] == "-", "it was not validated as early"
    # on the line between (20 s, 4.3) and (23 s, 4.2); 0.2 more by the mean of seeds; the baseline has 5.0 there
    expected = 4.3 - 0.1 * 2 / 3 + 0.2 - 5.0
    assert float(losses[MAIN]["difference at 22.0 s"].split()[0]) == pytest.approx(expected, abs=1e-4)
    assert speed[MAIN]["seconds per step"] == "0.0500"
    assert speed[MAIN]["over bf16-mixed, compiled"] == "2.00"
    assert speed[MAIN]["steps in 22.0 s"] == "440"
    assert speed[MAIN]["tokens/s"] == "655360"
    assert float(speed[MAIN]["predicted"]) > 0
    assert "40000000 tokens to learn" in text


def test_a_device_that_computes_nothing_gives_no_readings():
    data = results(**{f"{BASELINE}, seed 0": run([[20, 1.0, "nan"]]), f"{MAIN}, seed 0": run([[20, 1.0, "nan"]])})
    _, (losses, _) = section(data)
    assert losses[MAIN]["step 20"] == losses[MAIN]["difference at step 20"] == losses[MAIN]["1.0 s"] == "-"


def test_nothing_trained_is_no_section():
    assert "## Convergence" not in report.render(results())


def test_the_picture_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    assert "convergence" not in plots.draw(DATA, tmp_path)
    assert (tmp_path / "convergence.png").stat().st_size > 10_000


def test_predictions_come_from_the_committed_counts():
    """No step is faster than its products: 6 FLOPs per parameter of a matrix and token, at most at 1300 TFLOP/s."""
    found, label = predictions.predicted_ms(DATA, "124m", 32)
    assert set(found) == set(CONTENDERS) - {"ours int8-mixed"}
    matrices = 12 * (4 * 768 * 768 + 3 * 768 * 2048) + 50304 * 768
    flops = 6 * matrices * 32768
    assert all(1e3 * flops / 1300e12 < ms < 1e3 * flops / 100e12 for ms in found.values())
    counted = json.loads(predictions.COUNTED.read_text())["entries"]
    for entry in counted:
        amounts = [amount for phase in entry["stretches"].values() for amount in phase.values()]
        assert sum(sum(amount["product_flops"].values()) for amount in amounts) == flops, entry["contender"]
    assert "assumed" in label
    page = " ".join((ROOT / "docs/speed.md").read_text().split())
    assert f"takes {found[BASELINE]:.0f} ms with bf16-mixed and {found[MAIN]:.0f} ms with `fp8-tensorwise`" in page
    assert predictions.predicted_ms(DATA, "124m", 16)[0] == {}


def test_predictions_take_the_rates_of_the_run():
    rates = {"bandwidth copy": 4.1e12 / 2}
    measured = {"parts": {"smoke": {"items": {"peaks": {"status": "ok", "figures": {"rates": rates}}}}}}
    slow, label = predictions.predicted_ms(measured, "124m", 32)
    fast, _ = predictions.predicted_ms(DATA, "124m", 32)
    assert "of this run" in label
    assert all(slow[name] > 1.2 * fast[name] for name in fast)


def test_a_contender_whose_products_are_not_all_counted_has_no_prediction(tmp_path, monkeypatch):
    data = json.loads(predictions.COUNTED.read_text())
    entry = next(e for e in data["entries"] if e["contender"] == MAIN)
    for phase in entry["stretches"].values():
        for amount in phase.values():
            amount["product_flops"].pop("float8 exact", None)
    file = tmp_path / "ledger.json"
    file.write_text(json.dumps(data))
    monkeypatch.setattr(predictions, "COUNTED", file)
    assert MAIN not in predictions.predicted_ms(DATA, "124m", 32)[0]
