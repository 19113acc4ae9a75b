"""The report in Markdown, and the summary for the page of the docs: all figures come from the results."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence

from benchmarks.convergence.gaps import Row, holm, resolution
from benchmarks.convergence.precisions import BASELINE, FAST, PROMOTED, REPRESENTATIVE
from benchmarks.convergence.results import Results
from lightning_lowprec.names import TABLE
from lightning_lowprec.tools.output import format_table

REPORT = "report.md"
USUAL = "bf16-mixed"
"""Lightning's precision that most users have today."""
HOW = (
    "Each run is compared with the run of `32-true` of the same seed, which begins with the same weights and reads the"
    " same batches. The gap is the mean of these relative differences of the validation loss after the last step; more"
    " than zero is worse than float32. ± after a gap is the half width of the 95 % confidence interval (Student's t);"
    " ± after a loss is the standard deviation over the seeds."
)
FINE_PRINT = (
    "FP8, MXFP8 and int8 are emulated on a CPU: codes and scales are those of a GPU, products are computed in float32,"
    " except under names with `@`, which add up as this GPU's tensor cores do. bf16 and fp16 are what this CPU's"
    " libraries compute. No kernel of a GPU ran, so nothing here is about speed,"
    " about the order of sums in GPU kernels, or about Transformer Engine. The models are tiny, with"
    " some hundred steps: effects that need large models, outliers of trained models or thousands of steps cannot"
    " be seen."
)


def markdown(results: Results) -> str:
    """Return the report."""
    parts = [
        "# Low precision against float32 on a CPU",
        HOW,
        summary(results),
        "### What this does not show",
        FINE_PRINT,
    ]
    versions = [f"- {name}: {found or 'not installed'}" for name, found in results.data["machine"]["versions"].items()]
    return "\n\n".join([*parts, "### Versions", "\n".join(versions)]) + "\n"


def summary(results: Results) -> str:
    """Return what the page of the docs shows: facts, findings, one table of all gaps, and names without a run."""
    parts = [facts(results), *findings(results), "### The gaps", "\n".join(overview(results)), "\n".join(sums(results))]
    parts += ["### What each model learned", *(learned(results, key) for key in results.titles)]
    parts += ["### Names without a run", "\n".join(left_out(results))]
    return "\n\n".join(part for part in parts if part)


def facts(results: Results) -> str:
    """Return where, when and how long."""
    data, text = results.data, results.data["settings"]["text"]
    where = text.get("where") or f"{text['files']} files of the installed packages"
    runs = len(data["runs"])
    smoke = "**Toy sizes: these figures mean nothing.** " if data["smoke"] else ""
    return (
        f"{smoke}{runs} runs with {data['seeds']} seeds on {data['machine']['cpu']}, {data['workers']} at a time with"
        f" one thread each, {data['seconds'] / 60:.0f} minutes, {data['date']}, torch"
        f" {data['machine']['versions']['torch']}. The text: {text['bytes'] / 1e6:.0f} MB in {where} (SHA-256"
        f" `{text['sha256'][:16]}`), {text.get('share', 'a twentieth')} of the files for validation."
    )


def findings(results: Results) -> list[str]:
    """Return what the figures say, one paragraph per question."""
    found = results.comparisons
    if not found:
        return ["With one seed there are no intervals, so that nothing is compared."]
    apart = [row for row in found.values() if row.gap and not row.gap.holds_zero]
    worst = max(found, key=lambda key: found[key].gap.mean if found[key].gap else 0.0)
    worst_gap = found[worst].gap
    assert worst_gap is not None
    remain = [f"`{name}` ({results.titles[key]}, {_percent(found[key, name])})" for key, name in found
              if (key, name) in results.remaining]  # fmt: skip
    within = sum(1 for row in found.values() if row.gap and row.gap.is_within(0.01))
    parts = [
        f"**{len(found)} comparisons with float32.** The largest mean gap is {_percent(found[worst])}: `{worst[1]}`,"
        f" {results.titles[worst[0]]}. In {within} comparisons the whole interval is within 1 % of float32.",
        f"**By chance alone**, one interval in twenty leaves out zero: about {len(found) / 20:.0f} of {len(found)}."
        f" {len(apart)} do, {sum(1 for row in apart if row.gap and row.gap.mean > 0)} of them on the worse side. With"
        " Holm's procedure, at 5 % for all comparisons together, "
        + (f"{len(remain)} remain: {', '.join(remain)}." if remain else "none remains."),
        _ranges(results),
        _resolutions(results),
        _control(results),
        _twins(results),
        _failures(results),
    ]
    return [part for part in parts if part]


def _ranges(results: Results) -> str:
    """Return the least and the largest mean gap of this package's precisions for each subject, beside bf16-mixed's."""
    words = []
    for key in results.compared:
        gaps = {row.precision: row.gap.mean for row in results.rows[key] if row.gap}
        ours = {name: mean for name, mean in gaps.items() if name in TABLE}
        if ours:
            least, most = min(ours, key=ours.__getitem__), max(ours, key=ours.__getitem__)
            beside = f"; `{USUAL}` {gaps[USUAL]:+.2%}" if USUAL in gaps else ""
            words.append(
                f"{results.titles[key]} {ours[least]:+.2%} (`{least}`) to {ours[most]:+.2%} (`{most}`){beside}"
            )
    return (
        f"**Mean gaps of this package's precisions**, from the least to the largest: {'. '.join(words)}."
        if words
        else ""
    )


def _resolutions(results: Results) -> str:
    widths = {results.titles[key]: resolution(results.rows[key]) for key in results.compared}
    listed = ", ".join(f"{width:.2%} for the {title}" for title, width in widths.items() if width is not None)
    return f"**What the experiment can see:** the median half width of an interval is {listed}." if listed else ""


def _control(results: Results) -> str:
    found = results.control
    if not found:
        return ""
    remain = holm(found)
    words = [f"`{name}` {_percent(row)}{' (differs)' if name in remain else ''}" for name, row in found.items()]
    return (
        "**Positive control:** with a small learning rate, weights in bf16 lose updates that are smaller than half"
        " their last digit, and float32 masters or stochastic rounding keep these updates. The gaps to float32:"
        f" {', '.join(words)}. Differs: after Holm's procedure over these {len(found)}."
    )


def _models_by(results: Results, keys: Iterable[str], field: str) -> dict[tuple[str, str], str]:
    """Return the models in which a precision has this field, by the precision and the field."""
    models = defaultdict(list)
    for key in keys:
        for row in results.rows[key]:
            if getattr(row, field):
                models[row.precision, getattr(row, field)].append(key)
    return {pair: ", ".join(keys) for pair, keys in models.items()}


def _twins(results: Results) -> str:
    pairs = _models_by(results, results.compared, "twin")
    found = [f"`{name}` and `{twin}` ({models})" for (name, twin), models in pairs.items()]
    return f"**The same losses, bit for bit, in every step of every seed:** {'; '.join(found)}." if found else ""


def _failures(results: Results) -> str:
    failed = _models_by(results, results.titles, "error")
    found = [f"`{name}` ({models}): {error}" for (name, error), models in failed.items()]
    return f"**Did not end with a finite loss:** {'; '.join(found)}." if found else ""


def learned(results: Results, key: str) -> str:
    """Return one sentence on what float32 reached, beside a guess without a model."""
    baseline, guess = results.rows[key][0], results.data["guesses"][key]
    if not baseline.losses:
        return f"**{_upper(results.titles[key])}**: float32 failed."
    words = f"**{_upper(results.titles[key])}**: float32 ends at {_mean(baseline.losses)} nats; {guess['words']}"
    words += f" has {guess['loss']:.4f}."
    if baseline.accuracies:
        words += f" Accuracy: {statistics.fmean(baseline.accuracies):.1%} (a guess: 10 %)."
    bases = [base["val_loss"] for base in results.data["bases"] if base["subject"] == key]
    if bases:
        words += f" The base, trained in float32 on other text (its own validation loss: {_mean(bases)}), is frozen."
    return words


def overview(results: Results) -> list[str]:
    """Return one table with a row per precision and a column per subject; bold: differs after Holm's procedure."""
    keys = results.compared
    by_key = {key: {row.precision: row for row in results.rows[key]} for key in keys}
    names = list(dict.fromkeys(name for key in keys for name in by_key[key] if name != BASELINE))
    table = [["precision", *(results.titles[key] for key in keys)]]
    table += [[name, *(_cell(results, key, by_key[key].get(name)) for key in keys)] for name in names]
    return _table(table)


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a table of figures, some of them bold."""
    lines = format_table(rows, right=range(1, len(rows[0])), markdown=True)
    return [line.replace("\\*\\*", "**") for line in lines]


def sums(results: Results) -> list[str]:
    """Return a table of how products are summed: the gaps of one precision, a row per subject; [] if it was not run."""
    table = [[REPRESENTATIVE, "summed in float32", "as on Hopper", "as on Hopper, promoted"]]
    for key in results.compared:
        rows = {row.precision: row for row in results.rows[key]}
        if FAST in rows:
            cells = (_cell(results, key, rows.get(name)) for name in (REPRESENTATIVE, FAST, PROMOTED))
            table.append([results.titles[key], *cells])
    if len(table) == 1:
        return []
    return ["### Sums of a GPU", "", *_table(table)]


def left_out(results: Results) -> list[str]:
    """Return one line per reason, with the names that it is about."""
    by_reason = defaultdict(list)
    for name, reason in results.data["left_out"].items():
        by_reason[reason].append(f"`{name}`")
    lines = [f"- {', '.join(names)}: {reason}" for reason, names in by_reason.items()]
    same = [f"`{name}` ({meant})" for name, meant in results.data["same"].items()]
    lines.append(f"- Names that mean another name here (in brackets): {', '.join(same)}.")
    few = [title for key, title in results.titles.items() if results.choice(key) == "without suffix"]
    some = [f"`{name}`" for name in results.with_suffix]
    if few and some:
        lines.append(f"- Not run on some models ({', '.join(few)}), to save time: {', '.join(some)}.")
    return lines


def _cell(results: Results, key: str, row: Row | None) -> str:
    if row is None:
        return "-"
    if row.error:
        return "fails"
    return f"**{_percent(row)}**" if (key, row.precision) in results.remaining else _percent(row)


def _percent(row: Row) -> str:
    if row.error:
        return "fails"
    if row.gap is None:
        return "-"
    return "equal" if not any(row.gaps) else row.gap.percent()


def _mean(losses: Sequence[float]) -> str:
    if not losses:
        return "-"
    mean = f"{statistics.fmean(losses):.4f}"
    return mean if len(losses) == 1 else f"{mean} ± {statistics.stdev(losses):.4f}"


def _upper(title: str) -> str:
    return title[0].upper() + title[1:]
