"""Hold the roofline against figures that others have measured: `make ledger-score` writes docs/speed.md.

The page has the errors; ``benchmarks/results/published.md`` has a row for every figure.

``benchmarks/results/published.json`` has the figures, models and devices. The amounts of a step come from shapes:

* products: 2 T x in x out FLOPs, forward once and backward twice; ``again``: the share of the forward's products that
  checkpointing repeats, in the blocks of bf16 and of the recipe; attention: half of 4 T x keys x width, backward 2.5;
* bytes per element that products read and write, T x (in + out): as the committed ledger counts them for bf16 and
  torchao's float8 recipes, `ENCODED` for the others; checkpointing repeats those of the forward; weights: `WEIGHTS`;
* the loss: as the ledger counts it in chunks; AdamW: 28 bytes per parameter, divided by the GPUs.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import correlation, fmean, median
from typing import Any

from benchmarks.ledger.entry import PHASES, Amount, Entry
from benchmarks.ledger.roofline import COMMON, H200, Rates, assumed, predict
from benchmarks.rivals.contenders import BASELINE, BF16_TRUE, CHUNKED, FP8_HEAD

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks/results"
PAGE = ROOT / "docs/speed.md"
ROWS = RESULTS / "published.md"
BEGIN, END = "<!-- score: written by `make ledger-score` -->", "<!-- /score -->"
COUNTED = {
    "tensorwise": "torchao tensorwise, compiled",
    "rowwise": "torchao rowwise, compiled",
    "rowwise_gw_hp": "torchao rowwise_with_gw_hp, compiled",
}
"""The contender of the ledger whose bytes above those of bf16-mixed are a recipe's."""
ENCODED = {
    "current": 2 + 2 + 1 + 1,
    "delayed": 2 + 1 + 1,
    "block": 2 + 1 + 1,
    "mxfp8": 2 + 2 * (1 + 1 / 32),
    "nvfp4": 2 + 2 + 2 * (1 / 2 + 1 / 16),
    "mxfp8 torchao": 2 * (2 + 1 + 1 / 32),
    "nvfp4 torchao": 2 + 2 * (2 + 1 / 2 + 1 / 16),
}
"""Bytes per encoded element: bf16 read (once more for the largest value), codes and scales written in two layouts."""
FLOAT32_WEIGHTS = {"forward": 3, "backward": 5}
"""Bytes per float32 weight that float8 moves more than bf16-mixed in the ledger: 9 and 11 instead of 6 and 6."""
WEIGHTS = {"forward": 5, "backward": 3}
"""Bytes per bf16 weight: read for the largest value, read and written; read and written again in the backward."""
FORMATS = {"bf16": "bfloat16", "mxfp8": "mxfp8", "nvfp4": "float4", "block": "float8 block"}
"""The format of a recipe's products by its first word; others are float8."""
OURS = {
    '`fp8-hybrid-remainder`, `head="fp8"`': f"ours fp8-hybrid-remainder, {FP8_HEAD}",
    '`fp8-hybrid-8bit`, `head="fp8"`': f"ours fp8-hybrid-8bit, {FP8_HEAD}",
}
DATA: Mapping[str, Any] = json.loads((RESULTS / "published.json").read_text())
LEDGER = {
    entry["contender"]: Entry.from_json({**entry, "kernels": []})
    for entry in json.loads((RESULTS / "null-gpu-2026-11-29/ledger.json").read_text())["entries"]
}
BLOCK: Sequence[Sequence[int]] = DATA["models"]["Llama-3-8B"]["products"]
"""The products, in x out, of a block of the ledger's stack."""
Figure = Mapping[str, Any]


def elements(products: Sequence[Sequence[int]]) -> int:
    """Return what the products of a block read and write, in elements per token."""
    return sum(map(sum, products))


def counted(contender: str, phase: str) -> float:
    """Return the bytes of a contender's blocks in the ledger per element that their products read and write."""
    entry = LEDGER[contender]
    total = sum(amount.bytes for part, amount in entry.stretches[phase].items() if part != "outside")
    return total / (entry.blocks * entry.tokens * elements(BLOCK))


def encoding(recipe: str, phase: str, products: Sequence[Sequence[int]]) -> float:
    """Return the bytes that a recipe adds per element that products read and write: inputs, then gradients."""
    if recipe in COUNTED:
        weights = FLOAT32_WEIGHTS[phase] * sum(a * b for a, b in BLOCK) / (LEDGER[BASELINE].tokens * elements(BLOCK))
        return counted(COUNTED[recipe], phase) - counted(BASELINE, phase) - weights
    side = 0 if phase == "forward" else 1
    return ENCODED[recipe] * sum(product[side] for product in products) / elements(products)


def products_only(figure: Figure, low: bool) -> dict[str, float]:
    """Return the bytes by phase where every product encodes both of its operands, and nothing else runs."""
    products = DATA["models"][figure["model"]]["products"]
    tokens = figure["batch"] * figure["sequence"]
    weights = sum(a * b for a, b in products)
    sizes = {"forward": sum(a for a, _ in products), "backward": sum(a + 2 * b for a, b in products)}
    codes = ENCODED[figure["recipe"]] if low else 0.0
    return {phase: codes * (weights + tokens * size) for phase, size in sizes.items()}


def block_bytes(figure: Figure, low: bool) -> dict[str, float]:
    """Return the bytes of all blocks by phase."""
    if figure.get("kind") == "products":
        return products_only(figure, low)
    model, recipe = DATA["models"][figure["model"]], figure["recipe"]
    products, tokens = model["products"], figure["batch"] * figure["sequence"]
    encoded = figure.get("blocks", model["layers"]) * low
    found = {}
    for phase in PHASES[:2]:
        base = 0.0 if figure.get("kind") == "linear" else counted(BF16_TRUE, phase) * model["layers"]
        more = encoding(recipe, phase, products) * encoded
        codes = WEIGHTS[phase] if recipe in COUNTED else ENCODED[recipe] * (phase == "forward")
        held = 0 if figure.get("gathered") == "float8" else sum(a * b for a, b in products) * encoded
        found[phase] = tokens * elements(products) * (base + more) + codes * held
    if "again" in figure:
        found["backward"] += found["forward"]
    return found


def step(figure: Figure, low: bool) -> Entry:
    """Return the entry of a step in a published setting, with the recipe or with bf16."""
    model = DATA["models"][figure["model"]]
    tokens, layers, head = figure["batch"] * figure["sequence"], model["layers"], model["vocab"] * model["width"]
    weights = sum(a * b for a, b in model["products"])
    encoded = figure.get("blocks", layers) * low
    again, whole = figure.get("again", (0.0, 0.0)), figure.get("kind") is None
    found = {phase: Amount(bytes=int(size)) for phase, size in block_bytes(figure, low).items()}
    loss = LEDGER[f"{BF16_TRUE}, {CHUNKED}"]
    for phase, products in (("forward", 1), ("backward", 2)):
        amount, repeats = found[phase], phase == "backward"
        multiply(amount, figure["recipe"], products + repeats * again[1], 2 * tokens * weights * encoded)
        multiply(amount, "bf16", products + repeats * again[0], 2 * tokens * weights * (layers - encoded))
        of_head = figure["recipe"] if low and figure.get("head") == "low" else "bf16"
        multiply(amount, of_head, products, 2 * tokens * head)
        if whole:
            keys = figure.get("span", figure["sequence"])
            amount.attention_flops = int(2 * tokens * keys * model["width"] * layers * (2.5 if repeats else 1))
            per_logit = loss.stretches[phase]["outside"].bytes / (loss.tokens * int(loss.shape["vocab"]))
            amount.bytes += int(tokens * model["vocab"] * per_logit)
    share = figure["gpus"] * figure.get("accumulate", 1)
    found["optimizer"] = Amount(bytes=int(whole * 28 * (weights * layers + 2 * head) / share))
    stretches = {phase: {"0": amount} for phase, amount in found.items()}
    return Entry(figure["name"], figure["device"], {}, 1, 0, stretches, [], [], 0, 0, {}, {}, {}, [], 0.0)


def multiply(amount: Amount, recipe: str, times: float, flops: float) -> None:
    """Add ``times`` products; with rowwise_gw_hp the gradient of the weight stays in bf16."""
    plain = 1.0 if recipe == "rowwise_gw_hp" and times >= 2 else 0.0
    for name, share in ((FORMATS.get(recipe.partition(" ")[0], "float8"), times - plain), ("bfloat16", plain)):
        if flops * share:
            amount.product_flops[name] = amount.product_flops.get(name, 0) + int(flops * share)


def rates(device: str) -> Rates:
    """Return a device's rates: products as published; attention and bytes by the shares assumed of an H200."""
    found = DATA["devices"][device]
    values = {name: 1e12 * rate for name, rate in found["rates"].items()}
    for name in ("attention forward", "attention backward"):
        values[name] = values["bfloat16"] * COMMON[name] / H200["middle"]["bfloat16"]
    values["bandwidth"] = found["bandwidth"] * COMMON["bandwidth"] / 4.8
    return Rates(device, {**values, "gap": 0.0})


def seconds(figure: Figure, low: bool) -> float:
    """Return the predicted time of a step."""
    return predict(step(figure, low), rates(figure["device"])).total / 1e3


def ratio(figure: Figure, times: float = 1.0) -> float:
    """Return how many times faster than bf16 a recipe is predicted to be, where bf16 takes ``times`` its prediction.

    What bf16 takes above its prediction stays as it is: the recipe saves the predicted seconds.
    """
    return gain(seconds(figure, False), seconds(figure, True), times)


def gain(base: float, low: float, times: float) -> float:
    """Return the ratio of two steps, the first of which takes ``times`` the prediction ``base``."""
    return times * base / (times * base - (base - low))


def longer(figure: Figure) -> float:
    """Return how many times its predicted time a published step in bf16 took."""
    return float(figure["batch"] * figure["sequence"] / figure["published"][0] / seconds(figure, False))


def measured(figure: Figure) -> float:
    """Return how many times faster than bf16 the recipe was, as published."""
    base, low = figure["published"]
    return float(base / low if figure["unit"] == "ms" else low / base)


def error(predicted: Sequence[float], truth: Sequence[float]) -> float:
    """Return the mean absolute error, relative to the truth."""
    return fmean(abs(p / t - 1) for p, t in zip(predicted, truth, strict=True))


def ranks(values: Sequence[float]) -> list[float]:
    """Return each value's rank from 1; equal values share the mean of theirs."""
    return [sum(v < value for v in values) + (sum(v == value for v in values) + 1) / 2 for value in values]


def spearman(a: Sequence[float], b: Sequence[float]) -> float:
    """Return the rank correlation."""
    return correlation(ranks(a), ranks(b))


def with_ratio(steps: bool) -> list[Figure]:
    """Return the published figures that have a ratio; ``steps``: of whole steps only."""
    found = [figure for figure in DATA["figures"] if figure["published"][0] is not None]
    return [figure for figure in found if figure.get("kind") is None] if steps else found


def missed() -> float:
    """Return the mean absolute error, in percent, of the predicted ratios of whole published steps."""
    return 100 * error(list(map(ratio, with_ratio(True))), list(map(measured, with_ratio(True))))


def row(figure: Figure) -> list[str]:
    """Return a figure's row of the page."""
    setting = f"{figure['batch']} x {figure['sequence']:,}, {figure['gpus']}"
    ratios, speed = ["", "", "", ""], ""
    if figure["published"][0] is not None:
        truth, predicted = measured(figure), ratio(figure)
        ratios = [f"{truth:.2f}", f"{predicted:.2f}", f"{100 * (predicted / truth - 1):+.0f}", ""]
    if figure["unit"] == "tokens/s":
        speed = f"{figure['batch'] * figure['sequence'] / seconds(figure, True) / figure['published'][1]:.2f}"
        if figure["published"][0] is not None:
            ratios[3] = f"{ratio(figure, longer(figure)):.2f}"
    return [f"[{figure['name']}]({figure['address']})", setting, *ratios, speed, figure["silent"]]


def table(head: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    """Return a Markdown table; empty if there are no rows."""
    lines = [f"| {' | '.join(map(str, row))} |" for row in rows]
    return "\n".join([f"| {' | '.join(map(str, head))} |", "|" + "---|" * len(head), *lines]) if lines else ""


def scores() -> str:
    """Return the table of errors and rank correlations, of all figures and of kinds of them."""
    every, steps = with_ratio(False), with_ratio(True)
    parts = [figure for figure in every if figure not in steps]
    known = [ratio(figure, longer(figure)) for figure in steps]
    rows = []
    for words, figures, predicted in (
        ("all", every, list(map(ratio, every))),
        ("steps", steps, list(map(ratio, steps))),
        ("steps whose time in bf16 is known", steps, known),
        ("layers and products alone", parts, list(map(ratio, parts))),
    ):
        truth = list(map(measured, figures))
        signed = f"{100 * fmean(a / b - 1 for a, b in zip(predicted, truth, strict=True)):+.1f}"
        found = [f"{100 * error(predicted, truth):.1f}", signed, f"{spearman(predicted, truth):.2f}"]
        rows.append([words, len(figures), *found])
    return table(["figures", "", "mean absolute error, %", "mean error, %", "rank correlation"], rows)


def ours() -> str:
    """Return the table of our own predictions with the errors of the published steps."""
    steps = with_ratio(True)
    times = [longer(figure) for figure in steps]
    truth, off = list(map(measured, steps)), missed() / 100
    known = error([ratio(figure, longer(figure)) for figure in steps], truth)
    base = predict(LEDGER[f"{BASELINE}, {CHUNKED}"], assumed()).total
    rows = []
    for words, contender in OURS.items():
        cells, low = [words], predict(LEDGER[contender], assumed()).total
        for own, error_of in ((base / low, off), (gain(base, low, median(times)), known)):
            cells += [f"{own:.2f}", f"{own / (1 + error_of):.2f} to {own / (1 - error_of):.2f}"]
        rows.append(cells)
    head = ["our prediction", "over bf16-mixed, same loss", "by the error of steps"]
    slower = f"where bf16 takes {median(times):.2f} times its prediction"
    return table([*head, slower, "by the error of such steps"], rows)


def report() -> tuple[str, str]:
    """Return what stands between the markers of the page, and the page with a row for every figure."""
    return f"{scores()}\n\n{ours()}", single()


def single() -> str:
    """Return the page with a row for every published figure, device and figure that was left out."""
    formats = ("bfloat16", "float8", "float8 block", "mxfp8", "float4")
    devices = [
        [name, *(str(found["rates"].get(which, "")) for which in formats), str(found["bandwidth"]),
         f"[{found['note']}]({found['address']})"]
        for name, found in DATA["devices"].items()
    ]  # fmt: skip
    return "\n\n".join((
        "# Published figures beside predictions\n\nWritten by `make ledger-score`. How to read this: docs/speed.md.",
        table(["figure", "sequences x tokens, GPUs", "published", "predicted", "error, %", "time of bf16 known",
               "tokens/s, predicted over published", "not said"], map(row, DATA["figures"])),
        table(["TFLOP/s", "bf16", "FP8", "FP8, block scales", "MXFP8", "NVFP4", "TB/s, data sheet", "source"], devices),
        table(["left out", "why"], [[f"[{x['what']}]({x['address']})", x["why"]] for x in DATA["left_out"]]),
    )) + "\n"  # fmt: skip


def updated(page: str) -> str:
    """Return the page with a new report between its markers."""
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n\n{report()[0]}\n\n{END}{rest.split(END)[1]}"


def main() -> None:
    """Write both pages and print them."""
    PAGE.write_text(updated(PAGE.read_text()))
    ROWS.write_text(report()[1])
    print(PAGE.read_text(), ROWS.read_text())


if __name__ == "__main__":
    main()
