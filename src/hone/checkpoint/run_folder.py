"""A run's folder: who may use it, what is found in it, what must stay in it, and when an empty one is removed.

One process at a time uses the folder. A lock says so.
"""

import errno
import fcntl
import os
import shutil
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from itertools import count
from pathlib import Path

from hone.dist import collect
from hone.errors import HoneError, Unsaved
from hone.log import sinks
from hone.log.progress import say
from hone.storage import files, names


def is_first() -> bool:
    """Whether this process prints and writes."""
    return collect.world()[0] == 0


def checkpoint_to_resume(folder: Path, *, resume: bool) -> Path | None:
    """The checkpoint to go on from, None for a new run; or HoneError where the folder holds something else."""
    if files.checkpoints(folder / names.CHECKPOINTS):
        if not any((folder / name).is_file() for name in (names.RECIPE, names.CONFIG)):
            raise HoneError(
                f"{folder} holds checkpoints without {names.RECIPE} and {names.CONFIG}: choose another out="
            )
        if not resume:
            raise HoneError(
                f"{folder} already holds a run: continue it with `hone resume {folder}`, or choose another out="
            )
        note: Callable[[str], None] = say if is_first() else lambda text: None
        latest = files.latest(folder / names.CHECKPOINTS, note=note)
        if latest is None:
            raise HoneError(f"no checkpoint in {folder} is whole: copy one back, or start anew with another out=")
        return latest
    strange = [name for name in names.RUN if (folder / name).exists()] if folder.is_dir() else []
    if strange and names.RECIPE not in strange:
        raise HoneError(f"{folder} has a {strange[0]} that is not of a run: choose another out=")
    return None


def last_logged_step(folder: Path) -> int:
    """The last step in the log."""
    return max((int(row.get("step", 0)) for row in sinks.read(folder / names.METRICS)), default=0)


@contextmanager
def exclusive_use(folder: Path) -> Iterator[None]:
    """Hold the folder for this run alone. If nothing was written into it, remove it at the end."""
    created = [path for path in (folder, *folder.parents) if not path.exists()]
    with ExitStack() as stack:
        if is_first():
            stack.callback(_remove_empty, created)
        collect.once(partial(_lock_and_clean, folder, stack))
        yield


def _lock_and_clean(folder: Path, stack: ExitStack) -> None:
    """Lock the folder, and bring back a checkpoint that a killed process was about to replace."""
    stack.enter_context(folder_lock(folder))
    if (folder / names.RECIPE).is_file():
        files.sweep(folder / names.CHECKPOINTS)


class FolderGuard:
    """Keeps in a run's folder what is needed to resume the run.

    If the folder is removed, renamed or replaced, the run ends. If a file of settings is removed, it is written again.
    A pipe or a folder in the place of a file is renamed.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._warned, self._place = folder, False, _folder_id(folder)
        self._start = _sizes(folder / names.START)
        self._contents = {
            name: (folder / name).read_bytes() for name in (names.RECIPE, names.CONFIG) if (folder / name).is_file()
        }

    def check(self, *, done: str = "") -> list[str]:
        """Repair the folder, or raise HoneError; returns what it did. done: the name of the run's last checkpoint."""
        folder = self._folder
        lacking = [name for name in self._contents if not (folder / name).is_file()]
        start = _sizes(folder / names.START) == self._start
        if _folder_id(folder) != self._place or (not start and len(lacking) == len(self._contents)):
            raise Unsaved(
                f"{folder} was removed, renamed or replaced while the run went on, and nothing more is written to it: "
                "continue it with `hone resume` where it is now, or start it again with `hone run`"
            )
        notes = _rename_misplaced(folder)
        renew_lock(folder)
        for name in lacking:
            files.write_atomically(folder / name, self._contents[name])
        notes += [f"{name} was removed, and is written again" for name in lacking]
        if not start:
            notes += self._report_lost_start(done)
        if done and not (folder / names.CHECKPOINTS / done / names.MANIFEST).is_file():
            raise Unsaved(
                f"{folder / names.CHECKPOINTS / done} was removed as soon as it was saved: start the run again"
            )
        return notes

    def _report_lost_start(self, done: str) -> list[str]:
        """Warn once, or raise if the run is done: without START it cannot be resumed. Its weights can still be used."""
        lost = f"{self._folder / names.START} was removed or changed, without which the run cannot be resumed"
        if done:
            raise HoneError(f"the run is done, but {lost}: copy it back, or go on with model.path=.../{done}")
        notes, self._warned = [] if self._warned else [f"warn: {lost}: copy it back"], True
        return notes


def _rename_misplaced(folder: Path) -> list[str]:
    """Rename what is not a file in the place of a file, or not a folder in the place of the checkpoints."""
    notes = list[str]()
    for name in (
        names.RECIPE,
        names.CONFIG,
        names.METRICS,
        names.SAMPLES,
        names.INVALID,
        names.LOCK,
        names.CHECKPOINTS,
    ):
        path = folder / name
        if not os.path.lexists(path) or (path.is_dir() if name == names.CHECKPOINTS else path.is_file()):
            continue
        aside = next(p for n in count(1) if not os.path.lexists(p := folder / f"{name}.aside-{n}"))
        os.replace(path, aside)
        kind = "folder" if name == names.CHECKPOINTS else "file"
        notes.append(f"warn: {name} is no {kind} any more: what is there in its place is now {aside.name}")
    return notes


def _sizes(folder: Path) -> dict[str, int]:
    """The size of every file in the folder. More cannot be looked at in each step."""
    return {path.name: path.stat().st_size for path in folder.glob("*") if path.is_file()}


def _folder_id(folder: Path) -> tuple[int, int] | None:
    """The numbers that tell a folder from another folder of the same name."""
    try:
        return folder.stat().st_dev, folder.stat().st_ino
    except OSError:
        return None


def remove_run_files(folder: Path) -> None:
    """Remove what a run wrote that did not do its first step."""
    for path in (folder / name for name in reversed(names.RUN)):  # what marks the folder as a run's goes last
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        elif path.is_file():
            path.unlink()


def _remove_empty(created: Sequence[Path]) -> None:
    """Remove the folders that were created for a run and are empty, the innermost first."""
    for path in created:
        with suppress(OSError):  # not empty: this run or another one uses it
            path.rmdir()


# --- the lock: the system drops it when its owner ends, however it ends ---

_handles = dict[int, Path]()  # the locks this process holds, and of which file each is


@contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """Inside, no other process or thread may hold this folder's lock; HoneError where one does."""
    path = folder / names.LOCK
    _acquire_lock(path)
    try:
        yield
    finally:
        for handle in [handle for handle, of in _handles.items() if of == path]:  # none in a forked child
            _release_lock(path, handle)


def _release_lock(path: Path, handle: int) -> None:
    del _handles[handle]
    with suppress(OSError):  # the lock is the handle: it does no harm if the file stays
        if _is_at(path, handle):  # if not, it belongs to a folder that replaced this one
            path.unlink()  # while it is locked: a process that has opened it then sees that it is gone
    os.close(handle)


def _acquire_lock(path: Path) -> None:
    handle = _take_lock(path)
    _handles[handle] = path
    with suppress(OSError):  # a full disk: the lock holds without a name
        os.ftruncate(handle, 0)
        os.write(handle, f"process {os.getpid()} on {socket.gethostname()}".encode())


def renew_lock(folder: Path) -> None:
    """Inside `folder_lock`: take the lock anew if its file was removed; HoneError if another process took it."""
    path = folder / names.LOCK
    if not any(_is_at(path, handle) for handle in _handles):
        _acquire_lock(path)


def _take_lock(path: Path) -> int:
    """Open the lock's file and lock it; the handle."""
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        if os.path.lexists(path) and not path.is_file() and os.path.lexists(path):  # it may vanish in between
            raise HoneError(f"{path} is no file, but a pipe, a folder or a link that leads nowhere: remove it")
        try:
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except FileNotFoundError:  # another run, which ended before its first step, removed the folder in between
            continue
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
                raise
            raise HoneError(
                f"{path.parent} may not be written to ({error.strerror}): set another out=, or copy the run to a "
                "folder of yours and resume that"
            ) from error
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.read(handle, 200).decode(errors="replace") or "another process"
            os.close(handle)
            raise HoneError(f"{path.parent} is in use by {owner}: wait for it to end, or set another out=") from None
        except OSError as error:
            os.close(handle)
            raise HoneError(f"{path} cannot be locked ({error.strerror}): set out= to another disk") from error
        if _is_at(path, handle):
            return handle
        os.close(handle)  # its owner removed it between opening and locking


def _is_at(path: Path, handle: int) -> bool:
    try:
        there, here = path.stat(), os.fstat(handle)
    except OSError:  # the file or its folder is gone
        return False
    return (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino)


def _close_locks_in_child() -> None:
    """Close the locks in a forked child, which would otherwise hold them when the parent has ended."""
    for handle in _handles:
        os.close(handle)
    _handles.clear()


os.register_at_fork(after_in_child=_close_locks_in_child)
