"""Find out what a device runs: its architecture, and the answers of the table of :mod:`~lightning_lowprec.runs_where`.

A *refusal* is a clause that names the reason; ``None`` means that the device can.
"""

import torch

from lightning_lowprec import runs_where
from lightning_lowprec.numerics.tensor_cores import UNITS, TensorCores
from lightning_lowprec.runs_where import ARCHITECTURES, Architecture, RecipeKey, classify


def describe(device: torch.device) -> str:
    """Return the device in words: ``"NVIDIA H200 (compute capability 9.0)"``, ``"MI300X (gfx942)"`` or ``"cpu"``."""
    if device.type != "cuda":
        return device.type
    if torch.version.hip is not None:
        return f"{torch.cuda.get_device_name(device)} ({_gcn(device)})"
    major, minor = torch.cuda.get_device_capability(device)
    return f"{torch.cuda.get_device_name(device)} (compute capability {major}.{minor})"


def architecture(device: torch.device) -> Architecture:
    """Return the architecture of a device."""
    if device.type != "cuda":
        return classify(device.type)
    if torch.version.hip is not None:
        return classify("cuda", gcn=_gcn(device))
    return classify("cuda", torch.cuda.get_device_capability(device))


def refusal(recipe: RecipeKey, device: torch.device) -> str | None:
    """Return why ``device`` is known not to run a recipe, with the source; None if it runs, or if that is not known."""
    cell = runs_where.cell(recipe, architecture(device))
    return f"{describe(device)} {cell.reason} [{cell.source}]" if cell.runs is False else None


def refusal_and_remedy(recipe: RecipeKey, device: torch.device) -> str | None:
    """Return the refusal, and as a second sentence the names that run on ``device``."""
    reason = refusal(recipe, device)
    return None if reason is None else f"{reason}. Use {runs_where.instead(recipe, architecture(device))}"


def emulation_refusal(recipe: RecipeKey, on: TensorCores) -> str | None:
    """Return why a recipe cannot be emulated as on a named GPU, and the values that are possible; None if it can."""
    architectures = {name: ARCHITECTURES[unit.architecture] for name, unit in UNITS.items()}
    cell = runs_where.cell(recipe, architectures[on])
    if cell.runs:
        return None
    others = [repr(name) for name, other in architectures.items() if runs_where.cell(recipe, other).runs]
    why = f"{architectures[on].title} {cell.reason} [{cell.source}]"
    return f"`emulate={on!r}` is not valid: {why}; expected one of: {', '.join([*others, 'True'])}"


def caution(recipe: RecipeKey, device: torch.device) -> str | None:
    """Return what to say before a recipe runs on ``device``: it is not known to run there, or a GPU emulates it."""
    cell = runs_where.cell(recipe, architecture(device))
    if cell.runs is None:
        return f"it is not known whether this runs: {describe(device)} {cell.reason} [{cell.source}]"
    if cell.emulated and device.type != "cpu":
        return f"{describe(device)} {cell.reason} [{cell.source}], slowly"
    return None


def bf16_refusal(device: torch.device) -> str | None:
    """Return why ``device`` has no bf16 hardware, or None if it has; without bf16 hardware, torch emulates bf16."""
    cell = runs_where.cell("bf16", architecture(device))
    return f"{describe(device)} {cell.reason}" if cell.emulated else None


def default_device() -> torch.device:
    """Return the device that Lightning's ``accelerator="auto"`` would choose, of cuda, mps and cpu."""
    if torch.cuda.is_available():
        return torch.device("cuda", 0)
    if torch.backends.mps.is_available():
        return torch.device("mps", 0)
    return torch.device("cpu")


def _gcn(device: torch.device) -> str:
    """Return ROCm's name of a GPU: ``"gfx942:sramecc+:xnack-"``."""
    return str(torch.cuda.get_device_properties(device).gcnArchName)
