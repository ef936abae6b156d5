"""A run's folder has one owner at a time, and none that is dead."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest
from patience import eventually

from hone.checkpoint.run_folder import folder_lock
from hone.errors import HoneError
from hone.storage.names import LOCK


def in_child(do) -> int:
    """The child's number; it ends when `do` does, and runs nothing of pytest's."""
    if not (pid := os.fork()):
        try:
            do()
        finally:
            os._exit(0)
    return pid


def wait_until(true) -> None:
    assert eventually(true), "it never came"


def keep(folder: Path) -> None:
    with folder_lock(folder):
        (folder / "taken").touch()
        time.sleep(60)


def test_the_second_is_refused_and_told_who_is_there(tmp_path: Path):
    says = f"is in use by process {os.getpid()} on .*another out="
    with folder_lock(tmp_path), pytest.raises(HoneError, match=says), folder_lock(tmp_path):
        pytest.fail("there were two")
    with folder_lock(tmp_path):
        assert (tmp_path / LOCK).is_file()
    assert list(tmp_path.iterdir()) == []


def test_a_lock_dies_with_its_owner(tmp_path: Path):
    owner = in_child(lambda: keep(tmp_path))
    wait_until((tmp_path / "taken").exists)
    with pytest.raises(HoneError, match=f"process {owner} "), folder_lock(tmp_path):
        pytest.fail("there were two")
    os.kill(owner, signal.SIGKILL)
    os.waitpid(owner, 0)
    assert (tmp_path / LOCK).is_file(), "the file stays, the lock does not"
    with folder_lock(tmp_path):
        assert (tmp_path / LOCK).read_text().startswith(f"process {os.getpid()} ")
    assert not (tmp_path / LOCK).exists()


def test_a_child_that_outlives_the_owner_holds_nothing(tmp_path: Path):
    """As a worker that was forked for rewards would."""

    def fork_and_keep() -> None:
        with folder_lock(tmp_path):
            child = in_child(lambda: time.sleep(60))
            (tmp_path / "child.part").write_text(str(child))
            os.replace(tmp_path / "child.part", tmp_path / "child")
            time.sleep(60)

    owner = in_child(fork_and_keep)
    wait_until((tmp_path / "child").exists)
    child = int((tmp_path / "child").read_text())
    try:
        os.kill(owner, signal.SIGKILL)
        os.waitpid(owner, 0)
        os.kill(child, 0)  # it is there
        with folder_lock(tmp_path):
            pass
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_forked_child_that_leaves_the_block_does_not_unlock_it(tmp_path: Path):
    with folder_lock(tmp_path):
        lock = folder_lock(tmp_path / "other")
        lock.__enter__()
        child = in_child(lambda: lock.__exit__(None, None, None))
        os.waitpid(child, 0)
        assert (tmp_path / "other" / LOCK).is_file()
        with pytest.raises(HoneError, match="in use"), folder_lock(tmp_path / "other"):
            pytest.fail("there were two")
        lock.__exit__(None, None, None)


def test_one_of_many_gets_it_each_time(tmp_path: Path):
    """Removing the file at the end lets nobody in beside the one who has just opened it."""
    inside, most, taken = [0], [0], [0]

    def try_often() -> None:
        for _ in range(200):
            try:
                with folder_lock(tmp_path / "run"):
                    inside[0] += 1
                    most[0] = max(most[0], inside[0])
                    taken[0] += 1
                    inside[0] -= 1
            except HoneError:
                continue

    threads = [threading.Thread(target=try_often) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert taken[0] > 4
    assert most[0] == 1


def test_a_folder_that_cannot_be_written_is_an_error_of_the_system(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"), folder_lock(tmp_path / "file" / "run"):
        pytest.fail("there is no such folder")


def test_a_folder_of_somebody_else_is_told_with_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """By the system's answer: to root no folder is somebody else's."""

    def refused(path: Path, *_: object) -> int:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "open", refused)
    with pytest.raises(HoneError, match=r"may not be written to \(Permission denied\).* copy the run .* resume that"):
        folder_lock(tmp_path).__enter__()
