"""Measure planning by depth: a Llama-3-405B-shaped config at 16 to 126 layers, each in a fresh process.

    python -m benchmarks.plan_scaling [--out results.json]

Prints seconds and peak memory of the whole command and of the plan itself (without imports), and the ratio of time per
layer between the deepest and the shallowest: about 1 if time grows linearly.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

DEPTHS = (16, 32, 63, 126)
SHAPE = {
    "model_type": "llama", "hidden_size": 16384, "intermediate_size": 53248, "num_attention_heads": 128,
    "num_key_value_heads": 8, "vocab_size": 128256,
}  # fmt: skip
CHILD = """
import json, resource, sys, time
start = time.perf_counter()
from lightning_lowprec.conversion.plan import make_plan
from lightning_lowprec.tools.planning.costs import flops, footprints
from lightning_lowprec.tools.planning.source import load
import transformers.models.llama.modeling_llama
imported = time.perf_counter()
source = load(sys.argv[1], {})
built = time.perf_counter()
plan = make_plan(source.model)
flops(plan), footprints(source.model, plan, "fp8-hybrid")
done = time.perf_counter()
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps({"rows": len(plan.rows), "total_s": done - start, "build_s": built - imported, "plan_s": done - built,
                  "peak_bytes": peak}))
"""


def measure(depth: int, folder: Path) -> dict[str, float]:
    """Plan one depth in a fresh process and return the figures."""
    path = folder / f"llama{depth}.json"
    path.write_text(json.dumps({**SHAPE, "num_hidden_layers": depth}))
    result = subprocess.run([sys.executable, "-c", CHILD, str(path)], capture_output=True, text=True, check=True)
    path.unlink()
    figures: dict[str, float] = json.loads(result.stdout.splitlines()[-1])
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the figures there as JSON")
    args = parser.parse_args()
    results = {depth: measure(depth, Path.cwd()) for depth in DEPTHS}
    for depth, row in results.items():
        print(
            f"{depth:4d} layers, {row['rows']:4d} rows: {row['total_s']:.2f} s in all, {row['build_s']:.2f} s to build,"
            f" {row['plan_s'] * 1e3:.1f} ms to plan, peak {row['peak_bytes'] / 2**30:.2f} GiB"
        )
    first, last = results[DEPTHS[0]], results[DEPTHS[-1]]
    print(f"time per layer, deepest to shallowest: {last['plan_s'] / DEPTHS[-1] / (first['plan_s'] / DEPTHS[0]):.2f}x")
    if args.out:
        args.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
