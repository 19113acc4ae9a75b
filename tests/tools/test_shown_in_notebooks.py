"""plan, compare and doctor from Python: what they return and refuse, and the text that a notebook shows of them."""

import multiprocessing

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
    listed = [line.split("  ") for line in repr(plan).splitlines()[1:]]
    assert [row[0] for row in rows] == [words[0] for words in listed]
    assert all(said.startswith(words[-1].strip()) for (_, said), words in zip(rows, listed, strict=True))
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


def test_a_comparison_shows_its_table():
    lines = repr(comparison(trained("32-true"), trained("fp8-rowwise", val_losses=[4.0, 3.03]))).splitlines()
    assert lines[0].split()[:3] == ["precision", "val_loss", "gap"]
    assert lines[2].split()[:3] == ["fp8-rowwise", "3.0300", "+1.00%"]
    assert "FP8 is emulated" in lines[3]


def test_an_error_in_a_comparison_is_in_its_table():
    error = "Traceback\nValueError: no loss"
    found = comparison(trained("32-true"), PrecisionResult(name="fp8-hybrid", error=error))
    assert repr(found).splitlines()[2].endswith("failed: ValueError: no loss")


def test_a_comparison_over_seeds_has_intervals():
    runs = [trained(name, seed=seed, val_losses=[4.0, 3.0 + 0.01 * seed]) for seed in (0, 1) for name in ("a", "b")]
    assert "+0.00% ± 0.00%" in repr(comparison(*runs, seeds=2)).splitlines()[2]


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
    assert [verdict.name for verdict in found.precisions] == list(TABLE)
    assert torch.__version__ in repr(found)
    assert repr(found).startswith("Try first on this machine:\n    half-auto ")
    assert "\ndevice    cpu\n" in repr(found)


def test_reasons_and_broken_libraries_are_said():
    broken = {"torchao": "OSError: no file"}
    facts = {**lightning_lowprec.doctor("cpu").facts, "moved": ["torch._x"], "broken": broken}
    verdicts = [Availability(name="half-auto", runs=False, reason="does not run: no file", summary="")]
    verdicts += [Availability(name="bf16-remainder", runs=True, reason="", summary="")]
    said = " ".join(repr(Diagnosis(facts=facts, precisions=verdicts)).split())
    assert "half precision no half-auto: does not run: no file" in said
    assert "torchao is installed and does not import: OSError: no file" in said
    assert "the installed libraries are not all supported; they no longer have: torch._x" in said
