"""Files of checkpoints: killed at any moment, a process leaves a complete one, and the next save cleans up."""

import multiprocessing
import os
import signal
import sys
import time
import traceback

import pytest
import torch
from torch.distributed.checkpoint import CheckpointException

from lightning_lowprec.checkpoints import save
from tests.checkpoints.test_checkpoint_files import FILES, state
from tests.fsdp2.ranks import enter, free_port, launch
from tests.fsdp2.toy import assert_same, everything, setup, train

STEPS = {"os.mkdir", "os.rename", "os.remove", "os.rmdir"}


def write(path, content, folder):
    with save.replacing(path, folder=folder) as new:
        if folder:
            for name in FILES:
                (new / name).write_text(content)
        else:
            new.write_text(content)


def read(path):
    path = save.find(path)
    if path.is_file():
        return path.read_text()
    texts = {file.name: file.read_text() for file in path.iterdir() if file.name != "notes.txt"}
    assert sorted(texts) == sorted(FILES)
    return content if set(texts.values()) == {content := texts[save.META]} else f"mixed: {texts}"


def writes_until_killed(path, folder, step):
    seen = 0

    def count(event, arguments):
        nonlocal seen
        changes = event in STEPS or (event == "open" and isinstance(arguments[1], str) and arguments[1][0] == "w")
        seen += changes
        if changes and seen > step:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)
    write(path, "new", folder)
    os._exit(0)


def killed_at_every_step(rank, ranks, root, before, folder):
    """A process that is killed before its n-th change of the file system, for every n."""
    outcomes, status = [], -1
    while status != 0:
        path = root / f"{before}.{folder}.{len(outcomes)}" / "last.ckpt"
        path.parent.mkdir()
        if before is not None:
            write(path, "old", before)
        if (child := os.fork()) == 0:
            writes_until_killed(path, folder, len(outcomes))
        status = os.waitpid(child, 0)[1]
        assert status in (0, signal.SIGKILL)
        try:
            outcomes.append(read(path))
        except FileNotFoundError:
            outcomes.append(None)
        write(path, "newest", folder)
        assert read(path) == "newest"
        assert [f.name for f in path.parent.iterdir()] == ["last.ckpt"], "leftovers"
    old = None if before is None else "old"
    assert len(outcomes) > (4 if folder else 1), "it was killed in between"
    changed = outcomes.index("new")
    assert outcomes == [old] * changed + ["new"] * (len(outcomes) - changed), outcomes


def all_cases(rank, ranks, root):
    for before in (None, True, False):
        for folder in (True, False):
            killed_at_every_step(rank, ranks, root, before, folder)


@pytest.mark.slow
def test_killed_at_every_step(tmp_path):
    launch(all_cases, 1, tmp_path, tmp_path)


def test_a_folder_of_something_else_is_not_replaced(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.tex").write_text("")
    for folder in (True, False):
        with pytest.raises(IsADirectoryError, match=r"holds no checkpoint but thesis.tex"):
            write(tmp_path / "run", "new", folder)
    assert (tmp_path / "run" / "thesis.tex").exists()
    with pytest.raises(OSError, match=r"thesis.tex/a' was not saved: rank 0: .*(File exists|Not a directory)"):
        write(tmp_path / "run" / "thesis.tex" / "a", "new", True)


def test_what_others_put_into_a_checkpoint_stays_and_a_link_is_replaced_and_not_followed(tmp_path):
    write(tmp_path / "a", "old", True)
    (tmp_path / "a" / save.META).unlink()  # as a removal that was killed leaves a folder
    write(tmp_path / "a", "new", True)
    (tmp_path / "a" / "notes.txt").write_text("mine")
    write(tmp_path / "a", "a", True)
    (tmp_path / "last").symlink_to("a")
    write(tmp_path / "last", "b", True)
    assert (read(tmp_path / "a"), read(tmp_path / "last")) == ("a", "b")
    assert [path.parent.name for path in tmp_path.glob("*/notes.txt")] == ["a"]
    assert sorted(f.name for f in tmp_path.iterdir()) == ["a", "last"]
    for leftover in (save.aside(tmp_path / "a"), save.completed(tmp_path / "a")):
        leftover.mkdir()
    for _ in range(2):
        save.remove(tmp_path / "a")
        assert [f.name for f in tmp_path.iterdir()] == ["last"], "leftovers are removed too"


@pytest.mark.parametrize("error", [TypeError("cannot pickle 'generator' object"), KeyboardInterrupt()])
@pytest.mark.parametrize("wrapped", [True, False])
def test_other_errors_keep_their_class(tmp_path, error, wrapped):
    write(tmp_path / "a", "old", True)
    interrupted = isinstance(error, KeyboardInterrupt)
    expected = RuntimeError if wrapped and not interrupted else type(error)
    failure = CheckpointException("write", {0: (error, None)}) if wrapped else error
    with pytest.raises(expected) as caught, save.replacing(tmp_path / "a", folder=True):
        raise failure
    if not interrupted:
        said = "".join(traceback.format_exception_only(caught.value)).rstrip()
        why = "a' was not saved: rank 0: TypeError: cannot pickle 'generator' object"
        assert said.endswith(f"{why}; the earlier checkpoint of this name is whole.")
    assert read(tmp_path / "a") == "old"
    assert interrupted or [f.name for f in tmp_path.iterdir()] == ["a"]


# ---- ranks that are killed while they save: the run resumes from the checkpoint before, and saves again


CASES = (("sharded", (1, 0)), ("sharded", (0,)), ("sharded", (1,)), ("full", (1, 0)))  # and who is killed


class Deadly:
    """Kills when it is written into a checkpoint: on rank 0, after all shards were written."""

    def __init__(self, pids):
        self.pids = pids

    def __reduce__(self):
        for pid in self.pids:
            os.kill(pid, signal.SIGKILL)
        return (int, ())


def dies(rank, port, folder, kind, victims):
    os.setsid()
    enter(rank, port)
    fabric, model, optimizer = setup("fp8-hybrid", 2, kind=kind)
    train(fabric, model, optimizer, range(2), 2)
    fabric.save(folder / "a.ckpt", state(model, optimizer))
    saved = everything(model, optimizer, fabric.strategy.precision)
    if rank == 0:
        torch.save(saved, folder / "truth")
    train(fabric, model, optimizer, range(2), 2)
    pids = fabric.all_gather(torch.tensor(os.getpid())).tolist()
    fabric.barrier()
    if 0 not in victims:
        os.kill(pids[1], signal.SIGKILL) if rank == 1 else None
    fabric.save(folder / "a.ckpt", {**state(model, optimizer), "deadly": Deadly([pids[i] for i in victims])})


def resumes(rank, ranks, folder):
    for case in sorted(folder.iterdir()):
        if not case.is_dir():
            continue
        fabric, model, optimizer = setup("fp8-hybrid", 2, seed=3, kind=case.name.split(".")[0])
        fabric.load(case / "a.ckpt", state(model, optimizer))
        loaded = everything(model, optimizer, fabric.strategy.precision)
        assert_same(loaded, torch.load(case / "truth", weights_only=True), case.name)
        fabric.save(case / "a.ckpt", state(model, optimizer))
        fabric.barrier()
        assert sorted(f.name for f in case.iterdir()) == ["a.ckpt", "truth"], "leftovers"


def saves_die(rank, ranks, place):
    """In a process that has imported what the ranks need, and that they are forked from."""
    context = multiprocessing.get_context("fork")
    for kind, victims in CASES:
        port = free_port()
        (folder := place / f"{kind}.{len(victims)}.{victims[0]}").mkdir()
        processes = [context.Process(target=dies, args=(r, port, folder, kind, victims)) for r in range(2)]
        for process in processes:
            process.start()
        end = time.monotonic() + 90
        for process in processes:
            process.join(max(0.0, end - time.monotonic()))
        codes = [process.exitcode for process in processes]
        for process in processes:
            process.kill()
        assert all(codes[victim] == -signal.SIGKILL for victim in victims), codes
        assert all(code not in (None, 0) for code in codes), f"the other rank hangs, or saved: {codes}"


@pytest.mark.slow
@pytest.mark.distributed
def test_resumes_from_the_one_before(tmp_path):
    launch(saves_die, 1, tmp_path, tmp_path)
    launch(resumes, 2, tmp_path, tmp_path)
