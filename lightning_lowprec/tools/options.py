"""The options of every command but ``fit``: a dataclass per command, a field per option.

This file imports no torch. ``cli.py`` makes a parser of a dataclass: a field without a default is an argument without
a flag, ``bool`` is a flag without a value, and a list of strings takes several words. The fields of ``group``, with
the help of its docstring, are options too, which ``run`` gets as one object.
"""

# ruff: noqa: RUF009  # `option` returns a field

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from lightning_lowprec.callbacks.readings import FILE, Limits
from lightning_lowprec.checks import Count, Rule, Size, check_fields
from lightning_lowprec.conversion.options import LayerOptions
from lightning_lowprec.serving.formats import DtypeName, FormatName

DEFAULT_PRECISIONS = ("32-true", "bf16-mixed", "fp8-hybrid")
_KEY: Final = "the key of the weights; default: state_dict, model, or the top of the checkpoint"
Words = str | None
Names = Sequence[str]


def option(help: str, default: Any = MISSING, **how: Any) -> Any:
    """Return a field with its help; ``how`` is given to ``add_argument``, but for ``flag``: the flag, or a name."""
    return field(default=default, metadata={"help": help, **how})


@dataclass(kw_only=True)
class Doctor:
    """Show what to try first, which precisions run on this machine, why others do not, and what to install."""

    name: Words = option("check one precision; the exit status is 1 if it does not run here", None, flag="--for")
    device: Words = option("cpu, cuda:1 (default: the first GPU), or any architecture: sm_120, gfx942", None)
    json: bool = option("print JSON", False)


@dataclass(kw_only=True)
class Run:
    """Launch a Fabric or Trainer script, or a console command, with a precision, in one process or several.

    Options go before the script; arguments after the script are the script's own. --precision wins over the precision
    in the script, and a line says so. The other options are defaults: if the script asks for another value, the run
    raises, or the script wins (for the Trainer's accelerator, strategy and devices).
    """

    precision: Words = option("a precision of lightning_lowprec or of Lightning", None)
    accelerator: Words = option("cpu, cuda, gpu, mps, ...", None)
    strategy: Words = option("for example ddp", None)
    devices: str = option("number of devices, and processes, on this machine", "1")
    num_nodes: int = option("number of machines", 1)
    node_rank: int = option("index of this machine", 0)
    main_address: str = option("address of machine 0", "127.0.0.1")
    main_port: int = option("port on machine 0", 29400)
    script: str = option("the Python script, or a command such as litgpt")
    arguments: Names = option("arguments of the script", nargs="...", type=None, metavar="arguments")


@dataclass(frozen=True, kw_only=True)
class CompareSpec:
    """One model, one data set, the seeds, and the precisions to train them under.

    Args:
        precisions: names for ``Trainer(precision=...)``; the first is the baseline.
        model: a LightningModule: package.module.Class or path/to/file.py:Class.
        model_args: arguments of the model as JSON or YAML, e.g. '{depth: 2}'.
        data: a LightningDataModule, written like the model.
        data_args: arguments of the data, written like those of the model.
        max_steps: optimizer steps of each training.
        val_every: validate after this many training batches, and after the last step.
        val_batches: batches of each validation.
        val_metric: the logged metric that is compared with the baseline.
        seed: seed of Python, numpy and torch, and of the data if its class takes a seed.
        seeds: train each precision with this many seeds, from `seed` on; from 2, the differences from the baseline have
            95 % confidence intervals. `val_metric` must then be a loss: lower is better.
        accelerator: auto, cpu, cuda, ...; one device is used.
        max_loss_gap: the largest relative difference from the baseline's final validation metric; 0.01 is one percent.
        out: folder for the report, the picture, the figures and the logs.
        force: write over the report of an earlier comparison in this folder.
    """

    precisions: Sequence[str] = DEFAULT_PRECISIONS
    model: str = "lightning_lowprec.tools.demo.ByteGPT"
    model_args: Mapping[str, object] = field(default_factory=dict)
    data: str = "lightning_lowprec.tools.demo.StdlibText"
    data_args: Mapping[str, object] = field(default_factory=dict)
    max_steps: Count = 200
    val_every: Count = 50
    val_batches: Count = 20
    val_metric: str = "val_loss"
    seed: Size = 0
    seeds: Count = 1
    accelerator: str = "auto"
    max_loss_gap: Annotated[float, Rule("0 or more, e.g. 0.01 for 1 %", lambda gap: gap >= 0)] = 0.01
    out: Path = Path("lowprec-compare")
    force: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        twice = sorted({name for name in self.precisions if self.precisions.count(name) > 1})
        if twice:
            raise ValueError(
                f"`precisions={self.precisions!r}` is not valid; expected each name once: remove the repeated"
                f" {', '.join(twice)}."
            )

    @property
    def runs(self) -> list[tuple[int, str]]:
        """Every training, as seed and precision: all precisions with one seed, then with the next."""
        return [(seed, name) for seed in range(self.seed, self.seed + self.seeds) for name in self.precisions]

    @property
    def baseline(self) -> str:
        """The precision that the others are compared with."""
        return self.precisions[0]


@dataclass(kw_only=True)
class Compare:
    """Train one model under several precisions, and report losses, step times and memory side by side.

    Data and seed are the same. The exit status is 1 if a precision fails, or if its final validation metric differs
    from that of the first one by more than --max-loss-gap. With --seeds the runs of each seed are compared in pairs,
    and the whole confidence interval of their differences must be within --max-loss-gap. Without options a small
    byte-level GPT trains on the sources of Python's standard library, in about two minutes on two CPU cores.
    """

    group = "spec", CompareSpec
    precisions: str = option("comma separated; the first is the baseline", ",".join(DEFAULT_PRECISIONS))
    json: bool = option("print JSON: the content of results.json", False)


@dataclass(kw_only=True)
class Monitor:
    """Draw what a NumericsMonitor has written, and print the layers that FP8 serves worst."""

    group = "limits", Limits
    run: Path = option(f"the folder of the run, or its {FILE}")
    html: Path | None = option("the page to write; by default monitor.html beside the file", None)
    keep: bool = option("print `keep=[...]`: the layers beyond a limit; no page", False)
    json: bool = option("print JSON, with every layer; with --keep a list of names", False)


@dataclass(kw_only=True)
class Export:
    """Write a checkpoint of a training run to a folder that transformers, vLLM and SGLang load."""

    group = "layers", LayerOptions
    checkpoint: str = option("of the Trainer or Fabric: a file, a sharded folder, safetensors")
    out: str = option("the new folder")
    format: FormatName = option("see docs/serving.md", flag="--format")
    model: str = option("its folder, a config.json, a model type of transformers, or a class path", flag="--model")
    precision: Words = option("the precision of the run; without one, the format's own scales are used", None)
    dtype: DtypeName = option("of weights that are no codes", "bf16")
    weights_only: bool = option("let servers round weights only", False)
    tokenizer: Words = option("a folder with tokenizer files; default: that of --model", None)
    key: Words = option(_KEY, None)
    strip_prefix: Words = option("removed from every name; default: found by itself", None)
    merge_adapters: bool = option("add a LoRA adapter to the weights", False)
    adapter_config: Words = option("PEFT's adapter_config.json, or the folder of it", None)
    check: bool = option("load the folder, and compare it with the checkpoint", False)
    check_text: Words = option("a text file for --check; default: tokens at random", None)
    min_snr: float = option("of the logits, dB, with --check", 15.0)
    min_agreement: float = option("share of equal greedy tokens, with --check", 0.8)
    max_perplexity: float = option("perplexity / perplexity - 1, with --check", 0.05)
    json: bool = option("print JSON: what was written, and with --check the result", False)


@dataclass(kw_only=True)
class Plan:
    """Show which layers of a model would run in FP8, why others would not, and the FLOPs and bytes of the plan.

    The source is a class path (my.Model, file.py:Model), a model type of transformers (llama), or a config.json or its
    folder. The model is built without weights; nothing is downloaded.
    """

    group = "layers", LayerOptions
    source: str = option("the model")
    precisions: Words = option("the names to simulate, with --fits", None)
    args: Mapping[str, Any] | None = option("arguments of the class, or fields of the config, as JSON or YAML", None)
    precision: str = option("the name of an FP8 precision", "fp8-hybrid")
    sequence_length: int = option("for attention's FLOPs", 4096)
    shards: int | None = option("print what one of so many ranks of `strategy='fsdp2'` holds and sends", None)
    fits: Words = option("print which precisions train within a GPU's memory (80GiB, H200); AdamW is simulated", None)
    batch: int = option("sequences, images or rows per GPU and step, with --fits", 1)
    seq: int | None = option("tokens per sequence, with --fits", None)
    checkpointing: bool = option("compute blocks again in the backward, with --fits", False)
    fused: bool = option("AdamW(fused=True), with --fits", False)
    devices: int = option("GPUs of --strategy, with --fits", 1)
    strategy: Literal["fsdp2"] = option("the model is sharded over --devices, with --fits", None)
    data: Words = option("a LightningDataModule whose batches are read, with --fits", None)
    data_args: Mapping[str, Any] | None = option("arguments of --data, as JSON or YAML", None)
    all: bool = option("print one line per layer, not one per kind of block", False)
    json: bool = option("print JSON, with a row for every layer", False)
    recipe: Names | None = option(
        "recipes by pattern: 'blocks.0.*=bf16' '*=rowwise'; the first that matches wins", None, metavar="PATTERN=RECIPE"
    )
