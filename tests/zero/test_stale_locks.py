"""Locks that killed compilations leave behind; torch's own lock is the one that holds them."""

import os
import time

import pytest
from torch.utils.file_baton import FileBaton

from lightning_lowprec.zero import stale_locks


@pytest.fixture
def lock(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    (tmp_path / "deepspeed_shm_comm").mkdir()
    return tmp_path / "deepspeed_shm_comm" / "lock"


def test_no_lock(lock):
    stale_locks.check_locks()


def test_a_lock_that_is_held_is_waited_for(lock):
    baton = FileBaton(str(lock))
    assert baton.try_acquire()
    assert list(stale_locks.locks()) == [lock]
    stale_locks.check_locks()
    baton.release()
    assert list(stale_locks.locks()) == []


def test_a_young_lock_that_nobody_holds_warns_with_the_file(lock):
    lock.touch()
    with pytest.warns(UserWarning, match=rf"'{lock}' is the lock of a compilation, .* delete the file"):
        stale_locks.check_locks()


def test_an_old_lock_that_nobody_holds_raises_with_the_file(lock):
    lock.touch()
    os.utime(lock, (time.time() - 3600,) * 2)
    with pytest.raises(RuntimeError, match=rf"'{lock}' is the lock .* would wait for ever .* Delete the file\."):
        stale_locks.check_locks()


def test_the_folder_of_torch_without_the_variable(tmp_path, monkeypatch):
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    monkeypatch.setattr("torch.utils.cpp_extension.get_default_build_root", lambda: str(tmp_path))
    (tmp_path / "py311_cpu" / "cpu_adam").mkdir(parents=True)
    (tmp_path / "py311_cpu" / "cpu_adam" / "lock").touch()
    assert [path.parent.name for path in stale_locks.locks()] == ["cpu_adam"]
