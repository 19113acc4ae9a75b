"""The part ``convergence`` of the GPU lane: the model, the text, the order of the text, the clock, and the training."""

import math
import shutil
from hashlib import sha256
from itertools import chain
from types import SimpleNamespace
from zlib import crc32

import numpy as np
import pytest
import torch
from tokenizers import decoders

from benchmarks.gpu_lane import corpus as text
from benchmarks.gpu_lane import measure, models, part_convergence, sizes, timed_training, values
from benchmarks.gpu_lane.contenders import BASELINE, find
from benchmarks.gpu_lane.corpus import Corpus, Size
from benchmarks.gpu_lane.part_convergence import ADAMW, CONTENDERS, TEXT, Convergence
from benchmarks.gpu_lane.running import Job, Running
from benchmarks.gpu_lane.settings import Settings
from benchmarks.gpu_lane.timed_training import Clock, Schedule, Windows

CPU = torch.device("cpu")
GPT2_SMALL = 124_439_808
"""transformers' GPT2LMHeadModel(GPT2Config()), its head tied."""
SMALL = Size(bytes=12_000, sample_bytes=3_000, vocabulary=280)


def test_the_model_has_the_sizes_of_gpt2_small():
    shape, batch = sizes.convergence_size(Settings())
    with torch.device("meta"):
        counted = sum(p.numel() for p in models.Llama(shape).parameters())
    block = 4 * 768 * 768 + 3 * 768 * 2048 + 2 * 768
    assert counted == shape.parameters == 12 * block + 50304 * 768 + 768 == 123_587_328
    assert counted == pytest.approx(GPT2_SMALL, rel=0.01)
    assert (shape.layers, shape.hidden, shape.heads, shape.sequence) == (12, 768, 12, 1024)
    assert shape.vocab % 64 == 0
    assert shape.vocab - 64 < Size().vocabulary == 50257 <= shape.vocab
    assert models.peak_bytes(shape, batch) < 0.8 * 79 * 2**30, "80 GB hold the batch too"
    assert sizes.convergence_size(Settings(batch=16))[1] == 16


@pytest.fixture
def packages(tmp_path):
    """A hundred files of three kinds, and four that do not count: a copy, an empty one, one of bytes, an image."""
    folder = tmp_path / "packages"
    for index in range(100):
        file = folder / f"package{index % 4}" / f"file{index}{('.py', '.md', '.cpp')[index % 3]}"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"def function_{index}(argument):\n    return argument + {index}  # ä\n" * 5)
    (folder / "package0" / "copy.py").write_text((folder / "package0" / "file0.py").read_text())
    (folder / "package0" / "empty.py").write_text("")
    (folder / "package0" / "bytes.py").write_bytes(b"a\0b")
    (folder / "package0" / "image.png").write_text("no text")
    return folder


def test_the_text_is_split_by_the_hash_of_the_path_and_has_nothing_twice(packages):
    train, val, digest = text.texts(Size(), packages)
    names = sorted((str(f.relative_to(packages)) for f in packages.glob("*/file*")), key=lambda n: crc32(n.encode()))
    content = {name: (packages / name).read_text() for name in names}
    assert len(set(train) | set(val)) == len(train) + len(val) == 100
    moved = {content["package0/file0.py"]}  # either the file or its copy counts, whichever comes first
    expected = {True: [], False: []}
    for name in names:
        expected[crc32(name.encode()) % 20 == 0].append(content[name])
    assert [t for t in val if t not in moved] == [t for t in expected[True] if t not in moved]
    assert [t for t in train if t not in moved] == [t for t in expected[False] if t not in moved]
    by_kind = [t for part in (train, val) for end in (".md", ".py", ".cpp") for t in part if kind(t) == end]
    assert digest == sha256("".join(by_kind).encode()).hexdigest()


def kind(content):
    """By the number of the function."""
    return (".py", ".md", ".cpp")[int(content.partition("_")[2].partition("(")[0]) % 3]


def test_the_text_ends_before_the_first_file_that_does_not_fit(packages):
    whole = list(chain(*text.texts(Size(), packages)[:2]))
    few = list(chain(*text.texts(SMALL, packages)[:2]))
    size = sum(len(t.encode()) for t in few)
    assert SMALL.bytes - max(len(t.encode()) for t in whole) < size <= SMALL.bytes


def test_tokens_are_the_text(packages):
    train, val, _ = text.texts(SMALL, packages)
    tokenizer = text.trained_tokenizer(text.cut(train, SMALL.sample_bytes), SMALL.vocabulary)
    tokenizer.decoder = decoders.ByteLevel()
    end = tokenizer.token_to_id(text.END)
    for several in (train, val):
        tokens = text.encoded(tokenizer, several)
        assert tokens.dtype == np.uint16
        cuts = np.flatnonzero(tokens == end)
        assert len(cuts) == len(several)
        assert cuts[-1] == len(tokens) - 1
        parts = np.split(tokens, cuts + 1)[:-1]
        assert [tokenizer.decode(part[:-1].tolist(), skip_special_tokens=False) for part in parts] == several
    made = text.corpus(SMALL, None, packages)
    assert np.array_equal(made.val, text.encoded(tokenizer, val))
    assert np.array_equal(made.train, text.encoded(tokenizer, train)), "a second training gives the same tokens"
    assert made.facts["vocabulary"] == 280 > made.train.max()
    assert made.facts["train_tokens"] < sum(map(len, train)), "merges make fewer tokens than bytes"


def test_tokens_are_made_once_per_folder(packages, tmp_path):
    first = text.corpus(SMALL, tmp_path / "out", packages)
    shutil.rmtree(packages)
    again = text.corpus(SMALL, tmp_path / "out", packages)
    assert np.array_equal(first.train, again.train)
    assert np.array_equal(first.val, again.val)
    assert first.facts == again.facts
    assert len({first.facts["tokens_digest"], first.facts["digest"]}) == 2
    with pytest.raises(ValueError, match="no sources"):
        text.corpus(Size(), tmp_path / "out", packages)  # another size is made anew, and the sources are gone


def test_the_digest_follows_the_text(packages):
    digests = {text.texts(Size(), packages)[2]}
    digests.add(text.texts(Size(), packages)[2])
    assert len(digests) == 1
    (packages / "package1" / "new.py").write_text("new = True\n")
    assert text.texts(Size(), packages)[2] not in digests


def windows(seed=0, train=41, val=21, batch=3, val_batches=1):
    tokens = Corpus(np.arange(train, dtype=np.uint16), np.arange(1000, 1000 + val, dtype=np.uint16), {})
    return Windows(tokens, sequence=4, batch=batch, val_batches=val_batches, seed=seed, device=CPU)


def test_every_window_is_read_once_before_any_is_read_again():
    """41 tokens are ten windows of four; three batches of three are an epoch."""
    data = windows()
    assert data.batches_per_epoch == 3
    starts = []
    for step in range(6):
        x, y = data.training(step)
        assert x.shape == y.shape == (3, 4)
        assert torch.equal(y, x + 1), "targets are the next tokens"
        starts.append(x[:, 0].tolist())
    first, second = (list(chain(*several)) for several in (starts[:3], starts[3:]))
    for epoch in (first, second):
        assert len(set(epoch)) == 9
        assert set(epoch) <= set(range(0, 40, 4))
    assert first != second


def test_the_order_follows_the_seed_and_validation_does_not():
    a, same, b = windows(0), windows(0), windows(1)
    assert torch.equal(a.training(1)[0], same.training(1)[0])
    assert not torch.equal(a.training(0)[0], b.training(0)[0])
    ((x, y),) = a.validation()
    assert torch.equal(x, b.validation()[0][0])
    assert x[:, 0].tolist() == [1000, 1004, 1012], "of five windows, three evenly spaced"
    assert torch.equal(y, x + 1)


def test_a_text_that_is_too_short_raises():
    with pytest.raises(ValueError, match="too short: 41 and 9 tokens"):
        windows(val=9)
    with pytest.raises(ValueError, match="too short: 9 and 21 tokens"):
        windows(train=9)


def test_the_clock_charges_the_first_steps_as_later_ones():
    clock = Clock()
    clock.add(10, 30.0)
    assert clock.seconds == 30.0, "nothing else is known yet"
    for seconds in (1.0, 1.0, 4.0):
        clock.add(10, seconds)
    assert clock.per_step == 0.1
    assert (clock.first, clock.later, clock.seconds) == (1.0, 6.0, 7.0)


class Toy(torch.nn.Module):
    """One weight; its loss is what the test says, in turn."""

    def __init__(self, validation):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.validation = iter(validation)
        self.modes = []

    def forward(self, x, y):
        self.modes.append((self.training, torch.is_grad_enabled()))
        return self.weight * 0 + (1.0 if self.training else next(self.validation))


class Rates(torch.optim.SGD):
    """Keeps the learning rate of each step."""

    def __init__(self, parameters):
        super().__init__(parameters, lr=1.0)
        self.seen = []

    def step(self, closure=None):
        self.seen.append(self.param_groups[0]["lr"])


@pytest.fixture
def trained(monkeypatch):
    """Train a toy whose chunks take 30 seconds, then a second each; validation takes 100."""

    def run(schedule, validation=(3.0, 2.0, 1.0, 0.5)):
        model = Toy(validation)
        times = iter([30.0, *[1.0] * 100])

        def seconds(body, device):
            before = len(model.modes)
            body()
            return next(times) if model.modes[before][0] else 100.0

        monkeypatch.setattr(measure, "seconds", seconds)
        running = Running(model=model, bare=model, optimizer=Rates(model.parameters()))
        return timed_training.train(running, windows(), schedule, CPU), running

    return run


def test_training_stops_by_its_own_clock(trained):
    """Ten steps a second, and 30 seconds for the first ten."""
    found, _ = trained(Schedule(seconds=4.0, chunk=10, every=20))
    assert [point[:2] for point in found["points"]] == [(20, 2.0), (40, 4.0)], "compilation took 30 seconds"
    found, running = trained(Schedule(seconds=31.0, steps=60, chunk=10, every=20))
    assert found["points"] == [(20, 2.0, 3.0), (40, 4.0, 2.0), (60, 6.0, 1.0)]
    assert (found["training_s"], found["compile_s"], found["validation_s"]) == (6.0, 29.0, 300.0)
    assert found["ms"] == pytest.approx(100.0)
    assert not found["diverged"]
    assert not found["cut_short"]
    assert set(running.model.modes) == {(True, True), (False, False)}
    assert running.model.training


def test_the_learning_rate_rises_and_stays(trained):
    _, running = trained(Schedule(seconds=99.0, steps=6, chunk=2, every=2, warm_up=4, learning_rate=1.0))
    assert running.optimizer.seen == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_a_loss_that_is_not_finite_ends_the_run(trained, monkeypatch):
    schedule = Schedule(seconds=99.0, steps=60, chunk=10, every=20)
    found, _ = trained(schedule, (3.0, math.nan, 1.0))
    assert (found["steps"], found["diverged"]) == (40, True)
    monkeypatch.setenv(values.NO_VALUES, "1")
    found, _ = trained(schedule, (3.0, math.nan, 1.0))
    assert (found["steps"], found["diverged"]) == (60, False), "a device that computes nothing diverges from nothing"


def test_a_run_that_is_about_to_be_killed_ends_and_says_so(trained):
    found, _ = trained(Schedule(seconds=99.0, chunk=10, every=20, until=-1.0))
    assert (found["steps"], found["cut_short"]) == (10, True)


@pytest.mark.parametrize("key", [key for key in CONTENDERS if find(key).missing(CPU) is None])
def test_the_learning_rate_reaches_the_weights(key):
    """A rate of zero in the groups leaves every weight alone, whoever wraps the optimizer; a rate moves them."""
    job = Job(shape=sizes.TOY_CONVERGENCE, device=CPU, compile=False, optimizer_options=ADAMW)
    running = find(key).setup(job)
    batch = models.batches(sizes.TOY_CONVERGENCE, 2, CPU, count=1)
    before = running.forward(batch[0]).item()
    for rate, moves in ((0.0, False), (1e-2, True)):
        for group in running.optimizer.param_groups:
            group["lr"] = rate
        running.step(batch)
        with torch.no_grad():
            assert (abs(running.forward(batch[0]).item() - before) > 0.02) == moves


def test_a_seed_gives_other_weights():
    jobs = [Job(shape=sizes.TOY_CONVERGENCE, device=CPU, seed=seed) for seed in (0, 0, 1)]
    a, same, b = (job.model().embed.weight for job in jobs)
    assert torch.equal(a, same)
    assert not torch.equal(a, b)
    assert ADAMW["lr"] == job_rate(Job(shape=sizes.TOY_CONVERGENCE, device=CPU, optimizer_options=ADAMW))
    assert job_rate(Job(shape=sizes.TOY_CONVERGENCE, device=CPU)) == 1e-4, "of the other parts"


def job_rate(job):
    return job.make_optimizer(torch.nn.Linear(2, 2)).param_groups[0]["lr"]


def test_six_contenders_fit_into_a_call_of_ten_minutes(monkeypatch):
    monkeypatch.setattr(part_convergence, "missing_library", lambda needs: None)
    items = Convergence().items(Settings(seeds=2))
    keys = [item.key for item in items]
    assert keys == [TEXT, *(f"{key}, seed {seed}" for seed in (0, 1) for key in CONTENDERS)]
    assert keys[1] == f"{BASELINE}, seed 0"
    assert sum(item.seconds for item in items[:7]) <= 9.5 * 60
    assert {item.fresh for item in items[1:]} == {True}
    assert all(item.limit > item.seconds for item in items)


def test_without_tokenizers_nothing_starts(monkeypatch):
    monkeypatch.setattr(part_convergence, "missing_library", lambda needs: f"{needs[0]} is not installed")
    items = Convergence().items(Settings())
    assert items[0].missing == "tokenizers is not installed"
    assert all(item.missing for item in items)


def test_a_run_knows_when_it_would_be_killed(monkeypatch):
    monkeypatch.setattr(part_convergence, "time", SimpleNamespace(monotonic=lambda: 1000.0))
    monkeypatch.setenv("GPU_LANE_TIMEOUT", "85")
    found = part_convergence.schedule(Settings())
    assert (found.seconds, found.steps, found.until) == (60.0, None, 1075.0)
    monkeypatch.setenv(values.NO_VALUES, "1")
    assert part_convergence.schedule(Settings(steps=7)).steps == 7, "no time passes there"
