"""Count what the contenders (`benchmarks/rivals`) ask of a GPU, and predict times from the counts.

make ledger                                     # the contenders that matter most, a few minutes
python -m benchmarks.ledger --all               # all
python -m benchmarks.ledger --contenders 'ours fp8-hybrid' --layers 2 --device b200 --rates measured.json
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.ledger import counting, report, roofline, score
from benchmarks.ledger.build import CannotBuild
from benchmarks.ledger.entry import Entry
from benchmarks.ledger.launch import DEVICES, environment

HERE = Path(__file__).parents[2]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the contenders in child processes, and write JSON, Markdown and a picture."""
    options = parsed(arguments)
    if not has_cuda_torch():
        return refused(
            "This Python has a torch without CUDA. `make ledger` sets up an environment with the CUDA build."
        )
    from benchmarks.rivals import contenders

    known = [contender.key for contender in contenders.contenders()]
    keys = options.contenders or (known if options.all else list(contenders.ORDER))
    unknown = [key for key in keys if key not in known]
    if unknown:
        return refused(f"--contenders {unknown} are not valid; expected some of: {', '.join(known)}")
    rates = chosen_rates(options)
    if options.fresh:
        shutil.rmtree(options.out / "entries", ignore_errors=True)
    (options.out / "entries").mkdir(parents=True, exist_ok=True)
    try:
        count(keys, options)
    except CannotBuild as error:
        return refused(str(error))
    entries, missing = collected(keys, options.out)
    if not entries:
        return refused("nothing was counted:\n" + "\n".join(f"{key}: {why}" for key, why in missing.items()))
    write(entries, missing, rates, options)
    return 0


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options of the command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ledger", description=__doc__)
    parser.add_argument("--contenders", nargs="+", metavar="KEY", help="keys of contenders; default: the first ones")
    parser.add_argument("--all", action="store_true", help="every contender")
    parser.add_argument("--device", choices=DEVICES, default="h200")
    parser.add_argument("--shape", default="8b", help="a model of benchmarks/rivals/models.py")
    parser.add_argument("--layers", type=int, help="instead of the model's own number")
    parser.add_argument("--batch", type=int, default=2, help="sequences per step")
    parser.add_argument(
        "--rates",
        help="'middle', 'optimistic' or 'pessimistic' (an H200), a device that docs/speed.md has rates of (B200),"
        " or a JSON file of measured rates",
    )
    parser.add_argument("--out", type=Path, default=Path("ledger-out"))
    parser.add_argument("--keep", dest="fresh", action="store_false", help="keep what an earlier call has counted")
    return parser.parse_args(arguments)


def has_cuda_torch() -> bool:
    """Return whether torch was built for CUDA."""
    import torch

    return torch.version.cuda is not None


def refused(why: str) -> int:
    """Say why, and return the exit status."""
    print(why, file=sys.stderr)
    return 1


def chosen_rates(options: argparse.Namespace) -> roofline.Rates | None:
    """Return the rates that ``--rates`` names; without it those of an H200, and none for other devices."""
    if options.rates is None:
        return roofline.assumed() if options.device == "h200" else None
    if options.rates in score.DATA["devices"]:
        values = {**score.rates(options.rates).values, "gap": roofline.COMMON["gap"]}
        formats = ("float8", "mxfp8", "float4")
        both = {f"{name} {sums}": values[name] for name in formats if name in values for sums in ("fast", "exact")}
        return roofline.Rates(f"published, {options.rates}", {**values, **both})
    return (
        roofline.assumed(options.rates) if options.rates in roofline.H200 else roofline.from_file(Path(options.rates))
    )


def count(keys: Sequence[str], options: argparse.Namespace) -> None:
    """Run child processes until every contender has a file; the one at which a process dies gets the reason."""
    environ = environment(options.device)
    while todo := [key for key in keys if not counting.file_of(options.out, key).exists()]:
        print(f"[{len(keys) - len(todo) + 1}/{len(keys)}] {todo[0]} ...", file=sys.stderr, flush=True)
        command = [sys.executable, "-m", "benchmarks.ledger.counting", "--out", options.out, "--shape", options.shape]
        command += ["--batch", options.batch, *([] if options.layers is None else ["--layers", options.layers]), *todo]
        log = options.out / "log.txt"
        with log.open("a") as file:
            status = subprocess.run(list(map(str, command)), env=environ, stdout=file, stderr=file).returncode
        left = [key for key in todo if not counting.file_of(options.out, key).exists()]
        if status not in (0, counting.DIRTY) and left:
            why = f"the process ended with status {status}; see {log}"
            counting.file_of(options.out, left[0]).write_text(json.dumps({"missing": why}))


def collected(keys: Sequence[str], out: Path) -> tuple[list[Entry], dict[str, str]]:
    """Return the entries, and the reasons of those that are missing."""
    data = {key: json.loads(counting.file_of(out, key).read_text()) for key in keys}
    missing = {key: found["missing"] for key, found in data.items() if "missing" in found}
    return [Entry.from_json(found) for key, found in data.items() if key not in missing], missing


def command(options: argparse.Namespace) -> str:
    """Return the command that counts the same again; where its files lie does not matter."""
    words = ["python", "-m", "benchmarks.ledger"]
    if options.contenders:
        words += ["--contenders", *options.contenders]
    elif options.all:
        words.append("--all")
    for name in ("device", "shape", "layers", "batch", "rates"):
        value = getattr(options, name)
        if value != parsed([]).__dict__[name]:
            words += [f"--{name}", str(value)]
    return shlex.join(words)


def write(
    entries: list[Entry], missing: dict[str, str], rates: roofline.Rates | None, options: argparse.Namespace
) -> None:
    """Write ``ledger.json``, ``ledger.md`` and ``ledger.png``, and print the Markdown."""
    text = report.markdown(entries, missing, rates, command(options))
    kept = [{key: value for key, value in entry.to_json().items() if key != "kernels"} for entry in entries]
    lines = ",\n".join(json.dumps(entry) for entry in kept)
    (options.out / "ledger.json").write_text(f'{{"entries": [\n{lines}\n],\n"missing": {json.dumps(missing)}}}\n')
    (options.out / "ledger.md").write_text(text)
    if rates is not None:
        report.draw(entries, rates, options.out / "ledger.png")
    print(text)


if __name__ == "__main__":
    sys.exit(main())
