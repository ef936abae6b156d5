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
        found = files.latest(folder / names.CHECKPOINTS, note=note)
        if found is None:
            raise HoneError(f"no checkpoint in {folder} is whole: copy one back, or start anew with another out=")
        return found
    strange = [name for name in names.RUN if (folder / name).exists()] if folder.is_dir() else []
    if strange and names.RECIPE not in strange:
        raise HoneError(f"{folder} has a {strange[0]} that is not of a run: choose another out=")
    return None


def last_logged_step(folder: Path) -> int:
    """The last step that the log tells of."""
    return max((int(row.get("step", 0)) for row in sinks.read(folder / names.METRICS)), default=0)


@contextmanager
def exclusive_use(folder: Path) -> Iterator[None]:
    """Hold the folder for this run alone. If nothing was written into it, remove it at the end."""
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    with ExitStack() as stack:
        if is_first():
            stack.callback(_remove_empty, made)
        collect.once(partial(_take, folder, stack))
        yield


def _take(folder: Path, stack: ExitStack) -> None:
    """Lock it, and bring back a checkpoint that a killed process was about to replace."""
    stack.enter_context(folder_lock(folder))
    if (folder / names.RECIPE).is_file():
        files.sweep(folder / names.CHECKPOINTS)


class FolderGuard:
    """What a run needs in its folder to be of use later, as it was when it began.

    A folder that is removed, renamed or replaced meanwhile ends the run; a file of settings is written again. What
    came to lie in the place of a file, as a pipe or a folder, is put aside.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._told, self._place = folder, False, _folder_id(folder)
        self._start = _sizes(folder / names.START)
        self._contents = {
            name: (folder / name).read_bytes() for name in (names.RECIPE, names.CONFIG) if (folder / name).is_file()
        }

    def check(self, *, done: str = "") -> list[str]:
        """What was put right; HoneError where that cannot be done. done: the name of the run's last checkpoint."""
        folder = self._folder
        lacking = [name for name in self._contents if not (folder / name).is_file()]
        start = _sizes(folder / names.START) == self._start
        if _folder_id(folder) != self._place or (not start and len(lacking) == len(self._contents)):
            raise Unsaved(
                f"{folder} was removed, renamed or replaced while the run went on, and nothing more is written to it: "
                "continue it with `hone resume` where it is now, or start it again with `hone run`"
            )
        said = _put_aside(folder)
        renew_lock(folder)
        for name in lacking:
            files.write_atomically(folder / name, self._contents[name])
        said += [f"{name} was removed, and is written again" for name in lacking]
        if not start:
            said += self._without_start(done)
        if done and not (folder / names.CHECKPOINTS / done / names.MANIFEST).is_file():
            raise Unsaved(
                f"{folder / names.CHECKPOINTS / done} was removed as soon as it was saved: start the run again"
            )
        return said

    def _without_start(self, done: str) -> list[str]:
        """Nothing can go on without it, and nobody has it any more; what is trained can still be used."""
        lost = f"{self._folder / names.START} was removed or changed, without which the run cannot be resumed"
        if done:
            raise HoneError(f"the run is done, but {lost}: copy it back, or go on with model.path=.../{done}")
        news, self._told = [] if self._told else [f"warn: {lost}: copy it back"], True
        return news


def _put_aside(folder: Path) -> list[str]:
    """Put aside what is no file where the run writes one, or no folder where it has its checkpoints; what was."""
    said = list[str]()
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
        said.append(f"warn: {name} is no {kind} any more: what is there in its place is now {aside.name}")
    return said


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
    """A run that did not do its first step leaves nothing behind."""
    for path in (folder / name for name in reversed(names.RUN)):  # what marks the folder as a run's goes last
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        elif path.is_file():
            path.unlink()


def _remove_empty(made: Sequence[Path]) -> None:
    """Remove the folders that were made for a run and are empty, the innermost first."""
    for path in made:
        with suppress(OSError):  # not empty: a run has come of it, this one or another's
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
        for handle in [handle for handle, of in _handles.items() if of == path]:  # none in a child forked meanwhile
            _release_lock(path, handle)


def _release_lock(path: Path, handle: int) -> None:
    del _handles[handle]
    with suppress(OSError):  # the lock is the handle: a file that stays harms nobody
        if _is_at(path, handle):  # else another's, in a folder that was put in this one's place
            path.unlink()  # while it is held, so that who has opened it since finds it gone
    os.close(handle)


def _acquire_lock(path: Path) -> None:
    handle = _take_lock(path)
    _handles[handle] = path
    with suppress(OSError):  # a full disk: the lock holds without a name
        os.ftruncate(handle, 0)
        os.write(handle, f"process {os.getpid()} on {socket.gethostname()}".encode())


def renew_lock(folder: Path) -> None:
    """Inside `folder_lock`: take the lock anew if its file was removed; HoneError where another was quicker."""
    path = folder / names.LOCK
    if not any(_is_at(path, handle) for handle in _handles):
        _acquire_lock(path)


def _take_lock(path: Path) -> int:
    """A handle of the file with the lock on it."""
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        if os.path.lexists(path) and not path.is_file() and os.path.lexists(path):  # a lock may go in between
            raise HoneError(f"{path} is no file, but a pipe, a folder or a link that leads nowhere: remove it")
        try:
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except FileNotFoundError:  # the folder was removed in between, by a run that came to nothing
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
    except OSError:  # it is gone, or what it was in
        return False
    return (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino)


def _close_locks_in_child() -> None:
    """In a forked child: a lock that is shared with it would outlive its owner."""
    for handle in _handles:
        os.close(handle)
    _handles.clear()


os.register_at_fork(after_in_child=_close_locks_in_child)
