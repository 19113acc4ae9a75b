"""The options of every command but ``fit``, whose options are those of LightningCLI.

This file imports no torch, and the module of a command is imported when the arguments are known to be right. So the
answers to ``--help``, to a wrong option and to an unknown precision come at once.
"""

import argparse
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

from jsonargparse import ArgumentParser

from lightning_lowprec.callbacks.readings import FILE, Limits
from lightning_lowprec.conversion.options import LayerOptions, take
from lightning_lowprec.gone import FLAGS, gone
from lightning_lowprec.names import validate_name
from lightning_lowprec.other_stacks import pointer
from lightning_lowprec.serving.formats import DtypeName, FormatName
from lightning_lowprec.tools.compare.spec import DEFAULT_PRECISIONS, CompareSpec

COMMANDS: Final = {
    "doctor": "show which precisions run on this machine, why others do not, and what to install",
    "plan": "show which layers of a model would run in FP8, why others would not, and the FLOPs and bytes",
    "compare": "train one model under several precisions and report losses, times and memory side by side",
    "monitor": "draw what a NumericsMonitor has written, and print the layers that FP8 serves worst",
    "export": "write the plain weights of a checkpoint, or a folder that transformers and vLLM load",
    "fit": "run LightningCLI's fit for any LightningModule, with all names in --trainer.precision",
    "run": "launch a Fabric or Trainer script with a precision, in one process or several",
}
SERVER_FORMAT: Final = "--format"
"""The option with which ``lowprec export`` writes a folder for servers, and takes other options."""
_NAMES: Final[dict[str, Any]] = {"nargs": "+", "type": str, "metavar": "NAME"}
_KEY_HELP: Final = "the key of the weights; default: state_dict, model, or the top of the checkpoint"
_SHOWN_APART: Final = {"keep", "only", "first_last_layers_bf16"}
"""Fields of ``LayerOptions`` whose help differs from command to command."""


def parse(command: str, argv: Sequence[str]) -> Any:
    """Return the arguments of a command; a precision that is unknown, or a value that does not fit, is a ValueError."""
    if command != "run":  # the arguments of a script may have any form
        argv = with_underscores(argv)
        _refuse_gone_flags(command, argv)
    for_servers = command == "export" and any(argument.partition("=")[0] == SERVER_FORMAT for argument in argv)
    args = parsers(command)[for_servers].parse_args(argv)
    for name in _precisions(command, args):
        validate_name(name)
    if command == "compare":
        args.spec = CompareSpec(**{name: value for name, value in vars(args).items() if name != "json"})
    if hasattr(args, "frozen"):
        args.layers = take(LayerOptions, args)
    return args


def _refuse_gone_flags(command: str, argv: Sequence[str]) -> None:
    for argument in argv:
        flag = argument.partition("=")[0]
        if answer := gone(f"{command} {flag}", FLAGS):
            raise ValueError(f"`{flag}` is not valid: {answer}")


def _precisions(command: str, args: Any) -> list[str]:
    """Return the precisions that the arguments name; ``doctor --device`` takes recipes too, and judges them itself."""
    if command == "compare":
        args.precisions = [name.strip() for name in args.precisions.split(",")]
        return list(args.precisions)
    precision = getattr(args, "precision", None)
    if command == "doctor" and args.device is None and not args.report and not args.all:
        precision = args.name
    return [] if precision is None else [precision]


def parsers(command: str) -> list[argparse.ArgumentParser]:
    """Return the parser of a command; of ``export`` those without and with ``--format``."""
    parser_class: Any = argparse.ArgumentParser if command in ("doctor", "run") else ArgumentParser
    modes = []
    for fill in _FILL[command]:
        parser = parser_class(prog=f"lowprec {command}")
        fill(parser)
        parser.error = partial(_with_nearest, parser, parser.error)
        modes.append(parser)
    return modes


def _with_nearest(parser: Any, original: Callable[..., None], message: str, *args: Any, **kwargs: Any) -> None:
    """Say which option was meant, where the parser says that it does not know one."""
    unknown = re.search(r"nrecognized arguments: (--[\w-]+)", message)
    hint = pointer(unknown[1], {}, re.findall(r"--[\w-]+", parser.format_usage())) if unknown else ""
    original(". ".join(filter(None, [message.rstrip(), hint])), *args, **kwargs)


def with_underscores(argv: Sequence[str]) -> list[str]:
    """Write ``--max-steps=5`` as ``--max_steps=5``, because jsonargparse names options after arguments and fields."""
    return [re.sub(r"^--[^=]+", lambda option: "--" + option[0][2:].replace("-", "_"), arg) for arg in argv]


def _doctor(parser: argparse.ArgumentParser) -> None:
    parser.description = "Print which precisions run here, why others do not, what to install, and what to try first."
    parser.add_argument("--for", dest="name", help="check one precision; the exit status is 1 if it does not run here")
    parser.add_argument(
        "--device",
        help="a torch device such as cpu or cuda:1 (default: the first GPU), or an architecture that need not be here,"
        " such as sm_120 or gfx942: the table of what runs where answers then",
    )
    parser.add_argument("--all", action="store_true", help="print what runs where, for every architecture")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--report",
        action="store_true",
        help="print what a bug report needs, as Markdown: versions, device, backends, precisions; no folders",
    )


def _run(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Launch a script or a console command that contains a Fabric or a Trainer. Options go before the"
        " script; arguments after the script are the script's own. --precision wins over the precision in the script,"
        " and a line says so. The other options are defaults: if the script asks for another value, the run raises, or"
        " the script wins (for the Trainer's accelerator, strategy and devices)."
    )
    parser.add_argument("--precision", help="a precision of lightning_lowprec or of Lightning")
    parser.add_argument("--accelerator", help="cpu, cuda, gpu, mps, ...")
    parser.add_argument("--strategy", help="for example ddp")
    parser.add_argument("--devices", default="1", help="number of devices, and processes, on this machine")
    parser.add_argument("--num-nodes", "--num_nodes", type=int, default=1, help="number of machines")
    parser.add_argument("--node-rank", "--node_rank", type=int, default=0, help="index of this machine")
    parser.add_argument("--main-address", "--main_address", default="127.0.0.1", help="address of machine 0")
    parser.add_argument("--main-port", "--main_port", type=int, default=29400, help="port on machine 0")
    parser.add_argument("script", help="the Python script, or a command such as litgpt")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the script")


def _compare(parser: ArgumentParser) -> None:
    parser.description = (
        "Train one model under several precisions, with the same data and the same seed, one process per"
        " precision. Report losses, step times and memory side by side. The exit status is 1 if a precision fails, or"
        " if its final validation metric differs from that of the first precision by more than --max-loss-gap. With"
        " --seeds the runs of each seed are compared in pairs, and the whole confidence interval of their differences"
        " must be within --max-loss-gap. Without options a small byte-level GPT trains on the sources of Python's"
        " standard library, in about two minutes on two CPU cores."
    )
    default = ",".join(DEFAULT_PRECISIONS)
    parser.add_argument("--precisions", type=str, default=default, help="comma separated; the first is the baseline")
    parser.add_class_arguments(CompareSpec, as_group=False, skip={"precisions", "monitor", "force"})
    parser.add_argument(
        "--monitor",
        action="store_true",
        help="sample what FP8 takes from every layer: a folder for `lowprec monitor` per run",
    )
    parser.add_argument("--force", action="store_true", help="write over the report of an earlier comparison")
    parser.add_argument("--json", action="store_true", help="print JSON: the content of results.json")


def _monitor(parser: ArgumentParser) -> None:
    parser.description = "Draw what a NumericsMonitor has written, and print the layers that FP8 serves worst."
    parser.add_argument("run", type=Path, help=f"the folder of the run, or its {FILE}")
    parser.add_argument("--html", type=Path | None, help="the page to write; by default monitor.html beside the file")
    parser.add_argument("--keep", action="store_true", help="print `keep=[...]`: the layers beyond a limit; no page")
    parser.add_argument("--json", action="store_true", help="print JSON, with every layer; with --keep a list of names")
    parser.add_class_arguments(Limits, as_group=False)


def _export(parser: ArgumentParser) -> None:
    parser.description = (
        "Write only the weights of a checkpoint to a plain file. `lowprec export --format hf --help` shows"
        " the options that write a folder for transformers, vLLM and SGLang."
    )
    parser.add_argument(
        "checkpoint", type=Path, help="a file of the Trainer, of fabric.save or torch.save; safetensors"
    )
    parser.add_argument("out", type=Path, help="the new file: safetensors if it ends in .safetensors, else torch's")
    dtypes = Literal["keep", "fp32", "bf16", "fp16"]
    parser.add_argument("--dtype", type=dtypes, default="keep", help="of floating-point weights; keep leaves them")
    parser.add_argument("--key", type=str | None, help=_KEY_HELP)
    parser.add_argument("--strip_prefix", type=str, default="", help="removed from every name, such as 'model.'")
    parser.add_argument("--force", action="store_true", help="replace the new file if it exists")
    parser.add_argument("--json", action="store_true", help="print JSON: the file, and shape and dtype of each tensor")


def _export_folder(parser: ArgumentParser) -> None:
    parser.description = "Write a checkpoint of a training run to a folder that transformers, vLLM and SGLang load."
    parser.add_argument("checkpoint", type=str, help="of the Trainer or Fabric: a file, a sharded folder, safetensors")
    parser.add_argument("out", type=str, help="the new folder")
    parser.add_argument(SERVER_FORMAT, type=FormatName, required=True, help="see docs/serving.md")
    parser.add_argument(
        "--model",
        type=str,
        required=True,
        help="the model's folder (config, tokenizer), a config.json, a model type of transformers, or a class path",
    )
    parser.add_argument(
        "--precision", type=str | None, help="the precision of the run; without one, the format's own scales are used"
    )
    parser.add_argument("--dtype", type=DtypeName, default="bf16", help="of weights that are no codes")
    parser.add_argument("--weights_only", action="store_true", help="let servers round weights only")
    parser.add_argument("--tokenizer", type=str | None, help="a folder with tokenizer files; default: that of --model")
    parser.add_argument("--key", type=str | None, help=_KEY_HELP)
    parser.add_argument("--strip_prefix", type=str | None, help="removed from every name; default: found by itself")
    parser.add_argument("--merge_adapters", action="store_true", help="add a LoRA adapter to the weights")
    parser.add_argument("--adapter_config", type=str | None, help="PEFT's adapter_config.json, or the folder of it")
    _add_layers(parser, "the `keep` of the run", "the `only` of the run", "the run kept the first and last blocks")
    parser.add_argument("--check", action="store_true", help="load the folder, and compare it with the checkpoint")
    parser.add_argument("--check_text", type=str | None, help="a text file for --check; default: tokens at random")
    parser.add_argument("--min_snr", type=float, default=15.0, help="of the logits, dB, with --check")
    parser.add_argument("--min_agreement", type=float, default=0.8, help="share of equal greedy tokens, with --check")
    parser.add_argument("--max_perplexity", type=float, default=0.05, help="perplexity / perplexity - 1, with --check")
    parser.add_argument("--json", action="store_true", help="print JSON: what was written, and with --check the result")


def _plan(parser: ArgumentParser) -> None:
    parser.description = (
        "Print which layers of a model would run in FP8, why the others would not, and what the plan means"
        " in FLOPs and bytes. The model is built without weights; nothing is downloaded."
    )
    parser.add_argument(
        "source",
        type=str | None,
        nargs="?",
        help="a class path (my.Model, file.py:Model), a transformers config.json or the folder it lies in, a model type"
        " of transformers (llama), or a checkpoint (.ckpt, .pt, .safetensors)",
    )
    parser.add_argument(
        "--precisions",
        type=str | None,
        nargs="?",
        const="",
        help="print instead a table of the number formats of every precision: GEMMs, weight, gradient, master, moments,"
        " communication; with --fits: the names to simulate, such as bf16-sr,fp8-hybrid",
    )
    parser.add_argument(
        "--args", type=Mapping[str, Any] | None, help="arguments of the class, or fields of the config, as JSON or YAML"
    )
    parser.add_argument("--precision", type=str, default="fp8-hybrid", help="the name of an FP8 precision")
    parser.add_argument("--sequence_length", type=int, default=4096, help="for attention's FLOPs")
    parser.add_argument(
        "--shards",
        type=int | None,
        help="print what one rank of `strategy='fsdp2'` holds and sends, with so many ranks per copy of the model",
    )
    _add_fits(parser)
    parser.add_argument("--all", action="store_true", help="print one line per layer, not one per kind of block")
    parser.add_argument("--json", action="store_true", help="print JSON, with a row for every layer")
    parser.add_argument("--markdown", type=str | None, help="also write the plan to this file, as Markdown")
    _add_layers(
        parser,
        "Linears that stay in high precision, by name or pattern",
        "if given, only these Linears convert",
        "keep the first and the last blocks",
    )
    parser.add_argument(
        "--recipe",
        nargs="+",
        type=str,
        metavar="PATTERN=RECIPE",
        help="recipes per layer; the first pattern that matches wins: 'blocks.0.*=bf16' '*.o_proj=rowwise'"
        " '*=tensorwise'; a value may say which GEMMs run in bf16: '*={\"forward\": \"bf16\"}'",
    )


def _add_layers(parser: ArgumentParser, keep: str, only: str, first_last: str) -> None:
    parser.add_argument("--keep", default=(), help=keep, **_NAMES)
    parser.add_argument("--only", help=only, **_NAMES)
    parser.add_argument("--first_last_layers_bf16", action="store_true", help=first_last)
    parser.add_class_arguments(LayerOptions, as_group=False, skip=_SHOWN_APART)


def _add_fits(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--fits",
        type=str | None,
        help="print instead which precisions train the model within the memory of a GPU, such as 141GB, 80GiB, H200 or"
        ' "RTX 4090": training steps with AdamW are simulated, without a GPU',
    )
    parser.add_argument("--batch", type=int, default=1, help="sequences, images or rows per GPU and step, with --fits")
    parser.add_argument("--seq", type=int | None, help="tokens per sequence, with --fits")
    parser.add_argument(
        "--checkpointing", action="store_true", help="compute blocks again in the backward, with --fits"
    )
    parser.add_argument("--fused", action="store_true", help="AdamW(fused=True), with --fits")
    parser.add_argument("--devices", type=int, default=1, help="GPUs of --strategy, with --fits")
    parser.add_argument(
        "--strategy", type=Literal["fsdp2"] | None, help="fsdp2: the model is sharded over --devices, with --fits"
    )
    parser.add_argument("--data", type=str | None, help="a LightningDataModule whose batches are read, with --fits")
    parser.add_argument("--data_args", type=Mapping[str, Any] | None, help="arguments of --data, as JSON or YAML")


_FILL: Final[Mapping[str, Sequence[Callable[[Any], None]]]] = {
    "doctor": (_doctor,),
    "plan": (_plan,),
    "compare": (_compare,),
    "monitor": (_monitor,),
    "export": (_export, _export_folder),
    "run": (_run,),
}
