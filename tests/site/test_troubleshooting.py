"""Every heading of the page on troubleshooting is part of an error that is raised here, and of the page of messages."""

import re
from html import unescape
from importlib.util import find_spec

import lightning as L
import pytest
import torch
from torch import nn

from lightning_lowprec import MSAMP, FP8TorchAO, HalfMixed
from lightning_lowprec.tools import cli
from tests.site.pages import DOCS
from tools.site.hooks import on_page_markdown
from tools.site.messages import GAP

HEADINGS = re.findall(r"^### (.+)$", (DOCS / "troubleshooting.md").read_text(), flags=re.MULTILINE)


class Model(nn.Sequential):
    def __init__(self, features: int = 32):
        super().__init__(nn.Linear(features, 64), nn.ReLU(), nn.Linear(64, features))


def set_up(plugin, make=torch.optim.SGD, of=None, value=1.0, **precision):
    """Set a model up with an optimizer, and run a forward and a backward pass."""
    fabric = L.Fabric(accelerator="cpu", plugins=plugin, **precision)
    model = Model()
    model, optimizer = fabric.setup(model, make((of or model).parameters(), lr=0.1))
    return fabric, model, optimizer, model(torch.full((4, 32), value)).sum()


def one_layer(plugin, features=32):
    return L.Fabric(accelerator="cpu", plugins=plugin).setup_module(Model(features))


def exported():
    torch.export.export(one_layer(FP8TorchAO()).module, (torch.zeros(2, 32),))


def plain_backward():
    set_up(HalfMixed("fp16"))[3].backward()


def parameters_of_another_model():
    fabric, _, optimizer, loss = set_up(MSAMP("O2"), of=Model())
    fabric.backward(loss)
    optimizer.step()


def only_nan():
    fabric, model, optimizer, _ = set_up(HalfMixed("bf16", skip_nonfinite=True))
    for _ in range(51):
        fabric.backward(model(torch.full((4, 32), torch.nan)).sum())
        optimizer.step()


def averaged_shards():
    from lightning.pytorch.callbacks import StochasticWeightAveraging

    from lightning_lowprec.tools.demo import ByteGPT, StdlibText

    L.Trainer(
        accelerator="cpu", devices=1, precision="fp8-hybrid", strategy="fsdp2", logger=False,
        enable_checkpointing=False, callbacks=[StochasticWeightAveraging(1e-2)],
    ).fit(ByteGPT(), StdlibText())  # fmt: skip


def norm_of_float32():
    class Widens(nn.LayerNorm):
        def forward(self, inputs):
            return super().forward(inputs.float())

    model = L.Fabric(accelerator="cpu", precision="bf16-remainder").setup_module(Widens(32))
    model(torch.ones(4, 32))


def doctor(name, device):
    cli.main(["doctor", "--for", name, "--device", device])


RAISE = {
    "Precision '": lambda: L.Trainer(precision="fp8-hybird"),
    "is a string": lambda: L.Trainer(plugins="fp8-hybrid"),
    "Received both": lambda: L.Trainer(precision="fp8-hybrid", plugins=FP8TorchAO()),
    "FP8TE needs": lambda: L.Trainer(precision="fp8-hybrid-te"),
    "does not run under": lambda: L.Trainer(accelerator="cpu", devices=2, precision="msamp-o2", strategy="fsdp2"),
    "has no FP8": lambda: doctor("fp8-hybrid", "sm_80"),
    "fails with": lambda: doctor("fp8-rowwise", "sm_120"),
    "a model with": lambda: one_layer(FP8TorchAO(), features=20),
    "matches no": lambda: one_layer(FP8TorchAO(keep=["lm_haed"])),
    "knows the heads": lambda: one_layer(HalfMixed("bf16", head="chunked")),
    "cannot export": exported,
    "is in no optimizer": parameters_of_another_model,
    "requires you": plain_backward,
    "50 steps": only_nan,
    "cannot step": lambda: set_up(MSAMP("O2"), torch.optim.RMSprop),
    "copies the model": averaged_shards,
    "mixed dtype": norm_of_float32,
}
"""What raises or prints the error of a heading, by the beginning of the heading."""
OF_OTHERS = ("Received both", "requires you", "mixed dtype")
"""Lightning and torch raise these, so that they are not on our page of messages."""


def said_by(action, capsys: pytest.CaptureFixture[str]) -> str:
    """Return the error of an action, or what a command has printed."""
    try:
        action()
    except Exception as error:
        return str(error)
    return capsys.readouterr().err


def normal(text: str) -> str:
    """Return a text without code marks, names in quotes and numbers, which differ from run to run."""
    text = re.sub(r"'[\w-]+'", GAP, unescape(re.sub(r"</?code>|`", "", text)))
    return " ".join(re.sub(r"\b\d+\b|FP8Linear|FP8TE|transformer_engine", GAP, text).split())


def test_every_heading_has_its_error():
    assert [next(start for start in RAISE if heading.startswith(start)) for heading in HEADINGS] == list(RAISE)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("heading", HEADINGS, ids=lambda heading: re.sub(r"\W+", "-", heading)[:40].strip("-"))
def test_the_heading_is_what_the_error_says(heading, capsys: pytest.CaptureFixture[str], tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    start = next(start for start in RAISE if heading.startswith(start))
    if start == "FP8TE needs" and find_spec("transformer_engine"):
        pytest.skip("Transformer Engine is installed")
    assert normal(heading) in normal(said_by(RAISE[start], capsys))


@pytest.mark.parametrize("heading", HEADINGS, ids=lambda heading: re.sub(r"\W+", "-", heading)[:40].strip("-"))
def test_the_page_of_messages_has_it(heading, every_message):
    if not heading.startswith(OF_OTHERS):
        assert normal(heading) in every_message


@pytest.fixture(scope="module")
def every_message() -> str:
    written = on_page_markdown((DOCS / "troubleshooting.md").read_text(), page=None)
    return normal(written.partition("## Every message")[2])
