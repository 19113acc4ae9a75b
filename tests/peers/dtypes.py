"""Look for float32 products in a training step of every mixture of experts of transformers, under our names.

    python -m tests.peers.dtypes [--names half-auto,fp8-rowwise,msamp-o2] [--only mixtral,t5] [--word PreTrainedModel]

``make test-dtypes``, a part of ``make test-peers``. A mixture that does not run tiny needs a line in ``NOT_RUN``. With
``--word PreTrainedModel`` all families run; there, a family that does not run is printed with the reason.
"""

import argparse
import inspect
import logging
import warnings
from collections import Counter
from pathlib import Path

import transformers

import lightning_lowprec
from tests.families.products import step
from tests.families.tiny import build, classes, families

NAMES = "half-auto,fp8-rowwise,msamp-o2"
SEAM = "@use_experts_implementation"
NOT_RUN = {
    ("deepseek_ocr2", "*"): "its tiny model raises: 'NoneType' object is not subscriptable",
    ("dbrx", "*"): "its configuration of attention has no rope_theta: the class of transformers cannot be built",
    ("dots3_note", "*"): "its configuration raises: options may differ in each layer (num_key_value_heads)",
    ("ernie4_5_vl_moe", "*"): "its tiny model raises: the expanded size of a tensor (8) must match the size (0)",
    ("qwen4_exp", "*"): "options of its indexer have no value by default",
}
"""The mixtures that do not run tiny, and why."""


def main() -> int:
    options = arguments()
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    logging.disable(logging.INFO)
    only = options.only.split(",") if options.only else None
    chosen = [family for family in families(options.word) if only is None or family.split(".")[2] in only]
    counts, unknown = Counter[str](), 0
    for family in chosen:
        for name in options.names.split(","):
            short = family.split(".")[2]
            outcome, lines = look(family, name)
            counts[outcome] += 1
            known = NOT_RUN.get((short, name)) or NOT_RUN.get((short, "*"))
            if outcome == "not run" and known is not None:
                lines = [known]
            elif outcome == "not run" and options.word == SEAM:
                unknown += 1
            if outcome != "clean":
                print(f"{outcome:8s} {short:24s} {name:12s} {' | '.join(lines)}", flush=True)
    print(", ".join(f"{counts[outcome]} {outcome}" for outcome in ("clean", "faults", "not run")))
    return int(counts["faults"] + unknown > 0)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.peers.dtypes", description=__doc__.splitlines()[0])
    parser.add_argument("--names", default=NAMES, help="precisions (%(default)s)")
    parser.add_argument("--only", default="", help="families; default: all")
    parser.add_argument("--word", default=SEAM, help="families whose file has this word (%(default)s)")
    return parser.parse_args()


def look(family: str, name: str) -> tuple[str, list[str]]:
    reasons = ["needs a package that is not installed"] if not classes(family) else []
    for cls in classes(family)[:6]:
        try:
            model = build(cls)
            has_experts = any(row.kind == "stacked experts" for row in lightning_lowprec.plan(model).rows)
            products = step(model, name)
        except Exception as error:  # the models of other people: whatever they raise is the reason
            reasons.append(f"{cls.__name__}: {type(error).__name__}: {' '.join(str(error).split())[:140]}")
            continue
        if SEAM in Path(inspect.getfile(cls)).read_text() and not has_experts:
            reasons.append(f"{cls.__name__}: has no experts")
            continue
        faults = products.faults()
        if name == "half-auto" and products.backward_surplus() > 0:
            faults.append(f"{products.backward_surplus()} more float32 products in the backward pass")
        return ("faults", faults) if faults else ("clean", [])
    return "not run", reasons[:1]


if __name__ == "__main__":
    raise SystemExit(main())
