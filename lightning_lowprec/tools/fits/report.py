"""``lowprec plan MODEL --fits 141GB``: which precisions train the model within the memory of a GPU, by simulation."""

import re
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

from torch import nn

from lightning_lowprec.messages import in_units
from lightning_lowprec.names import validate_name
from lightning_lowprec.tools.class_path import build
from lightning_lowprec.tools.fits.memory_meter import CATEGORIES, Category
from lightning_lowprec.tools.fits.simulation import DEPTHS, Setting, Simulator, inputs_of, loaded_in_bf16, refusal
from lightning_lowprec.tools.output import Table, dumps, page, prints_to_stderr, working
from lightning_lowprec.tools.planning.source import load

DEFAULT_NAMES: Final = (
    "bf16-mixed", "bf16-true", "bf16-master", "bf16-remainder", "bf16-sr", "bf16-8bit", "fp8-hybrid",
    "fp8-rowwise", "fp8-hybrid-remainder", "fp8-hybrid-8bit",
)  # fmt: skip
MARGIN_SHARE: Final = 0.05  # of the peak: for memory that the allocator holds in pieces that do not fit
MARGIN: Final = 10**9  # bytes: for CUDA's context, the kernels and NCCL
_MOST_ROWS: Final = 2**20
UNITS: Final[Mapping[str, int]] = {"mb": 10**6, "gb": 10**9, "tb": 10**12, "mib": 2**20, "gib": 2**30, "tib": 2**40}
GPUS: Final[Mapping[str, tuple[int, tuple[int, int]]]] = {
    "GB300": (288, (10, 3)), "B300": (288, (10, 3)), "GB200": (186, (10, 0)), "B200": (180, (10, 0)),
    "H200": (141, (9, 0)), "GH200": (96, (9, 0)), "H100": (80, (9, 0)), "H800": (80, (9, 0)), "H20": (96, (9, 0)),
    "A100": (80, (8, 0)), "A800": (80, (8, 0)), "A40": (48, (8, 6)), "A10": (24, (8, 6)), "A6000": (48, (8, 6)),
    "RTX 6000 Ada": (48, (8, 9)), "RTX PRO 6000": (96, (12, 0)), "L40S": (48, (8, 9)), "L40": (48, (8, 9)),
    "L4": (24, (8, 9)), "RTX 5090": (32, (12, 0)), "RTX 5080": (16, (12, 0)), "RTX 4090": (24, (8, 9)),
    "RTX 4080": (16, (8, 9)), "RTX 3090": (24, (8, 6)), "V100": (32, (7, 0)), "T4": (16, (7, 5)),
}  # fmt: skip
"""The memory in GB that the maker names, and the compute capability."""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A GPU, or a memory of ``size`` bytes."""

    words: str
    size: int
    capability: tuple[int, int] = (9, 0)


def read_gpu(text: str) -> Gpu:
    """Return the GPU that ``text`` means; raise ValueError if it is neither a size nor the name of a GPU."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]+)\s*", text)
    if match is not None and match[2].lower() in UNITS and float(match[1]) > 0:
        return Gpu(words=text, size=round(float(match[1]) * UNITS[match[2].lower()]))
    name = {_plain(name): name for name in GPUS}.get(_plain(text))
    if name is None:
        raise ValueError(
            f"`fits={text!r}` is not valid; expected a size such as 141GB or 80GiB ({', '.join(UNITS)}), or a GPU:"
            f" {', '.join(GPUS)}."
        )
    gigabytes, capability = GPUS[name]
    return Gpu(words=f"{name} ({gigabytes} GB)", size=gigabytes * 10**9, capability=capability)


def _plain(name: str) -> str:
    return re.sub(r"[\s_-]|nvidia|geforce|tesla|rtx(?![\s_-]*pro)", "", name.lower())


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What one precision needs, per GPU."""

    precision: str
    peak: Mapping[Category, int] = field(default_factory=dict)
    """Bytes by category at the moment when most are allocated; empty if the precision was not simulated."""
    total: int = 0
    """The peak in bytes, as ``torch.cuda.max_memory_allocated()`` shows it."""
    at: str = ""
    """The part of the step in which that is."""
    fits: bool = False
    largest_batch: int | None = None
    """The largest batch that fits, by straight lines through simulated ones; 0 if none does; None: not simulated."""
    refused: str | None = None


@dataclass(frozen=True, kw_only=True)
class Report:
    """The verdicts on one model."""

    gpu: Gpu
    setting: Setting
    """How the model trains, but for the precision."""
    verdicts: Sequence[Verdict]
    """Names that fit first, and the largest batch first among them."""
    parameters: int
    inputs: str
    extrapolated: str
    """Which blocks were simulated, in words."""


def needed(peak: float) -> float:
    """Return the memory that a GPU must have for a peak, with the margin, in bytes."""
    return peak * (1 + MARGIN_SHARE) + MARGIN


def fits(
    model: nn.Module,
    gpu: str,
    *,
    names: Sequence[str] = DEFAULT_NAMES,
    data: object = None,
    progress: Callable[[str], None] = lambda words: None,
    **options: Any,
) -> Report:
    """Simulate training steps with AdamW of a ``model`` on the meta device, and say which precisions fit.

    The ``options`` are those of :class:`Setting`. ``data`` is a batch of the user's, on CPU; None if the model reads
    tokens, or has an ``example_input_array``. ``progress`` is called with each precision before its simulation.
    """
    size = read_gpu(gpu)
    setting = Setting(precision="", capability=size.capability, **options)
    inputs = inputs_of(model, data)
    if inputs.reads_sequences and setting.sequence is None:
        raise ValueError(f"`seq` is missing: {type(model).__name__} reads tokens. Give it, such as `--seq 4096`.")
    for name in names:
        validate_name(name)
    simulator = Simulator(model, inputs)
    verdicts = []
    for name in names:
        progress(name)
        verdicts.append(_verdict(simulator, replace(setting, precision=name), size.size))
    verdicts.sort(key=lambda v: (v.refused is not None, not v.fits, -(v.largest_batch or 0), v.total))
    run, extrapolated = simulator.run, "All blocks are simulated."
    if run is not None:
        extrapolated = f"Extended from {DEPTHS[0]} and {DEPTHS[1]} to all {run.length} equal blocks of {run.fqn!r}."
    return Report(
        gpu=size, setting=setting, verdicts=verdicts, inputs=inputs.words,
        parameters=sum(p.numel() for p in model.parameters()), extrapolated=extrapolated,
    )  # fmt: skip


def _verdict(simulator: Simulator, setting: Setting, size: int) -> Verdict:
    verdict = Verdict(precision=setting.precision, refused=refusal(setting.precision))
    if verdict.refused is not None:
        return verdict
    try:
        peaks = simulator.peaks(setting)
        largest = _largest_batch(simulator, setting, size)
    except (ValueError, ImportError) as error:
        return replace(verdict, refused=str(error).splitlines()[0])
    totals = {stretch: sum(peak.values()) for stretch, peak in peaks.items()}
    at = max(totals, key=lambda stretch: totals[stretch])
    fit = needed(totals[at]) <= size
    return replace(verdict, peak=peaks[at], total=totals[at], at=at, fits=fit, largest_batch=largest)


def _largest_batch(simulator: Simulator, setting: Setting, size: int) -> int:
    """Return where straight lines through the peaks of two batches, in the second pass near ones, meet the memory."""
    limit, least, largest = (size - MARGIN) / (1 + MARGIN_SHARE), setting.batch, 0
    for _ in range(2):
        fewer, more = (simulator.peaks(replace(setting, batch=rows)) for rows in (least, 2 * least))
        batches = [float(_MOST_ROWS)]
        for stretch, peak in fewer.items():
            here, there = sum(peak.values()), sum(more[stretch].values())
            if there > here:
                batches.append(least * (1 + (limit - here) / (there - here)))
        largest = max(0, int(min(batches)))
        least = max(1, largest // 2)
    return largest


# ---- the command


def run(args: Namespace) -> int:
    """Print the report; return 1 if no precision fits."""
    if args.devices > 1 and args.strategy is None:
        raise ValueError(f"`devices={args.devices}` needs `--strategy fsdp2`: others put the model on every GPU.")
    names = args.precisions.split(",") if args.precisions else DEFAULT_NAMES
    with working("building the model") as shown, prints_to_stderr(wanted=args.json):
        source = load(args.source, args.args or {})
        report = fits(
            source.model, args.fits, names=names, batch=args.batch, sequence=args.seq, fused=args.fused,
            checkpointing=args.checkpointing, devices=args.devices,
            data=_first_batch(args.data, args.data_args or {}), progress=lambda words: shown.say(f"simulating {words}"),
        )  # fmt: skip
    data = {"source": source.origin, "simulated": True, "devices": args.devices, **asdict(report)}
    data["margin"] = {"share": MARGIN_SHARE, "bytes": MARGIN}
    print(dumps(data) if args.json else fits_page(report, source.origin))
    return 0 if any(verdict.fits for verdict in report.verdicts) else 1


def _first_batch(path: str | None, arguments: Mapping[str, object]) -> object:
    if path is None:
        return None
    data = build(path, arguments, seed=0)
    if hasattr(data, "prepare_data"):
        data.prepare_data()
        data.setup("fit")
    return next(iter(data.train_dataloader() if hasattr(data, "train_dataloader") else data))


def fits_page(report: Report, origin: str) -> str:
    """Return the report of ``--fits``."""
    setting, answer = report.setting, {True: "yes", False: "no"}
    how = [
        f"{origin}: {_in_words(report.parameters)} parameters; batch {setting.batch} per GPU (--batch)",
        f"{setting.sequence} tokens" if setting.sequence is not None else "",
        f"AdamW ({'fused' if setting.fused else 'foreach, the default of torch'})",
        "blocks computed again in the backward" if setting.checkpointing else "",
        f"{setting.devices} GPUs with strategy='fsdp2', state of one computed" if setting.devices > 1 else "",
    ]
    halves = [verdict.precision for verdict in report.verdicts if loaded_in_bf16(verdict.precision)]
    heading = [
        f"{', '.join(filter(None, how))}.",
        "Simulated, not measured: two steps on tensors without values; peak as torch.cuda.max_memory_allocated()."
        " The columns are what is held at the moment of the peak, which `in` names; what an operation works on is under"
        " temporaries.",
        "In the Trainer's order: gradients live through the next forward. A loop of Fabric that calls zero_grad()"
        " before the forward needs fewer bytes there: subtract the gradients from a peak in the forward.",
        f"Batch and loss: {report.inputs}.",
        report.extrapolated,
        *([f"{', '.join(halves)}: the model is loaded in bf16, with `dtype=torch.bfloat16`."] if halves else []),
    ]
    header = ["precision", *CATEGORIES, "peak, at least", "in", "fits", "largest batch"]
    rows = [
        [v.precision, *map(in_units, (*v.peak.values(), v.total)), v.at, answer[v.fits], str(v.largest_batch)]
        for v in report.verdicts
        if v.refused is None
    ]
    refused = [f"not simulated: {v.precision}: {v.refused}" for v in report.verdicts if v.refused is not None]
    return page([heading, Table([header, *rows]), [_conclusion(report)], refused])


def _in_words(count: int) -> str:
    size, letter = next(((s, x) for s, x in ((1e9, " B"), (1e6, " M"), (1e3, " k")) if count >= s), (1.0, ""))
    return f"{count / size:.3g}{letter}"


def _conclusion(report: Report) -> str:
    margin = f"{MARGIN_SHARE:.0%} of the peak + {in_units(MARGIN)}"
    gpu = f"{report.gpu.words}: a peak fits with a margin of {margin} (fragmentation; CUDA's context)"
    best = next((v for v in report.verdicts if v.largest_batch), None)
    if best is not None:
        return f"{gpu}. Largest batch: {best.precision}, {best.largest_batch}."
    simulated = [v.total for v in report.verdicts if v.refused is None]
    if not simulated:
        return f"{gpu}. Nothing could be simulated."
    return (
        f"{gpu}. None fits: the least needs at least {in_units(needed(min(simulated)))} with the margin. --fused,"
        " --checkpointing, a name that ends in -8bit, and --devices 2 --strategy fsdp2 need less."
    )
