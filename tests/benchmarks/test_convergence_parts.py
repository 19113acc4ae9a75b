"""The parts of `benchmarks.convergence`: names, text, digits, statistics, runs, page."""

import itertools
import math
import re

import lightning as L
import pytest
import torch

from benchmarks.convergence import page
from benchmarks.convergence.digits import CLASSES, SIDE, pictures
from benchmarks.convergence.facts import frequency_loss
from benchmarks.convergence.gaps import Row, holm, rows
from benchmarks.convergence.models import share
from benchmarks.convergence.pictures import FAMILIES, family
from benchmarks.convergence.precisions import BASELINE, on_cpu
from benchmarks.convergence.report import sums
from benchmarks.convergence.results import Results
from benchmarks.convergence.runs import Runs
from benchmarks.convergence.subjects import CONTROL, committed
from benchmarks.convergence.text import MAX_BYTES, HeaderText, facts, headers, parts
from lightning_lowprec.names import OF_LIGHTNING, TABLE, create


def test_a_number_of_steps_is_that_of_every_model_and_of_its_data():
    subjects = {subject.key: subject for subject in committed(500)}
    assert {subject.steps for subject in subjects.values()} == {500}
    assert subjects["gpt"].data_args["train_windows"] == 500 * subjects["gpt"].data_args["batch_size"]


# ---- names


@pytest.mark.parametrize(("folder", "shown", "rows"), [("eight-bits", "memory", 2), ("formats", "evidence", 7)])
def test_a_page_shows_the_gaps_of_a_run_apart(folder, shown, rows):
    (report,) = (page.ROOT / "benchmarks/results").glob(f"*/{folder}/report.md")
    table = re.search(r"### The gaps\n\n((\|.*\n)+)", report.read_text())[1]
    assert table.count("±") == 4 * rows
    assert table in (page.ROOT / f"docs/{shown}.md").read_text()


def test_the_page_shows_the_gaps_of_sums_of_a_gpu():
    (folder,) = (page.ROOT / "benchmarks/results").glob("*/sums/results.json")
    table = "\n".join(sums(Results.read(folder.parent))[2:])
    assert table.count("±") == 12
    assert table in (page.ROOT / page.PAGE).read_text()


@pytest.fixture(scope="module")
def names():
    return on_cpu()


def test_every_name_is_trained_or_has_a_reason(names):
    groups = [set(names.names), set(names.left_out), set(names.same)]
    assert set.union(*groups) == {*TABLE, *map(str, OF_LIGHTNING)}
    assert all(not a & b for a, b in itertools.combinations(groups, 2))
    assert names.names[0] == BASELINE
    assert {"bf16-mixed", "bf16-true", "16-true", "fp8-hybrid", "int8-mixed-sr", "msamp-o3"} <= groups[0]
    assert set(CONTROL) <= groups[0]


def test_names_without_a_run_of_their_own_mean_what_is_said(names):
    assert names.same["16-mixed"] == "bf16-mixed", "on a CPU Lightning says so in a warning"
    for name, meant in names.same.items():
        assert meant in {*names.names, "64-true"}, name
        if name in TABLE:
            mine, other = create(name), create(meant)
            assert type(mine) is type(other)
    assert "64-true" in names.left_out


def test_names_without_suffix_are_the_families(names):
    some = names.without_suffix
    assert {"fp8-hybrid", "fp8-rowwise", "bf16-remainder", "bf16-sr", "int8-mixed", "msamp-o2"} <= set(some)
    assert not {"fp8-hybrid-sr", "int8-mixed-fp16", "fp8-rowwise-remainder", "mxfp8-sr"} & set(some)


# ---- data


def test_the_texts_are_there_and_validation_is_other_text():
    for python in (True, False):
        train, val = parts(python)
        assert len(train) == MAX_BYTES
        assert 0 < len(val) <= MAX_BYTES // 10
    assert {path.suffix for path in headers()[0]} == {".h"}
    assert not {*headers()[0]} & {*headers()[1]}
    assert facts() == facts()


def test_windows_of_the_headers_depend_on_the_seed_and_those_of_validation_do_not():
    sets = []
    for seed in (0, 0, 1):
        data = HeaderText(block_size=8, batch_size=2, train_windows=50, val_windows=6, seed=seed)
        data.setup("fit")
        sets.append((data.train_set.tensors[0], data.val_set.tensors[0]))
        x, y = data.train_set.tensors
        assert torch.equal(x[:, 1:], y[:, :-1])
    assert torch.equal(sets[0][0], sets[1][0])
    assert not torch.equal(sets[0][0], sets[2][0])
    assert torch.equal(sets[0][1], sets[2][1])


def test_digits_are_legible_and_drawn_from_the_seed():
    images, classes = pictures(300, 5)
    again, _ = pictures(300, 5)
    assert images.shape == (300, 1, SIDE, SIDE)
    assert torch.equal(images, again)
    assert not torch.equal(images[:300], pictures(300, 6)[0])
    assert set(classes.tolist()) == set(range(CLASSES))
    ink = images.clamp(0, 1).flatten(1)
    means = torch.stack([ink[classes == k].mean(0) for k in range(CLASSES)])
    fresh_ink, wanted = pictures(300, 7)
    nearest = torch.cdist(fresh_ink.clamp(0, 1).flatten(1), means).argmin(1)
    assert (nearest == wanted).float().mean() > 0.5, "the mean picture of a class is near to its members"


def test_a_guess_by_frequencies_has_the_cross_entropy():
    val = torch.tensor([7, 9], dtype=torch.uint8)
    train = torch.tensor([7] * 743 + [9] * 1, dtype=torch.uint8)  # with one more of each of 256: 744, 2, of 1000
    assert frequency_loss(train, val) == pytest.approx(-(math.log(0.744) + math.log(0.002)) / 2)


# ---- statistics


def row(*gaps: float) -> Row:
    return Row(precision="p", losses=(), gaps=gaps)


def test_t_is_that_of_the_paired_test():
    assert row(0.01, 0.03).t == pytest.approx(0.02 / (math.sqrt(0.0002) / math.sqrt(2)))
    assert row(0.0, 0.0).t == 0.0
    assert row(0.01, 0.01).t == math.inf


def test_holm_is_stricter_than_single_intervals_and_milder_than_bonferroni():
    """Table of Student's t with 4 degrees of freedom, two-sided: 2.776 at 5 %, 3.495 at 2.5 %, 3.961 at 5/3 %."""

    def with_t(t: float) -> Row:
        spread = [-2.0, -1.0, 0.0, 1.0, 2.0]  # standard error sqrt(2.5 / 5)
        return row(*(x + t * math.sqrt(0.5) for x in spread))

    assert with_t(3.7).t == pytest.approx(3.7)
    assert holm({"a": with_t(3.9), "b": with_t(3.7), "c": with_t(0.1)}) == set(), "3.961 is needed of the first"
    assert holm({"a": with_t(4.0), "b": with_t(3.6), "c": with_t(2.7)}) == {"a", "b"}
    assert holm({"a": with_t(4.0), "b": with_t(3.4), "c": with_t(3.3)}) == {"a"}
    assert holm({"a": with_t(2.8)}) == {"a"}


def run(name: str, seed: int, loss: float | None, digest: str, error: str | None = None) -> dict:
    return {"subject": "s", "precision": name, "seed": seed, "val_loss": loss, "val_accuracy": None, "digest": digest,
            "error": error}  # fmt: skip


def test_rows_pair_seeds_name_twins_and_keep_failures():
    found = rows([
        run(BASELINE, 0, 2.0, "a"), run("p", 0, 2.2, "b"), run("q", 0, 2.2, "b"),
        run("r", 0, None, "n", "ValueError: x"),
        run("u", 0, math.nan, "n"),
        run(BASELINE, 1, 4.0, "c"), run("p", 1, 4.0, "d"), run("q", 1, 4.0, "d"), run("r", 1, 4.0, "e"),
        run("u", 1, math.nan, "n"),
    ], "s")  # fmt: skip
    by_name = {row.precision: row for row in found}
    assert [*by_name] == [BASELINE, "p", "q", "r", "u"]
    assert by_name["p"].gaps == pytest.approx((0.1, 0.0))
    assert (by_name["p"].twin, by_name["q"].twin) == (None, "p")
    assert by_name["r"].error == "ValueError: x"
    assert (by_name["r"].gaps, by_name["r"].losses) == ((), (4.0,))
    assert by_name["u"].error == "the validation loss is nan"
    assert by_name[BASELINE].gaps == ()


# ---- runs, page


def test_runs_with_other_settings_are_refused_and_calls_are_counted(tmp_path):
    runs = Runs(tmp_path, {"a": 1}, "c1")
    runs.add("seconds", 2.5)
    again = Runs(tmp_path, {"a": 1}, "c2")
    assert again.of("commit") == ["c1", "c2"]
    assert again.of("seconds") == [2.5]
    with pytest.raises(ValueError, match=r"other settings \(a\)(?s:.)*--force"):
        Runs(tmp_path, {"a": 2}, "c2")


def test_the_page_is_what_the_command_writes():
    text = (page.ROOT / page.PAGE).read_text(encoding="utf-8")
    assert page.updated(text) == text, "run python -m benchmarks.convergence --page"
    folder = page.newest()
    for name, copy in page.PICTURES.items():
        assert folder is None or (folder / name).read_bytes() == (page.ROOT / copy).read_bytes()


def test_the_subjects_take_class_paths_that_exist_and_learn_from_scratch_or_a_base():
    for subject in committed():
        module, _, name = subject.model.rpartition(".")
        assert issubclass(getattr(__import__(module, fromlist=[name]), name), L.LightningModule)
        assert (subject.base is None) == (subject.key != "lora")


def test_the_learning_rate_rises_and_falls_to_zero():
    shares = [share(step, 120) for step in range(121)]
    assert shares[0] == pytest.approx(1 / 21)
    assert max(shares) == shares[20] == 1.0
    assert shares[70] == pytest.approx(0.5)
    assert shares[120] == 0.0
    assert min(share(step, 6) for step in range(6)) > 0


def test_the_picture_has_a_colour_for_every_plugin_that_runs_on_a_cpu():
    formats = {"MXFP8", "fp8-block"}  # of FP8TorchAO, with a colour of their own
    assert {row.plugin.__name__ for row in TABLE.values()} - {"FP8TE"} == set(FAMILIES) - formats
    shown = {words for words, *_ in (family(name) for name, row in TABLE.items() if row.plugin.__name__ != "FP8TE")}
    assert shown == {words for words, *_ in FAMILIES.values()}
