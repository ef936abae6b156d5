"""A process with everything that it starts: its memory is bounded, and every one of them is ended with it.

A control group bounds and ends them together where this user may make one. Elsewhere the process above them adopts the
orphans among them (a subreaper, Linux), so that no daemon escapes. Each has a limit of its own (RLIMIT_DATA), and the
memory of all together is measured several times a second.
"""

import ctypes
import os
import re
import resource
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import NamedTuple

from hone.reward.sandbox.cgroups import CgroupParent, end_all, find, out_of_memory, sweep
from hone.reward.sandbox.namespaces import remove_groups
from hone.reward.sandbox.protocol import SandboxError

DEATH_SIGNAL, SUBREAPER = 1, 36  # of prctl
PROCESSES = 4096  # in a control group: a fork bomb ends there
GONE_SECONDS = 5.0  # for killed processes to be gone
SHARE = 0.5  # of the machine's memory, for all workers together
LEAST = 2**30  # bytes that each has at least


def die_with_parent() -> None:
    """Let the kernel kill this process when its parent ends (Linux).

    The parent must have one thread: the end of the thread that forked counts as the parent's.
    """
    _prctl(DEATH_SIGNAL, signal.SIGKILL)


def adopt_orphans() -> None:
    """Become the parent of every process below this one whose own parent ends (Linux)."""
    _prctl(SUBREAPER, 1)


def give_back_free_memory() -> None:
    """Return to the system what malloc keeps of freed memory (glibc): a child could use it, unseen by RLIMIT_DATA."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _prctl(option: int, value: int) -> None:
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def usual_memory(workers: int) -> int:
    """Bytes for each of so many workers: its share of half the machine's memory."""
    sizes = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for name in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):  # of a container
        with suppress(OSError, ValueError):  # absent, or "max"
            sizes.append(int(Path(name).read_text()))
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # of this machine, each with workers of its own
    return max(LEAST, int(SHARE * min(sizes) / workers / ranks))


@cache
def _home(process: int) -> CgroupParent | None:
    """Where control groups can be made, or None. Those that killed programs left behind are removed first."""
    home = find()
    if home is not None:
        sweep(home)
    return home


@dataclass(slots=True)
class Bounds:
    """The memory that one worker may take with all its children, in bytes beyond what it begins with."""

    memory: int
    folders: list[str] = field(default_factory=list[str])  # of its control group
    killed: int = 0  # processes that the kernel had killed for lack of memory when `exceeded` was last called

    @classmethod
    def make(cls, memory: int) -> "Bounds":
        """Bounds, with a control group if there can be one."""
        home = _home(os.getpid())
        try:
            folders = home.make(memory=memory, processes=PROCESSES, cores=os.cpu_count() or 1) if home else []
        except SandboxError:
            folders = []
        return cls(memory, folders)

    def enter(self) -> None:
        """Bound this process and all that it starts from now on."""
        try:
            for folder in self.folders:
                Path(folder, "cgroup.procs").write_text(str(os.getpid()))
        except OSError:  # it was removed from outside
            self.folders = []
        if not self.folders:
            limit_data(self.memory)

    def exceeded(self) -> bool:
        """Whether the kernel has killed one of them for lack of memory since the last call."""
        before, self.killed = self.killed, out_of_memory(self.folders)
        return self.killed > before

    def end(self) -> None:
        """Kill every process of the control group; none can start meanwhile."""
        until = time.monotonic() + GONE_SECONDS
        for folder in self.folders:
            with suppress(OSError):  # this controller has no such file
                Path(folder, "pids.max").write_text("0")
        while end_all(self.folders) and time.monotonic() < until:
            time.sleep(0.001)
        for folder in self.folders:
            with suppress(OSError):
                Path(folder, "pids.max").write_text(str(PROCESSES))

    def close(self) -> None:
        """End all, and the control group itself."""
        self.end()
        remove_groups(self.folders, seconds=GONE_SECONDS)


def limit_data(memory: int) -> None:
    """Limit data to so many bytes more than this process has now, for it and for each of its children."""
    with suppress(OSError, ValueError):  # no such limit here, or a stricter one
        pages = int(Path("/proc/self/statm").read_text().split()[5])
        limit = pages * resource.getpagesize() + memory
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def parents() -> dict[int, int]:
    """The parent of every process."""
    found = dict[int, int]()
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has just ended
            found[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    return found


def descendants(of: int) -> list[int]:
    """Every process below this one, the nearest first."""
    children = dict[int, list[int]]()
    for child, parent in parents().items():
        children.setdefault(parent, []).append(child)
    found = list(children.get(of, []))
    for each in found:
        found += children.get(each, [])
    return found


def end_below(*, keep: int = 0) -> None:
    """Kill every process below this one, except the child `keep` and what belongs to it."""
    until = time.monotonic() + GONE_SECONDS
    while time.monotonic() < until:
        kept = {keep, *descendants(keep)} if keep else set[int]()
        found = [process for process in descendants(os.getpid()) if process not in kept]
        _kill(found, signal.SIGSTOP)  # first, or one would start another while its parent is killed
        _kill(found, signal.SIGKILL)
        _reap(found)
        if not found:
            return
        time.sleep(0.001)


def _kill(processes: Iterable[int], number: int) -> None:
    for process in processes:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(process, number)


def _reap(processes: Iterable[int]) -> None:
    """Wait for those of them that are children of this process and have ended, so that no zombie stays."""
    for process in processes:
        with suppress(ChildProcessError):
            os.waitpid(process, os.WNOHANG)


def orphans(worker: int) -> bool:
    """Whether this process has other children than its worker; False where the kernel does not list them."""
    me = os.getpid()
    with suppress(OSError):
        return any(int(child) != worker for child in Path(f"/proc/{me}/task/{me}/children").read_text().split())
    return False


def memory_taken(processes: Iterable[int]) -> int:
    """Bytes of memory that these processes have and did not begin with; they descend from this one.

    Each began with the private memory of this process, and shares it until one of them writes there. A page that n
    processes share counts as an n-th for each. So of what they have they share with this process at most their number
    times its own shared part. That is too much where they have written, so that what they share with anybody bounds it
    too. Shared memory (shmem) counts beyond what this process has mapped of it.
    """
    each = [_sizes_of(process) for process in processes]
    began_with = min(sum(one.shared for one in each), len(each) * _sizes_of(os.getpid()).shared)
    shmem = sum(one.shmem for one in each) - mapped_shared()
    return sum(one.anonymous for one in each) - began_with + max(0, shmem)


class _Sizes(NamedTuple):
    """Bytes of a process's memory that is no file's; a page that n processes share counts as an n-th."""

    anonymous: int = 0
    shared: int = 0  # of `anonymous`: what it shares with other processes since a fork
    shmem: int = 0  # shared memory: anonymous mappings that are shared, /dev/shm


def _sizes_of(process: int) -> _Sizes:
    found = _sizes_in(Path(f"/proc/{process}/smaps_rollup"), "Pss_Anon", "Pss_Shmem", "Private_Dirty")
    return _Sizes(found["Pss_Anon"], max(0, found["Pss_Anon"] - found["Private_Dirty"]), found["Pss_Shmem"])


def resident(process: int) -> int:
    """Bytes of memory that this process has now, without what it maps of files; 0 where the system does not tell."""
    return sum(_sizes_in(Path(f"/proc/{process}/status"), "RssAnon", "RssShmem").values())


def _sizes_in(path: Path, *names: str) -> dict[str, int]:
    """Lines `NAME: 12 kB` of a file of /proc, in bytes; 0 where the process has just ended."""
    text = ""
    with suppress(OSError):
        text = path.read_text()
    found = {name: 1024 * int(size) for name, size in re.findall(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE)}
    return {name: found.get(name, 0) for name in names}


def mapped_shared() -> int:
    """Bytes that this process has mapped and shares with others: its children may read them and take nothing."""
    with suppress(OSError):
        mappings = re.findall(r"^(\w+)-(\w+) ..[-x]s", Path("/proc/self/maps").read_text(), re.MULTILINE)
        return sum(int(end, 16) - int(start, 16) for start, end in mappings)
    return 0
