"""plan, compare and doctor from Python: what they return, what they refuse, and what a notebook shows of them."""

import multiprocessing
import sys

import pytest
import torch
from torch import nn

import lightning_lowprec
from lightning_lowprec.names import TABLE
from lightning_lowprec.tools.cli import main
from lightning_lowprec.tools.compare import runner
from lightning_lowprec.tools.compare.comparison import Comparison
from lightning_lowprec.tools.compare.result import PrecisionResult
from lightning_lowprec.tools.compare.spec import CompareSpec
from lightning_lowprec.tools.demo import ByteGPT, StdlibText
from lightning_lowprec.tools.doctor import Availability, Diagnosis
from tests.conversion.test_plan_table import read


@pytest.mark.parametrize("model", ["lightning_lowprec.tools.demo.ByteGPT", ByteGPT(), None], ids=["path", "model", "x"])
def test_a_plan_is_that_of_the_command(model, capsys):
    if model is None:
        with pytest.raises(TypeError, match=r"`model=None` is not valid; expected a Module, or a string"):
            lightning_lowprec.plan(None)
        return
    plan = lightning_lowprec.plan(model, "fp8-rowwise", keep=["blocks.0"])
    source = "lightning_lowprec.tools.demo.ByteGPT"
    assert main(["plan", source, "--precision", "fp8-rowwise", "--keep", "blocks.0"]) == 0
    said = [line.split("  ") for line in capsys.readouterr().out.splitlines()]
    rows = [(words[0], words[-1].strip()) for words in said if words[0].startswith(("3 x", "blocks", "lm_head"))]
    assert rows == [(row[0], row[2]) for row in read(plan).rows[1:]]
    assert len(plan.converted) == 12


def test_recipes_per_layer_and_refusals():
    plan = lightning_lowprec.plan(ByteGPT(), "fp8-hybrid", recipe={"*.proj": "rowwise", "*": "tensorwise"})
    assert {row.recipe for row in plan.rows} == {"rowwise", "tensorwise", None}
    with pytest.raises(ValueError, match="`precision='bf16-mixed'` converts no layers; expected one of: fp8-hybrid"):
        lightning_lowprec.plan(ByteGPT(), "bf16-mixed")
    with pytest.raises(ValueError, match=r"`precision='msamp-o2'` has no recipes per layer; leave `recipe`"):
        lightning_lowprec.plan(ByteGPT(), "msamp-o2", recipe={"*": "rowwise"})


def trained(name, **figures):
    figures = {"train_losses": [5.0, 4.0], "val_steps": [1, 2], "val_losses": [4.0, 3.0], "on_cpu": True, **figures}
    return PrecisionResult(name=name, **figures)


def comparison(*results, **settings):
    spec = CompareSpec(precisions=list(dict.fromkeys(result.name for result in results)), **settings)
    return Comparison(spec=spec, results=list(results))


BAD = "<script>alert('&')</script>"


def test_a_comparison_shows_its_verdict_its_table_and_its_picture():
    shown = read(comparison(trained("32-true"), trained("fp8-rowwise", val_losses=[4.0, 3.03])))
    assert shown.text[0] == "Every precision trained and ended with the final val_loss within 1% of 32-true's."
    assert shown.rows[0][:3] == ["precision", "val_loss", "gap"]
    assert shown.rows[2][:3] == ["fp8-rowwise", "3.0300", "+1.00%"]
    assert shown.tags.count("img") == 1
    assert any("FP8 is emulated" in text for text in shown.text)


def test_an_error_in_a_comparison_is_text():
    found = comparison(trained("32-true"), PrecisionResult(name="fp8-hybrid", error=f"Traceback\nValueError: {BAD}"))
    shown = read(found)
    assert "<script" not in found._repr_html_()
    assert shown.rows[2][-1] == f"failed: ValueError: {BAD}"
    assert f"Traceback\nValueError: {BAD}" in "".join(shown.text)
    assert "Not every precision ended with" in shown.text[0]
    assert repr(found).splitlines()[2].endswith(f"failed: ValueError: {BAD}")


def test_a_comparison_over_seeds_has_intervals():
    runs = [trained(name, seed=seed, val_losses=[4.0, 3.0 + 0.01 * seed]) for seed in (0, 1) for name in ("a", "b")]
    shown = read(comparison(*runs, seeds=2))
    assert shown.rows[2][2] == "+0.00% ± 0.00%"


def test_without_matplotlib_a_sentence_says_what_to_install(monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    shown = read(comparison(trained("32-true")))
    assert "img" not in shown.tags
    assert shown.text[-1] == (
        "The picture of the losses needs matplotlib, which is not installed: `pip install matplotlib`."
    )


def test_classes_become_paths_and_settings_reach_the_command(monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(runner, "train_all", lambda spec, progress: asked.append((spec, progress)))
    lightning_lowprec.compare(["32-true"], ByteGPT, data=StdlibText, out=str(tmp_path), max_steps=7, progress=False)
    lightning_lowprec.compare(model="my.py:Model")
    (first, shown), (second, also) = asked
    assert (first.model, first.data) == (
        "lightning_lowprec.tools.demo.ByteGPT",
        CompareSpec().data,
    )
    assert (first.out, first.max_steps, shown, also) == (tmp_path, 7, False, True)
    assert second == CompareSpec(model="my.py:Model", precisions=list(CompareSpec().precisions))


def test_what_another_process_cannot_import_is_refused():
    class Local(nn.Module):
        pass

    typed = type("Typed", (nn.Module,), {"__module__": "__main__"})
    for given in (Local, typed):
        with pytest.raises(
            ValueError, match=rf"`model=<class .*Write the class into a file, and give 'file.py:{given.__name__}'"
        ):
            lightning_lowprec.compare(model=given)
    with pytest.raises(ValueError, match=r"expected a class or its path.*by `data_args`"):
        lightning_lowprec.compare(data=StdlibText())
    with pytest.raises(TypeError, match="unexpected keyword argument 'steps'"):
        lightning_lowprec.compare(steps=3)


@pytest.mark.parametrize(("steps", "said"), [(1, "32-true: 100%"), (None, "")])
def test_progress_can_be_left_out(capfd, steps, said):
    receiver, sender = multiprocessing.Pipe(duplex=False)
    sender.send({"loss": 1.5, "seconds": 0.1, "step": 1})
    sender.close()
    result = PrecisionResult(name="32-true")
    runner._receive(receiver, result, "32-true", steps)
    assert result.train_losses == [1.5]
    shown = capfd.readouterr().err
    assert said in shown
    assert bool(shown) is (steps is not None)


def test_doctor_answers_for_every_name():
    found = lightning_lowprec.doctor("cpu")
    shown = read(found)
    assert [verdict.name for verdict in found.precisions] == list(TABLE)
    assert shown.text[0] == "device: cpu"
    assert [row[0] for row in shown.rows[1:4]] == [row.name for row in found.recommended]
    answers = {row[0] for row in shown.rows[5:]}
    assert {"yes", "emulated"} <= answers <= {"yes", "emulated", "no", "not known"}
    assert torch.__version__ in shown.text[-1]
    assert repr(found).startswith("Try first on this machine:\n    half-auto ")
    assert "\ndevice    cpu\n" in repr(found)


def test_reasons_and_broken_libraries_are_text():
    facts = {**lightning_lowprec.doctor("cpu").facts, "moved": ["torch._x"], "broken": {"torchao": f"OSError: {BAD}"}}
    verdict = Availability(name="half-auto", runs=False, reason=f"does not run: {BAD}", summary="")
    shown = read(Diagnosis(facts=facts, precisions=[verdict]))
    assert ["no", "half-auto", f"does not run: {BAD}"] in shown.rows
    assert f"torchao is installed and does not import: OSError: {BAD}" in "".join(shown.text)
    assert "the installed libraries are not all supported; they no longer have: torch._x" in shown.text
