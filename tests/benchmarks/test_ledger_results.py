"""What the docs say was counted is what the committed ledger holds."""

import json
import re
from pathlib import Path

import pytest

from benchmarks.ledger import __main__ as command
from benchmarks.ledger import report, roofline
from benchmarks.ledger.entry import Entry
from benchmarks.rivals import models
from benchmarks.rivals.contenders import MAIN, MAIN_TE, TE_COMPILED, TE_LAYERS
from tests.ledger.budgets import ALL_LOGITS_GB, ALL_LOGITS_PEAK_GB, HEAD_GB, HEAD_PEAK_GB, LLAMA

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/speed.md"
FOLDER = ROOT / "benchmarks/results/null-gpu-2026-11-24"
AROUND_TE_LAYERS = (
    MAIN, f"{MAIN}, bf16 between blocks", MAIN_TE, TE_COMPILED, f"{TE_LAYERS} delayed", f"{TE_LAYERS} current",
    f"{TE_LAYERS} delayed, compiled",
)  # fmt: skip


def entries(file="ledger"):
    data = json.loads((FOLDER / f"{file}.json").read_text())
    return [Entry.from_json({**entry, "kernels": []}) for entry in data["entries"]]


def shown(marker, page=PAGE):
    """The rows of a table of a page, by the first cell."""
    text = page.read_text().partition(f"<!-- {marker}")[2].partition(f"<!-- /{marker}")[0]
    return {
        row[0]: row[1:] for row in (re.split(r" *\| *", line.strip("| ")) for line in text.splitlines()[3:] if line)
    }


def figures(entry):
    return [
        f"{entry.per_block('bytes') / 1e9:.2f}",
        str(entry.whole().kernels),
        f"{entry.peak / 1e9:.1f}",
        f"{roofline.predict(entry, roofline.assumed()).total:.0f}",
    ]


BEST = "ours fp8-hybrid-8bit, fp8 head"
DTYPES = ("bfloat16", "float32")
SPEED = {
    "Lightning's `bf16-mixed`, compiled": "lightning bf16-mixed, compiled",
    "Lightning's `bf16-true`, compiled": "lightning bf16-true, compiled",
    "torchao by hand, tensorwise, compiled": "torchao tensorwise, compiled",
    "`fp8-hybrid`": "ours fp8-hybrid",
    "`fp8-hybrid-remainder`": "ours fp8-hybrid-remainder",
    "`fp8-rowwise`": "ours fp8-rowwise",
    "`msamp-o2`": "ours msamp-o2",
    "`int8-mixed`": "ours int8-mixed",
    "*loss in chunks:* Lightning's `bf16-mixed`, compiled": "lightning bf16-mixed, compiled, chunked loss",
    "*loss in chunks:* Lightning's `bf16-true`, compiled": "lightning bf16-true, compiled, chunked loss",
    '*loss in chunks:* `fp8-hybrid-remainder`, `head="fp8"`': "ours fp8-hybrid-remainder, fp8 head",
    '*loss in chunks:* `fp8-hybrid-8bit`, `head="fp8"`': "ours fp8-hybrid-8bit, fp8 head",
}


def test_the_page_on_speed_shows_the_ledger():
    """Every row is compared with bf16 that has the same loss."""
    found = {entry.contender: entry for entry in entries()}
    times = {
        rates: {key: roofline.predict(entry, roofline.assumed(rates)).total for key, entry in found.items()}
        for rates in roofline.H200
    }
    mixed, true = "lightning bf16-mixed, compiled", "lightning bf16-true, compiled"
    table = shown("speed")
    assert table.keys() == SPEED.keys()
    for words, key in SPEED.items():
        entry, (block, optimizer, peak, time, *ahead) = found[key], table[words]
        assert [block, time, peak] == [figures(entry)[0], figures(entry)[3], figures(entry)[2]]
        assert float(optimizer) == round(entry.phase("optimizer").bytes / entry.parameters, 1)
        loss = ", chunked loss" if "chunks" in words else ""
        by_hand = [round(times["middle"][f"{base}{loss}"] / times["middle"][key], 2) for base in (mixed, true)]
        assert list(map(float, ahead)) == by_hand


def test_the_page_on_speed_says_what_is_of_what_and_how_far_predictions_are_off():
    """FP8 alone, then bf16 weights and 8-bit moments, then the head; the range is that of the published figures."""
    found = {entry.contender: roofline.predict(entry, roofline.assumed()) for entry in entries()}
    mixed, fp8, best = found["lightning bf16-mixed, compiled"], found["ours fp8-hybrid"], found[BEST]
    remainder, its_head = found["ours fp8-hybrid-remainder"], found["ours fp8-hybrid-remainder, fp8 head"]
    saved = its_head.total - best.total  # by the optimizer alone: weights and products are the same
    assert saved == pytest.approx(its_head.of("optimizer") - best.of("optimizer"), abs=0.5)
    alone, moments, head = (f"{mixed.total / time:.2f}" for time in (fp8.total, remainder.total - saved, best.total))
    page = PAGE.read_text()
    text = " ".join(page.split())
    assert f"the best row is predicted at {head}. Of that, FP8 products alone make {alone} (`fp8-hybrid`);" in text
    assert f"bf16 weights with 8-bit moments bring it to {moments}, and the FP8 head to {head}." in text
    (off,) = re.findall(r"\| steps \| \d+ \| fixed constants \| ([\d.]+) \|", page)
    (least, most) = re.findall(r'\| `fp8-hybrid-8bit`, `head="fp8"` \| [\d.]+ \| ([\d.]+) to ([\d.]+) \|', page)[0]
    torchao = (ROOT / "docs/torchao.md").read_text()
    assert all(f"miss published steps by {off} % in the mean" in page for page in (text, torchao))
    assert f"the best row is {least} to {most} ahead of `bf16-mixed`" in text


def test_the_page_on_speed_shows_the_budgets_of_a_model_of_transformers():
    expected = {
        f"`{name}`": [f"{b.kernels:,}", f"{b.block_gb:.2f}", f"{b.outside_gb:.1f}", f"{b.peak_gb:.1f}"]
        for name, b in LLAMA.items()
    }
    assert shown("llama") == expected
    said = f"Llama of 16 blocks then needs {LLAMA['fp8-hybrid'].kernels:,} kernels"
    assert said in " ".join((ROOT / "docs/torchao.md").read_text().split())


def test_the_page_on_the_head_shows_its_budgets():
    page = (ROOT / "docs/memory.md").read_text()
    rows = re.findall(r'\| `head="(\w+)"` \| ([\d.]+) \(float32 weights ([\d.]+)\) \| ([\d.]+) \| ([\d.]+) \|', page)
    for head, *figures in rows:
        budgets = [budget[head, f"torch.{dtype}"].most for budget in (HEAD_GB, HEAD_PEAK_GB) for dtype in DTYPES]
        assert list(map(float, figures)) == budgets
    assert {row[0] for row in rows} == {head for head, _ in HEAD_GB}
    assert f"| all logits, `cross_entropy` | {ALL_LOGITS_GB:.0f} | {ALL_LOGITS_PEAK_GB} |" in page
    assert f"hold {ALL_LOGITS_PEAK_GB} GB at their peak and move {ALL_LOGITS_GB:.0f} GB" in " ".join(page.split())


def test_sentences_with_figures_are_those_of_the_ledger():
    found = {entry.contender: entry for entry in entries()}
    blocks = {key: f"{entry.per_block('bytes') / 1e9:.2f}" for key, entry in found.items()}
    ours, remainder = blocks["ours fp8-hybrid"], blocks["ours fp8-hybrid-remainder"]
    torchao, te = found["ours fp8-hybrid"], found["ours fp8-hybrid-te"]
    mixed, best = found["lightning bf16-mixed, compiled, chunked loss"], found["ours fp8-hybrid-8bit, fp8 head"]
    by_te, by_torchao, by_mixed, by_best = (
        roofline.predict(entry, roofline.assumed()).total for entry in (te, torchao, mixed, best)
    )
    for page, sentence in {
        "CHANGELOG.md": "`fp8-hybrid-8bit` with the FP8 head is predicted at"
        f" {by_mixed / by_best:.2f} times compiled `bf16-mixed` with the loss in chunks",
        "docs/names.md": f"reads and writes {remainder} GB per step beside its matrix products under"
        f" `fp8-hybrid-remainder`, and {ours} GB under `fp8-hybrid`",
        "docs/speed.md": f"{blocks['ours fp8-rowwise']} GB instead of 13.78 (torchao by hand"
        f" {blocks['torchao rowwise, compiled']}), of `fp8-rowwise-gw-hp` {blocks['ours fp8-rowwise-gw-hp']}"
        " instead of",
        "README.md": f"moves {remainder} GB per step under `fp8-hybrid-remainder`,"
        f" {blocks['lightning bf16-mixed, compiled']} GB under Lightning's compiled `bf16-mixed`, and"
        f" {blocks['torchao tensorwise, compiled']} GB under torchao by hand",
        "docs/speed.md#": f"to need {1 - by_torchao / by_te:.1%} less time than `fp8-hybrid-te`, and holds"
        f" {(te.peak - torchao.peak) / 1e9:.1f} GB less.".replace("%", " %"),
    }.items():
        assert sentence in " ".join((ROOT / page.rstrip("#")).read_text().split()), page


def test_the_page_shows_the_ledger_of_transformer_engines_blocks():
    found = {entry.contender: entry for entry in entries()}
    assert shown("te-layers") == {f"`{key}`": figures(found[key]) for key in AROUND_TE_LAYERS}


def test_the_blocks_of_transformer_engine_gain_too_little_for_an_option():
    """Less than 5 % by any of the rates, sums in bf16 in both; a larger gain asks for an option."""
    found = {entry.contender: entry for entry in entries() if entry.contender in AROUND_TE_LAYERS}
    text = " ".join(PAGE.read_text().split())
    ours, blocks = found["ours fp8-hybrid"], found["te layers delayed"]
    gains = {}
    for rates in roofline.H200:
        times = {key: roofline.predict(entry, roofline.assumed(rates)).total for key, entry in found.items()}
        assert min(times.values()) == times["te layers delayed"]
        assert times["te layers delayed"] >= 0.95 * times["ours fp8-hybrid, bf16 between blocks"]
        gains[rates] = {key: 1 - times["te layers delayed"] / time for key, time in times.items()}
    middle = gains["middle"]
    assert f"need {middle['ours fp8-hybrid']:.1%} less time".replace("%", " %") in text
    assert f"hold {(blocks.peak - ours.peak) / 1e9:.1f} GB more" in text
    behind = middle["ours fp8-hybrid, bf16 between blocks"]
    assert f"the difference is {behind:.1%}.".replace("%", " %") in text
    attention = roofline.predict(blocks, roofline.assumed()).of("attention")
    assert f"Attention takes {attention:.0f} ms" in text
    assert f"would save {attention / 2:.0f} ms" in text
    before = roofline.predict(ours, roofline.assumed()).total
    bound = 1 - ((1 - middle["ours fp8-hybrid"]) * before - attention / 2) / before
    assert f"need up to {bound:.1%} less time".replace("%", " %") in text


def test_largest_values_of_current_scaling_that_the_page_adds():
    """A block of Transformer Engine reads again: its weights in float32; in bf16 the inputs of the output product, and
    the gradients of all four products (those of the norms and of the activation come with their kernels)."""
    shape = models.SHAPES["8b"]
    qkv = shape.hidden + 2 * shape.kv_heads * shape.head_dim
    weights = shape.hidden * (qkv + shape.hidden) + 3 * shape.hidden * shape.ffn
    columns = shape.hidden + (qkv + 2 * shape.hidden + 2 * shape.ffn)
    read = 4 * weights + 2 * 2 * shape.sequence * columns
    ms = shape.layers * read / roofline.assumed().values["bandwidth"] * 1e3
    found = {e.contender: roofline.predict(e, roofline.assumed()).total for e in entries()}
    ahead = 1 - (found["te layers current"] + ms) / found["ours fp8-hybrid, bf16 between blocks"]
    assert f"With the 6 ms, current scaling is predicted to need {ahead:.1%} less".replace("%", " %") in " ".join(
        PAGE.read_text().split()
    )
    assert f"read {read / 1e9:.1f} GB once more to find largest values: {ms:.0f} ms" in " ".join(
        PAGE.read_text().split()
    )


def test_torchao_compiled_is_predicted_to_be_ahead():
    """The evidence for what ``fp8-hybrid`` means; another result changes the rule."""
    found = {entry.contender: entry for entry in entries()}
    for rates in map(roofline.assumed, roofline.H200):
        times = {key: roofline.predict(found[key], rates).total for key in (MAIN, MAIN_TE, TE_COMPILED)}
        assert min(times, key=times.get) == "ours fp8-hybrid"
    assert found["ours fp8-hybrid"].peak < found["ours fp8-hybrid-te"].peak


@pytest.mark.parametrize(("file", "options"), [("ledger", []), ("ledger-124m", ["--shape", "124m", "--batch", "32"])])
def test_the_committed_report_is_made_from_the_committed_figures(file, options):
    data = json.loads((FOLDER / f"{file}.json").read_text())
    keys = [entry["contender"] for entry in data["entries"]] + list(data["missing"])
    chosen = command.parsed([*options, "--contenders", *keys] if options else [])
    text = report.markdown(entries(file), data["missing"], roofline.assumed(), command.command(chosen))
    assert (FOLDER / f"{file}.md").read_text() == text


def test_predictions_stay_out_of_the_readme():
    assert "predicted ms" not in (ROOT / "README.md").read_text()


def test_the_page_has_the_predicted_steps_of_the_lanes_small_model():
    """No step is faster than its products: 6 FLOPs per parameter of a matrix and token, at most at 1300 TFLOP/s."""
    found = {entry.contender: entry for entry in entries("ledger-124m")}
    matrices = 12 * (4 * 768 * 768 + 3 * 768 * 2048) + 50304 * 768
    flops = 6 * matrices * 32768
    times = {name: roofline.predict(entry, roofline.assumed()).total for name, entry in found.items()}
    assert all(1e3 * flops / 1300e12 < ms for ms in times.values())
    said = f"takes {times['lightning bf16-mixed, compiled']:.0f} ms with bf16-mixed"
    said += f" and {times['ours fp8-hybrid']:.0f} ms with `fp8-hybrid`"
    assert said in " ".join(PAGE.read_text().split())


def test_published_rates_of_a_device_are_those_of_the_page():
    """The figures of a B200 in docs/speed.md, in TFLOP/s."""
    rates = command.chosen_rates(command.parsed(["--device", "b200", "--rates", "B200"]))
    found = [rates.of_product(which) for which in ("bfloat16", "float8 fast", "mxfp8 exact", "float4 exact")]
    assert found == [1745.0e12, 3432.5e12, 3265.2e12, 5370.0e12]
