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
from dataclasses import asdict, replace
from pathlib import Path

from benchmarks import machine
from benchmarks.convergence import page, precisions, subjects, text
from benchmarks.convergence.facts import guesses, machine_facts
from benchmarks.convergence.precisions import BASELINE, FAST, PROMOTED
from benchmarks.convergence.results import SCHEMA, Results, today
from benchmarks.convergence.runs import FILE as RUNS
from benchmarks.convergence.runs import Runs, tasks, train_all

SMOKE_NAMES = (BASELINE, "bf16-mixed", "fp8-hybrid", FAST)


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
    parser.add_argument("--names", type=lambda words: words.split(","), help="only these, comma-separated, and float32")
    parser.add_argument("--models", type=lambda words: words.split(","), help="only these: gpt, llama, vit, lora")
    parser.add_argument("--steps", type=int, help="steps of every model; default: 80 to 200, by model")
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
    found = replace(found, names=(*found.names, FAST, PROMOTED))
    if options.smoke:
        found = replace(found, names=SMOKE_NAMES)
    if options.names is not None:
        found = replace(found, names=(BASELINE, *options.names))
    chosen = subjects.smoke() if options.smoke else subjects.committed(options.steps)
    if options.names is not None or options.models is not None:  # every chosen model under every chosen name
        keys = options.models or [subject.key for subject in chosen if subject.choice != "control"]
        chosen = [replace(subject, choice="every") for subject in chosen if subject.key in keys]
    with tempfile.TemporaryDirectory(prefix="convergence-") as folder:
        work = Path(folder)
        facts, settings = machine_facts(), [asdict(subject) for subject in chosen]
        depends_on = {"subjects": settings, "text": text.facts(), "cpu": facts["cpu"], "versions": facts["versions"]}
        runs = Runs(options.out, depends_on, machine.commit())
        todo = tasks(chosen, found, options.seeds, work)
        train_all(todo, runs, options.workers)
        finished = runs.by_key
        results = Results(
            {
                "schema": SCHEMA,
                "date": today(),
                "smoke": options.smoke,
                "seeds": options.seeds,
                "workers": options.workers,
                "seconds": round(sum(runs.of("seconds")), 1),
                "commits": runs.of("commit"),
                "machine": facts,
                "settings": {"subjects": settings, "text": depends_on["text"]},
                "guesses": guesses(chosen),
                "left_out": found.left_out,
                "same": found.same,
                "bases": runs.of("base"),
                "runs": [finished[task.key] for task in todo],
            }
        )
    results.write(options.out)
    write_report(results, options.out)
    print(f"{len(todo)} runs; the report: {options.out / 'report.md'}")


def write_report(results: Results, folder: Path) -> None:
    """Write the report and the pictures."""
    from benchmarks.convergence.pictures import draw
    from benchmarks.convergence.report import REPORT, markdown

    (folder / REPORT).write_text(markdown(results), encoding="utf-8")
    draw(results, folder)


if __name__ == "__main__":
    sys.exit(main())
