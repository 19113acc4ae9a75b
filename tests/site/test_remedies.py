"""The code that messages write in backticks works: commands parse, options exist, names resolve, objects are made.

What a user needs beside the code (a model, another option, several processes) is shown by the test of its message. Here
``FILL`` stands for ``...``, and calls of functions are only bound.
"""

import ast
import contextlib
import inspect
import io
import re
from html import unescape
from importlib.util import find_spec
from pkgutil import resolve_name
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from accelerate.utils import AORecipeKwargs
from lightning.pytorch.callbacks import ModelCheckpoint, ModelPruning
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, FSDPStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import checkpoint
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import lightning_lowprec
from lightning_lowprec import FP8TE, FP8TorchAO, callbacks, losses
from lightning_lowprec.conversion.backends import Backend
from lightning_lowprec.extras import INSTALL
from lightning_lowprec.precision.loss_scale import LossScale
from lightning_lowprec.tools import cli
from tests.site.commands import CHECKS, check_line
from tests.site.pages import DOCS
from tools.site.hooks import on_page_markdown
from tools.site.messages import GAP, PACKAGE, messages

TEXTS = [text for path in sorted(PACKAGE.rglob("*.py")) for text in messages(path)]
QUOTED = {code for text in TEXTS for code in re.findall("`([^`]+)`", text)}
CODES = sorted(code for code in QUOTED if not re.search(rf"{GAP}[=(]|\.{{}}$", code))
COMMANDS = [*INSTALL.values(), *(code for code in CODES if code.split()[0] in CHECKS and " " in code)]
OPTIONS = [code for code in CODES if code.startswith("--")]
NAMES = [code for code in CODES if re.fullmatch(r"(lightning_lowprec|torch|transformers)\.[\w.]+", code)]
CALLS = [code for code in CODES if re.fullmatch(r"\w[\w.]*\(.*\)", code)]
ARGUMENTS = [code for code in CODES if re.match(r"\w+ ?=", code) and "!r" not in code]
"""The rest are single words, parts of values that a message shows, and code whose names are known in the run alone."""

PUBLIC = {name: getattr(lightning_lowprec, name) for name in lightning_lowprec.__all__}
SPACE: dict[str, Any] = {
    **PUBLIC,
    **{name: getattr(callbacks, name) for name in callbacks.__all__},
    "lightning_lowprec": lightning_lowprec, "torch": torch, "Trainer": L.Trainer, "Fabric": L.Fabric,
    "LossScale": LossScale, "ModelPruning": ModelPruning, "LlamaDecoderLayer": LlamaDecoderLayer,
    "StateDictOptions": StateDictOptions,
    "get_model_state_dict": get_model_state_dict, "FSDPStrategy": FSDPStrategy,
    "cross_entropy": nn.functional.cross_entropy, "device_type": "cpu", "model": nn.Linear(1, 1),
    "layer": nn.Module, "fresh": nn.Module, "loss": torch.Tensor, "x": torch.Tensor, "optimizer": torch.optim.Optimizer,
    "self": type("Sharded", (L.LightningModule, FSDPModule), {"qkv": nn.Linear(1, 1)}), "F": nn.functional,
    "requires_grad_": nn.Module.requires_grad_,
    "reset_parameters": nn.Linear.reset_parameters, "plugin": FP8TorchAO, "AORecipeKwargs": AORecipeKwargs,
    "fabric": L.Fabric(accelerator="cpu", plugins=FP8TorchAO()),
    "trainer": SimpleNamespace(precision_plugin=FP8TorchAO(), fit=L.Trainer.fit),
}  # fmt: skip
FILL = {
    "floor": "1.0", "gradient_clip_val": "1.0", "growth_interval": "10",
    "hysteresis": "2", "initial": "1024.0", "keep": "['lm_head']",
    "keep_fp32": "['teacher']", "master_weights": "True", "max_steps": "1",
    "module_filter_func": "len", "moments": "'8bit'", "recipe": "'rowwise'",
    "update": "'backward'",
}  # fmt: skip
"""What ``...`` stands for, by the name of the option."""
OWNERS = [
    *filter(inspect.isroutine, PUBLIC.values()),
    *(found for found in PUBLIC.values() if inspect.isclass(found) and not issubclass(found, Warning)),
    *(getattr(callbacks, name) for name in callbacks.__all__), LossScale,
    Backend, losses.linear_cross_entropy, L.Trainer,
    L.Trainer.save_checkpoint, L.Fabric, L.Fabric.save, L.Fabric.clip_gradients, ModelCheckpoint, DDPStrategy,
    FSDPStrategy, DeepSpeedStrategy, nn.Module.load_state_dict, nn.Embedding, torch.autograd.grad, checkpoint,
    torch.distributed.all_reduce, LlamaForCausalLM.forward,
]  # fmt: skip
"""Ours first, then what the options of other packages in the messages belong to."""
ELSEWHERE = {
    "backend", "experts_implementation", "peft_type",
    "safe_merge", "fp8_recipe", "grad_reduce_in_fp32", "gradient_clipping", "independent_parameters",
    "strict_loading", "log_graph",
}  # fmt: skip
"""Options of configurations and classes without a signature, and values that a message refuses."""
OF_TE = {"recipe='current'", "recipe='delayed'", "recipe='nvfp4'", "recipe={...}"}
"""Values that FP8TE alone takes, which needs Transformer Engine."""


class Filled(ast.NodeTransformer):
    """Put values in place of ``...``; a positional ``...`` is left out."""

    def visit_Call(self, node: ast.Call) -> ast.Call:
        self.generic_visit(node)
        node.args = [arg for arg in node.args if not is_gap(arg)]
        for word in node.keywords:
            if is_gap(word.value):
                word.value = ast.parse(FILL[word.arg], mode="eval").body
        return node

    def visit_List(self, node: ast.List) -> ast.List:
        node.elts = [ast.Constant("lm_head") if is_gap(element) else self.visit(element) for element in node.elts]
        return node


def is_gap(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is ...


def parsed(code: str) -> ast.Call:
    call = ast.parse(code.replace(GAP, "..."), mode="eval").body
    assert isinstance(call, ast.Call)
    return call


def value(node: ast.expr) -> Any:
    """Return the value of an expression; a call of a function is only bound, so is FP8TE without Transformer Engine."""
    if isinstance(node, ast.Call):
        called = value(node.func)
        if not (inspect.isbuiltin(called) or inspect.ismethoddescriptor(called)):  # these have no signature
            inspect.signature(called).bind_partial(**{str(word.arg): None for word in node.keywords})
        if not inspect.isclass(called) or (called is FP8TE and not find_spec("transformer_engine")):
            return called
    return eval(ast.unparse(Filled().visit(node)), SPACE)


@pytest.fixture(scope="module")
def help_of_all_commands() -> str:
    printed = io.StringIO()
    for command in cli.COMMANDS:
        with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
            cli.main([command, "--help"])
    return printed.getvalue()


@pytest.mark.parametrize("code", COMMANDS)
def test_a_command_is_parsed_and_its_packages_are_known(code: str, monkeypatch: pytest.MonkeyPatch):
    line = code.replace(GAP, "1")
    if line.removeprefix("lowprec ") not in cli.COMMANDS:  # else the rest is the reader's
        check_line(line, monkeypatch)


def test_every_option_of_a_command_exists(help_of_all_commands: str):
    missing = [
        code
        for code in OPTIONS
        if not re.search(rf"{re.escape(code.split()[0].split('=')[0])}\b", help_of_all_commands)
    ]
    assert not missing


@pytest.mark.parametrize("code", NAMES)
def test_a_name_exists(code: str):
    assert resolve_name(code) is not None


@pytest.mark.parametrize("code", CALLS)
@pytest.mark.filterwarnings("ignore")
def test_a_call_is_made_or_bound(code: str):
    value(parsed(code))


@pytest.mark.parametrize("code", ARGUMENTS)
@pytest.mark.filterwarnings("ignore")
def test_an_argument_is_taken(code: str, help_of_all_commands: str):
    name = re.split(r" ?=", code)[0]
    if name in ELSEWHERE:
        return
    words = {str(word.arg): word.value for word in parsed(f"f({code}{'...' * code.endswith('=')})").keywords}
    owners = [owner for owner in OWNERS if words.keys() <= inspect.signature(owner).parameters.keys()]
    if not owners:
        assert re.search(rf"\b{name}\b", help_of_all_commands)
    if code in OF_TE or any(is_gap(node) for node in words.values()):
        return
    values = {name: value(node) for name, node in words.items()}
    refused = [refusal(owner, values) for owner in owners if owner is not FP8TE]
    assert not refused or "" in refused or FP8TE in values.values(), refused


def refusal(owner: Any, values: dict[str, Any]) -> str:
    try:
        inspect.signature(owner).bind(**values)
    except TypeError:
        return ""
    try:
        if inspect.isclass(owner):
            owner(**values)
    except (TypeError, ValueError, MisconfigurationException) as error:
        return str(error)
    return ""


# ---- what the docs quote of errors is a message of the package; a quoted name or number stands for any other


HEADINGS = re.findall(r"^### (.+)$", (DOCS / "troubleshooting.md").read_text(), flags=re.MULTILINE)
OF_OTHERS = ("Received both", "requires you", "mixed dtype")
"""Headings that Lightning and torch raise, so that they are not on our page of messages."""
REFUSED = (DOCS / "what-runs-where.md").read_text().partition("## What is refused")[2].partition("\n## ")[0]
LINES = re.findall(r"^\| .*$", REFUSED, re.MULTILINE)[1:]
ROWS = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in LINES]


def normal(text: str) -> str:
    text = re.sub(r"'[\w-]+'", GAP, unescape(re.sub(r"</?code>|`", "", text)))
    return " ".join(re.sub(r"\b\d+\b|FP8Linear|FP8TE|transformer_engine", GAP, text).split())


@pytest.fixture(scope="module")
def every_message() -> str:
    written = on_page_markdown((DOCS / "troubleshooting.md").read_text(), page=None)
    return normal(written.partition("## Every message")[2])


SHOWN = [heading for heading in HEADINGS if not heading.startswith(OF_OTHERS)] + [row[2] for row in ROWS]


@pytest.mark.parametrize("text", SHOWN, ids=lambda text: re.sub(r"\W+", "-", text)[:40].strip("-"))
def test_the_text_is_a_message_of_the_package(text, every_message):
    assert normal(text) in every_message


@pytest.mark.parametrize("row", ROWS, ids=lambda row: re.sub(r"\W+", "-", row[0])[:30])
def test_what_a_refusal_names_instead_exists(row):
    for code in re.findall("`([^`]+)`", row[1] + row[4]):
        if re.match(r'FP8TorchAO\(|"', code):
            asked = eval(code, {"FP8TorchAO": FP8TorchAO})
            L.Fabric(accelerator="cpu", **{"precision" if isinstance(asked, str) else "plugins": asked})
