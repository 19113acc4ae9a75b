"""What type checkers see of our constructors: `mypy` says so if a comment here ignores no error any more."""

from lightning_lowprec import FP8TE, MSAMP, FP8TorchAO, FSDP2Strategy, HalfMixed, Int8TorchAO, parallelize, plan


def right() -> None:
    """Every option of a group is known, with its type."""
    FP8TorchAO("rowwise", keep=["a"], base="fp16", emulate=True, loss_scale=2.0, master_weights=True)
    Int8TorchAO(fp8_eval=False, compile=False)
    FP8TE({"recipe": "current"}, weights="keep")
    MSAMP("O3", head="chunked")
    HalfMixed("auto", keep_fp32=["norm"])
    FSDP2Strategy(shards=2, state_dict_type="full")
    plan("llama", recipe={"*": "rowwise"}, only=["a"])


def wrong() -> None:
    """Each call has one error."""
    FP8TorchAO(kep=["a"])  # type: ignore[call-arg]
    FP8TorchAO("tensorwize")  # type: ignore[arg-type]
    FP8TE(emulate=True)  # type: ignore[call-arg]
    MSAMP(keep_fp32=["a"])  # type: ignore[call-arg]
    HalfMixed(weights="half")  # type: ignore[arg-type]
    FSDP2Strategy(shards=1.5)  # type: ignore[arg-type]
    plan("llama", only=[1])  # type: ignore[list-item]
    parallelize()  # type: ignore[call-arg]
