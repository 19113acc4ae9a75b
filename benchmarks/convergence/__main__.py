"""Train four small models under every precision that a CPU trains, and compare the losses with those of float32.

    make evidence                                                  # the committed size, into evidence-out/
    python -m benchmarks.convergence --out FOLDER                  # the same; goes on where an earlier call ended
    python -m benchmarks.convergence --smoke --out FOLDER          # toy sizes, to see that it runs
    python -m benchmarks.convergence --report FOLDER               # report and pictures again, from results.json
    python -m benchmarks.convergence --page                        # docs/evidence.md, from the committed results

The folder gets results.json, report.md and two pictures; runs.jsonl has the finished runs while others go on.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.convergence import page, precisions, subjects
from benchmarks.convergence.corpus import Corpus, collect
from benchmarks.convergence.facts import guesses, machine_facts
from benchmarks.convergence.journal import FILE as RUNS
from benchmarks.convergence.journal import Journal
from benchmarks.convergence.precisions import BASELINE, Precisions
from benchmarks.convergence.results import SCHEMA, Results, today
from benchmarks.convergence.runner import LOG, tasks, train_all
from benchmarks.convergence.subjects import Subject
from benchmarks.convergence.training import settings
from benchmarks.gpu_lane import machine

MAX_BYTES = 200_000_000
SMOKE_BYTES = 6_000_000
SMOKE_NAMES = (BASELINE, "bf16-mixed", "fp8-hybrid")


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0, or 1 with the reason on stderr."""
    options = parsed(argv)
    try:
        if options.page:
            page.write()
        elif options.report is not None:
            write_report(Results.read(options.report), options.report)
        else:
            train(options)
    except (ValueError, FileNotFoundError, RuntimeError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the options of the command."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.convergence",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, default=Path("evidence-out"), help="folder for the results")
    parser.add_argument("--seeds", type=int, help="seeds of each precision; default: 5, with --smoke 2")
    parser.add_argument("--workers", type=int, default=2, help="runs at a time, one thread each")
    parser.add_argument("--smoke", action="store_true", help="toy sizes: two models, three precisions, two seeds")
    parser.add_argument("--force", action="store_true", help="delete the runs that an earlier call left in --out")
    parser.add_argument("--report", type=Path, metavar="FOLDER", help="only write report and pictures again")
    parser.add_argument("--page", action="store_true", help="only write docs/evidence.md from the committed results")
    options = parser.parse_args(argv)
    if options.seeds is None:
        options.seeds = 2 if options.smoke else 5
    for name in ("seeds", "workers"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} {getattr(options, name)} is not valid; expected 1 or more.")
    return options


def train(options: argparse.Namespace) -> None:
    """Train what is not trained yet, and write the results, the report and the pictures."""
    if options.force:
        (options.out / RUNS).unlink(missing_ok=True)
    found = precisions.on_cpu()
    if options.smoke:
        found = replace(found, names=SMOKE_NAMES)
    chosen = subjects.smoke() if options.smoke else subjects.committed()
    with tempfile.TemporaryDirectory(prefix="convergence-") as folder:
        work = Path(folder)
        corpus = collect(work / "text.bin", SMOKE_BYTES if options.smoke else MAX_BYTES)
        depends_on = {"subjects": [settings(s) for s in chosen], **_settings(corpus)}
        journal = Journal(options.out, depends_on, machine.commit())
        todo = tasks(chosen, found, options.seeds, corpus, work)
        train_all(todo, journal, options.workers, options.out / LOG)
        results = Results(_data(options, chosen, corpus, found, journal, todo))
    results.write(options.out)
    write_report(results, options.out)
    print(f"{len(todo)} runs; the report: {options.out / 'report.md'}")


def _settings(corpus: Corpus) -> dict[str, Any]:
    """Return what the result of a run depends on, beside its subject, precision and seed."""
    facts = machine_facts()
    return {"text": corpus.facts(), "cpu": facts["cpu"], "versions": facts["versions"]}


def _data(
    options: argparse.Namespace,
    chosen: Sequence[Subject],
    corpus: Corpus,
    found: Precisions,
    journal: Journal,
    todo: Sequence[Any],
) -> dict[str, Any]:
    """Return the content of ``results.json``: the runs in the order in which they were asked for."""
    return {
        "schema": SCHEMA,
        "date": today(),
        "smoke": options.smoke,
        "seeds": options.seeds,
        "workers": options.workers,
        "seconds": round(journal.seconds, 1),
        "commits": journal.commits,
        "machine": machine_facts(),
        "settings": {"subjects": [settings(s) for s in chosen], "text": corpus.facts()},
        "guesses": guesses(chosen, corpus),
        "left_out": found.left_out,
        "same": found.same,
        "bases": list(journal.bases.values()),
        "runs": [journal.runs[task.subject.key, task.precision, task.seed] for task in todo],
    }


def write_report(results: Results, folder: Path) -> None:
    """Write the report and the pictures."""
    from benchmarks.convergence.pictures import draw
    from benchmarks.convergence.report import REPORT, markdown

    (folder / REPORT).write_text(markdown(results), encoding="utf-8")
    draw(results, folder)


if __name__ == "__main__":
    sys.exit(main())
