"""Trains with and without DDP (NCCL, one process) and validates in inference mode; prints the losses as JSON."""

import json

import torch.distributed as dist

from lightning_lowprec import FP8TorchAO
from tests.gpu.device import NO_VALUES, process_group_if_no_nccl
from tests.gpu.subjects import Subject, loader, trainer

COMPILED = {"backend": "aot_eager"} if NO_VALUES else "auto"
"""Where nothing computes, blocks are traced: tests/ledger/test_steps.py counts what inductor makes of them."""


def fit(strategy: str, compile: bool | str | dict[str, str] = False) -> tuple[list[float], float, str | None]:
    model = Subject()
    plugin = FP8TorchAO(compile=compile)
    run = trainer(plugins=plugin, strategy=strategy, max_epochs=4, inference_mode=True)
    run.fit(model, loader(), loader(2, tokens=13))
    validated = float(run.validate(model, loader(2, tokens=13), verbose=False)[0]["val_loss"])
    return model.losses, validated, dist.get_backend() if dist.is_initialized() else None


def main() -> None:
    alone, validated_alone, _ = fit("auto")
    process_group_if_no_nccl(real=True)
    ddp, validated, backend = fit("ddp")
    compiled, _, _ = fit("ddp", compile=COMPILED)
    dist.barrier()
    dist.destroy_process_group()
    found = {
        "alone": alone,
        "ddp": ddp,
        "compiled": compiled,
        "validated": validated,
        "validated_alone": validated_alone,
    }
    print(json.dumps({**found, "backend": backend}))


if __name__ == "__main__":
    main()
