"""One process at a time in a run's folder: a lock that the system drops when its owner ends, however it ends."""

import errno
import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hone.errors import HoneError

LOCK = "lock"
_handles = dict[int, Path]()  # the locks this process holds, and of which file each is


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Inside, no other process or thread may hold this folder's lock; HoneError where one does."""
    path = folder / LOCK
    _hold(path)
    try:
        yield
    finally:
        for handle in [handle for handle, of in _handles.items() if of == path]:  # none in a child forked meanwhile
            _let_go_of(path, handle)


def _let_go_of(path: Path, handle: int) -> None:
    del _handles[handle]
    with suppress(OSError):  # the lock is the handle: a file that stays harms nobody
        if _is_at(path, handle):  # else another's, in a folder that was put in this one's place
            path.unlink()  # while it is held, so that who has opened it since finds it gone
    os.close(handle)


def _hold(path: Path) -> None:
    handle = _take(path)
    _handles[handle] = path
    with suppress(OSError):  # a full disk: the lock holds without a name
        os.ftruncate(handle, 0)
        os.write(handle, f"process {os.getpid()} on {socket.gethostname()}".encode())


def hold_on(folder: Path) -> None:
    """Within `held`: take the lock anew where somebody has removed its file; HoneError where another was quicker."""
    path = folder / LOCK
    if not any(_is_at(path, handle) for handle in _handles):
        _hold(path)


def _take(path: Path) -> int:
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


def _let_go() -> None:
    """In a forked child: a lock that is shared with it would outlive its owner."""
    for handle in _handles:
        os.close(handle)
    _handles.clear()


os.register_at_fork(after_in_child=_let_go)
