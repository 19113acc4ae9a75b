"""``lowprec plan MODEL --fits 141GB``: which precisions train the model within the memory of a GPU, by simulation."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from torch import nn

from lightning_lowprec.names import validate_name
from lightning_lowprec.tools.class_path import build
from lightning_lowprec.tools.output import dumps, prints_to_stderr, working
from lightning_lowprec.tools.planning.memory_meter import CATEGORIES, Peaks
from lightning_lowprec.tools.planning.pages import Table, page
from lightning_lowprec.tools.planning.simulated_step import Setting, inputs_of, loaded_in_half, refusal
from lightning_lowprec.tools.planning.simulation import Simulator
from lightning_lowprec.tools.planning.source import load

DEFAULT_NAMES: Final = (
    "bf16-mixed", "bf16-true", "bf16-master", "bf16-remainder", "bf16-sr", "bf16-8bit", "bf16-lean", "fp8-tensorwise",
    "fp8-rowwise", "fp8-tensorwise-remainder", "fp8-tensorwise-8bit",
)  # fmt: skip
MARGIN_SHARE: Final = 0.05
"""Of the peak: for memory that the allocator holds in pieces that do not fit."""
MARGIN: Final = 10**9
"""Bytes: for CUDA's context, the kernels and NCCL."""
_MOST_DEVICES: Final = 1024
_MOST_ROWS: Final = 2**20
_CLOSE: Final = 50  # a batch is found to one fiftieth
_STEP_DOWN: Final = 4  # guesses are rarely far too large
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
_HOPPER: Final = (9, 0)
Progress = Callable[[str], None]
STRATEGIES: Final = ("fsdp2",)


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A GPU."""

    words: str
    """As the user wrote it."""
    size: int
    """In bytes."""
    capability: tuple[int, int] = _HOPPER
    """The compute capability; a Hopper GPU's where only a size is given."""


def read_gpu(text: str) -> Gpu:
    """Return the GPU that ``text`` means; raise ValueError if it is neither a size nor the name of a GPU."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]+)\s*", text)
    if match is not None and match[2].lower() in UNITS and float(match[1]) > 0:
        return Gpu(words=text, size=round(float(match[1]) * UNITS[match[2].lower()]))
    names = {_plain(name): name for name in GPUS}
    name = names.get(_plain(text))
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
    peak: dict[str, int]
    """Bytes by category at the moment when most are allocated; empty if the precision was not simulated."""
    at: str = ""
    """The part of the step in which that is."""
    fits: bool = False
    """Whether the peak and the margin are within the memory."""
    largest_batch: int | None = None
    """The largest batch that fits, to one fiftieth; 0 if none does; None if not looked for."""
    refused: str | None = None
    """Why the precision was not simulated, or None."""

    @property
    def total(self) -> int:
        """The peak in bytes, as ``torch.cuda.max_memory_allocated()`` shows it."""
        return sum(self.peak.values())


@dataclass(frozen=True, kw_only=True)
class Report:
    """The verdicts on one model."""

    gpu: Gpu
    setting: Setting
    """How the model trains, but for the precision."""
    verdicts: Sequence[Verdict]
    """Names that fit first, and the largest batch first among them."""
    remedies: Sequence[tuple[str, Verdict]]
    """If nothing fits: a change in words, and what the step would need."""
    parameters: int
    inputs: str
    """The batch and the loss, in words."""
    extrapolated: str | None
    """The blocks that were not simulated, in words, or None."""


def needed(peak: float) -> float:
    """Return the memory that a GPU must have for a peak, with the margin, in bytes."""
    return peak * (1 + MARGIN_SHARE) + MARGIN


def fits(
    model: nn.Module,
    gpu: str,
    *,
    names: Sequence[str] = DEFAULT_NAMES,
    data: Any = None,
    progress: Progress = lambda words: None,
    **options: Any,
) -> Report:
    """Simulate training steps with AdamW of a ``model`` on the meta device, and say which precisions fit.

    The ``options`` are those of :class:`Setting`, such as ``batch`` and ``sequence``. ``data`` is a batch of the
    user's, on CPU; None if the model reads tokens, or has an ``example_input_array``. ``progress`` is called with each
    precision before its simulation. An unknown size, name or number, or a missing length of sequences raises
    ValueError.
    """
    size = read_gpu(gpu)
    setting = Setting(precision="", capability=size.capability, **options)
    for name in ("batch", "devices", "sequence"):
        if (number := getattr(setting, name)) is not None and number < 1:
            raise ValueError(f"`{name}={number}` is not valid; expected an integer of at least 1.")
    inputs = inputs_of(model, data)
    if inputs.reads_sequences and setting.sequence is None:
        raise ValueError(
            f"`seq` is missing: {type(model).__name__} reads tokens. Give their number, such as `--seq 4096`."
        )
    for name in names:
        validate_name(name)
    simulator = Simulator(model, inputs)
    verdicts = []
    for name in names:
        progress(name)
        verdicts.append(_verdict(simulator, replace(setting, precision=name), size.size))
    verdicts.sort(key=lambda v: (v.refused is not None, not v.fits, -(v.largest_batch or 0), v.total))
    simulated = [verdict for verdict in verdicts if verdict.refused is None]
    remedies: list[tuple[str, Verdict]] = []
    if simulated and not any(verdict.fits for verdict in simulated):
        least = min(simulated, key=lambda v: v.total).precision
        remedies = _remedies(simulator, replace(setting, precision=least), size.size, progress)
    return Report(
        gpu=size, setting=setting, verdicts=verdicts, remedies=remedies, inputs=inputs.words,
        parameters=sum(p.numel() for p in model.parameters()), extrapolated=simulator.words,
    )  # fmt: skip


def _verdict(simulator: Simulator, setting: Setting, size: int, *, batches: bool = True) -> Verdict:
    """Simulate one setting; ``batches``: also look for the largest batch."""
    reason = refusal(setting.precision)
    if reason is not None:
        return Verdict(precision=setting.precision, peak={}, refused=reason)
    try:
        peaks = simulator.peaks(setting)
        largest = _largest_batch(simulator, setting, size) if batches else None
    except (ValueError, RuntimeError, ImportError) as error:
        return Verdict(precision=setting.precision, peak={}, refused=str(error).splitlines()[0])
    at = max(peaks, key=lambda stretch: sum(peaks[stretch].values()))
    return Verdict(
        precision=setting.precision, peak=peaks[at], at=at, fits=_fit(peaks, size), largest_batch=largest,
    )  # fmt: skip


def _fit(peaks: Peaks, size: int) -> bool:
    return all(needed(sum(peak.values())) <= size for peak in peaks.values())


def _largest_batch(simulator: Simulator, setting: Setting, size: int) -> int:
    """Return the largest batch that fits, simulated, as the batch above it: a line is a guess from below."""

    def fits_with(batch: int) -> bool:
        return _fit(simulator.peaks(replace(setting, batch=batch)), size)

    least = setting.batch if fits_with(setting.batch) else 1 if setting.batch > 1 and fits_with(1) else 0
    if not least:
        return 0
    one, two = (simulator.peaks(replace(setting, batch=n * least)) for n in (1, 2))
    above = first_guess(one, two, least, size)
    if fits_with(above):
        return above
    while above - least > max(1, least // _CLOSE):
        between = above - max(1, (above - least) // _STEP_DOWN)
        least, above = (between, above) if fits_with(between) else (least, between)
    return least


def _remedies(simulator: Simulator, least: Setting, size: int, progress: Progress) -> list[tuple[str, Verdict]]:
    """Simulate what may help, alone and together, for the precision that needs the least."""

    def verdict_on(words: str, changed: Setting) -> tuple[str, Verdict]:
        progress(words)
        return words, _verdict(simulator, changed, size, batches=False)

    remedies, together = [], least
    for words, change in _changes(least):
        remedies.append(verdict_on(words, replace(least, **change)))
        if remedies[-1][1].refused is None:
            together = replace(together, **change)
    remedies.append(verdict_on("all of these", together))
    if least.sequence is not None and least.sequence > 1:
        shorter = replace(together, sequence=least.sequence // 2)
        remedies.append(verdict_on("all of these, half the sequence", shorter))
    remedies = [(words, verdict) for words, verdict in remedies if verdict.refused is None]
    devices = least.devices
    while devices < _MOST_DEVICES:
        devices *= 2
        sharded = replace(together, devices=devices)
        words, verdict = verdict_on(f"all of these, --devices {devices} --strategy fsdp2", sharded)
        if verdict.fits:
            return [*remedies, (words, verdict)]
    return remedies


def _changes(setting: Setting) -> list[tuple[str, dict[str, Any]]]:
    """Return what can be changed, in words, and the fields."""
    smaller = "bf16-lean" if "lean" not in setting.precision else "bf16-lean-sr"
    changes: list[tuple[str, dict[str, Any]]] = [
        ("AdamW(fused=True) (--fused)", {"fused": True}),
        ("--checkpointing", {"checkpointing": True}),
        (f"precision={smaller!r}", {"precision": smaller}),
        ("head='chunked' of the plugin", {"options": {**setting.options, "head": "chunked"}}),
    ]
    return [(words, fields) for words, fields in changes if replace(setting, **fields) != setting]


def first_guess(peaks: Peaks, double: Peaks, batch: int, size: int) -> int:
    """Return a batch that may fit; no larger batch does, because memory grows by more per row, never by less.

    ``peaks`` are those of ``batch`` rows, which fit ``size`` bytes; ``double`` those of twice the batch.
    """
    limit = (size - MARGIN) / (1 + MARGIN_SHARE)
    best = float(_MOST_ROWS)
    for stretch, peak in peaks.items():
        here, there = sum(peak.values()), sum(double[stretch].values())
        if there > here:
            best = min(best, batch + (limit - here) * batch / (there - here))
    return int(best)


# ---- the command


def run(args: Any) -> int:
    """Print the report; return 1 if no precision fits."""
    if args.strategy is not None and args.strategy not in STRATEGIES:
        raise ValueError(f"`strategy={args.strategy!r}` is not valid; expected one of: {', '.join(STRATEGIES)}.")
    if args.devices > 1 and args.strategy is None:
        raise ValueError(
            f"`devices={args.devices}` needs `--strategy fsdp2`: other strategies hold all of the model on every GPU,"
            " so leave `--devices` out for them."
        )
    if args.source is None:
        raise ValueError("`source` is missing: give a model, such as a folder with a config.json or my.py:Model.")
    names = tuple(args.precisions.split(",")) if args.precisions else DEFAULT_NAMES
    with working("building the model") as shown, prints_to_stderr(wanted=args.json):
        source = load(args.source, args.args or {})
        report = fits(
            source.model, args.fits, names=names, batch=args.batch, sequence=args.seq, fused=args.fused,
            checkpointing=args.checkpointing, devices=args.devices,
            data=_first_batch(args.data, args.data_args or {}), progress=lambda words: shown.say(f"simulating {words}"),
        )  # fmt: skip
    if args.markdown is not None:
        Path(args.markdown).write_text(f"{fits_page(report, source.origin, markdown=True)}\n", encoding="utf-8")
    data = {
        "source": source.origin,
        "simulated": True,
        "devices": report.setting.devices,
        **asdict(report),
        "verdicts": [{**asdict(verdict), "total": verdict.total} for verdict in report.verdicts],
        "remedies": [{"change": words, **asdict(v), "total": v.total} for words, v in report.remedies],
        "margin": {"share": MARGIN_SHARE, "bytes": MARGIN},
    }
    print(dumps(data) if args.json else fits_page(report, source.origin))
    return 0 if any(verdict.fits for verdict in report.verdicts) else 1


def _first_batch(path: str | None, arguments: Mapping[str, Any]) -> Any:
    if path is None:
        return None
    data = build(path, arguments, seed=0)
    if hasattr(data, "prepare_data"):
        data.prepare_data()
        data.setup("fit")
    loader = data.train_dataloader() if hasattr(data, "train_dataloader") else data
    return next(iter(loader))


def fits_page(report: Report, origin: str, *, markdown: bool = False) -> str:
    """Return the report of ``--fits``."""
    verdicts = [verdict for verdict in report.verdicts if verdict.refused is None]
    answer = {True: "yes", False: "no"}
    rows = [
        [
            verdict.precision, *(_gigabytes(verdict.peak[category]) for category in CATEGORIES),
            _gigabytes(verdict.total), verdict.at.split()[0], answer[verdict.fits], str(verdict.largest_batch),
        ]
        for verdict in verdicts
    ]  # fmt: skip
    remedies = [[change, v.precision, _gigabytes(v.total), answer[v.fits]] for change, v in report.remedies]
    parts: list[Table | Sequence[str]] = [
        _heading(report, origin),
        Table([["precision (GB)", *CATEGORIES, "peak", "in", "fits", "largest batch"], *rows]),
        [_conclusion(report)],
    ]
    if remedies:
        changes = Table([["change", "precision", "peak", "fits"], *remedies])
        parts += [["What would need less, simulated (GB):"], changes]
    parts.append([f"not simulated: {v.precision}: {v.refused}" for v in report.verdicts if v.refused is not None])
    return page(parts, markdown=markdown)


def _heading(report: Report, origin: str) -> list[str]:
    setting = report.setting
    shape = f"batch {setting.batch} per GPU" + (f", {setting.sequence} tokens" if setting.sequence is not None else "")
    optimizer = f"AdamW ({'fused' if setting.fused else 'foreach, the default of torch'})"
    blocks = ", blocks computed again in the backward" if setting.checkpointing else ""
    ranks = f"; {setting.devices} GPUs, strategy='fsdp2', figures of one" if setting.devices > 1 else ""
    lines = [
        f"{origin}: {report.parameters / 1e9:.2f} B parameters; {shape}; {optimizer}{blocks}{ranks}.",
        "Simulated, not measured: two steps on tensors without values; peak as torch.cuda.max_memory_allocated().",
        f"Batch and loss: {report.inputs}.",
    ]
    halves = [verdict.precision for verdict in report.verdicts if loaded_in_half(verdict.precision)]
    if halves:
        lines.append(f"{', '.join(halves)}: the model is loaded in bf16, with `dtype=torch.bfloat16`.")
    if report.extrapolated is not None:
        lines.append(f"Figures are {report.extrapolated}.")
    if setting.devices > 1:
        lines.append(
            "State per GPU and gathered weights are computed, activations simulated; gathered weights: at most."
        )
    return lines


def _conclusion(report: Report) -> str:
    margin = f"{MARGIN_SHARE:.0%} of the peak + {MARGIN / 1e9:g} GB"
    gpu = f"{report.gpu.words}: a peak fits with a margin of {margin} (fragmentation; CUDA's context)"
    best = next((v for v in report.verdicts if v.fits), None)
    if best is not None:
        return f"{gpu}. Largest batch: {best.precision}, {best.largest_batch}."
    smaller = max((v.largest_batch or 0 for v in report.verdicts), default=0)
    if smaller:
        return f"{gpu}. None fits with batch {report.setting.batch}; with batch {smaller} one does."
    least = min((v.total for v in report.verdicts if v.refused is None), default=0)
    return f"{gpu}. None fits: the least needs {_gigabytes(needed(least))} GB with the margin."


def _gigabytes(size: float) -> str:
    return f"{size / 1e9:.1f}" if size >= 1e8 else f"{size / 1e9:.3f}"
