"""Look at every model class of transformers: what bf16-remainder casts that should be float32, and what it keeps.

    python -m tests.peers.float32 [--only mixtral,mamba]

A part of ``make test-dtypes``. Models are tiny and on the meta device. What a model declares is read by transformers'
own function for loading, other reasons by the list below.
"""

import argparse
import logging
import sys
import warnings
from collections import Counter

import torch
import transformers
from torch.nn.modules.batchnorm import _NormBase
from transformers.core_model_loading import build_glob_alternation

from lightning_lowprec import HalfMixed
from tests.families.tiny import classes, config, families
from tests.toys import convert

BY_NAME = ("A_log", "dt_bias", "e_score_correction_bias", "expert_bias")


def declared(model: transformers.PreTrainedModel, dtype: torch.dtype) -> set[str]:
    """Return the tensors that ``from_pretrained(dtype=dtype)`` loads as float32."""
    plan = model._get_dtype_plan(dtype)
    if not plan:
        return set()
    found, _, _ = build_glob_alternation(list(plan))
    tensors = (*model.named_parameters(), *model.named_buffers())
    return {fqn for fqn, tensor in tensors if tensor.is_floating_point() and found.search(fqn)}


def reasons(model: transformers.PreTrainedModel) -> set[str]:
    """Return the parameters that may be float32 without being declared strictly."""
    vectors = {fqn for fqn in declared(model, torch.float16) if fqn in dict(model.named_parameters())}
    vectors = {fqn for fqn in vectors if model.get_parameter(fqn).ndim < 2}
    by_name = {fqn for fqn, _ in model.named_parameters() if fqn.rpartition(".")[2] in BY_NAME}
    norms = {
        f"{fqn}.{name}"
        for fqn, m in model.named_modules()
        if isinstance(m, _NormBase)
        for name, _ in m.named_parameters()
    }
    routers = {fqn for fqn, p in model.named_parameters() if fqn.endswith(("gate.bias", "router.bias")) and p.ndim == 1}
    parts = ("router.", "_router.", "gate.")
    routers |= {fqn for fqn, p in model.named_parameters() if fqn.endswith(".bias") and any(s in fqn for s in parts)}
    return vectors | by_name | norms | routers


def look(cls: type[transformers.PreTrainedModel]) -> tuple[set[str], set[str], int]:
    """Return declared tensors that were cast, float32 parameters without a reason, and the number of all others."""
    model = on_meta(cls)
    strict, allowed = declared(model, torch.bfloat16), reasons(model)
    convert(HalfMixed("bf16", master_weights="remainder", buffer_dtype=torch.bfloat16), model)
    tensors = dict((*model.named_parameters(), *model.named_buffers()))
    lost = {fqn for fqn in strict if tensors[fqn].dtype != torch.float32}
    kept = {fqn for fqn, p in model.named_parameters() if p.dtype == torch.float32}
    return lost, kept - strict - allowed, len(kept)


def on_meta(cls: type[transformers.PreTrainedModel]) -> transformers.PreTrainedModel:
    with torch.device("meta"):
        try:
            return cls(config(cls.config_class))
        except Exception:  # the models of other people
            return cls(cls.config_class())


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.peers.float32", description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="families; default: all")
    only = parser.parse_args().only.split(",")
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    logging.disable(logging.INFO)
    counts = Counter[str]()
    for family in [family for family in families() if only == [""] or family.split(".")[2] in only]:
        for cls in classes(family):
            try:
                lost, groundless, kept = look(cls)
            except Exception as error:  # the models of other people: whatever they raise is the reason
                counts["not built"] += 1
                print(f"not built {cls.__name__}: {type(error).__name__}: {' '.join(str(error).split())[:100]}")
                continue
            counts["looked at"] += 1
            counts["declared and cast"] += len(lost)
            counts["kept without a reason"] += len(groundless)
            counts["with float32 parameters"] += kept > 0
            if lost or groundless:
                print(f"{cls.__name__}: cast {sorted(lost)[:3]}, kept {sorted(groundless)[:3]}")
        sys.stdout.flush()
    print(", ".join(f"{count} {name}" for name, count in counts.items()))
    return int(counts["declared and cast"] + counts["kept without a reason"] > 0)


if __name__ == "__main__":
    raise SystemExit(main())
