"""Files of checkpoints: killed at any moment, a process leaves a complete one, and the next save cleans up."""

import os
import signal
import sys
import traceback

import pytest
from torch.distributed.checkpoint import CheckpointException

from lightning_lowprec.checkpoints import save
from tests.fsdp2.ranks import launch

STEPS = {"os.mkdir", "os.rename", "os.remove", "os.rmdir"}


def write(path, content, folder):
    with save.replacing(path, folder=folder) as new:
        if folder:
            for rank in range(2):
                (new / f"__{rank}_0.distcp").write_text(content)
            (new / save.META).write_text(content)
        else:
            new.write_text(content)


def read(path):
    path = save.find(path)
    if path.is_file():
        return path.read_text()
    texts = {file.read_text() for file in path.iterdir() if file.name != "notes.txt"}
    names = sorted(f.name for f in path.iterdir() if f.name != "notes.txt")
    assert names == ["__0_0.distcp", "__1_0.distcp", "meta.pt"]
    return texts.pop() if len(texts) == 1 else f"mixed: {texts}"


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
    outcomes = []
    status = -1
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
    (tmp_path / "a" / "notes.txt").write_text("mine")
    write(tmp_path / "a", "new", True)
    assert read(tmp_path / "a") == "new"
    assert (tmp_path / "a" / "notes.txt").read_text() == "mine"
    write(tmp_path / "a", "a", True)
    (tmp_path / "last").symlink_to("a")
    write(tmp_path / "last", "b", True)
    assert (read(tmp_path / "a"), read(tmp_path / "last")) == ("a", "b")
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
