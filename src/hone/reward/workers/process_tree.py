"""A process with everything that it starts: bounded in memory, and ended to the last of them.

A control group bounds and ends them together where this user may make one. Elsewhere the process above them adopts the
orphans among them (a subreaper, Linux), so that a daemon cannot leave; each has a limit of its own, and their sum is
watched.
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

from hone.reward.sandbox.cgroups import CgroupParent, end_all, find, out_of_memory, sweep
from hone.reward.sandbox.namespaces import remove_groups
from hone.reward.sandbox.protocol import SandboxError

DEATH_SIGNAL, SUBREAPER = 1, 36  # of prctl
PROCESSES = 4096  # in a control group: a fork bomb ends there
GONE_SECONDS = 5.0  # for killed processes to be gone
SHARE = 0.5  # of the machine's memory, for all workers together
LEAST = 2**30  # bytes that each has at least


def die_with_parent() -> None:
    """Where the system can see to it (Linux). The parent must have one thread: its end would count as well."""
    _prctl(DEATH_SIGNAL, signal.SIGKILL)


def adopt_orphans() -> None:
    """Whatever is left behind below this process becomes its child."""
    _prctl(SUBREAPER, 1)


def give_back_free_memory() -> None:
    """What malloc keeps of freed memory (glibc): a child would use it again, and no limit would see it."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _prctl(option: int, value: int) -> None:
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def usual_memory(workers: int) -> int:
    """Bytes for each of so many workers: its share of half the memory that there is."""
    sizes = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for name in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):  # of a container
        with suppress(OSError, ValueError):  # absent, or "max"
            sizes.append(int(Path(name).read_text()))
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # of this machine, each with workers of its own
    return max(LEAST, int(SHARE * min(sizes) / workers / ranks))


@cache
def _home(process: int) -> CgroupParent | None:
    """Where control groups can be made; those of programs that were killed are removed first."""
    home = find()
    if home is not None:
        sweep(home)
    return home


@dataclass(slots=True)
class Bounds:
    """What one worker may take with all its children, in bytes beyond what it begins with."""

    memory: int
    folders: list[str] = field(default_factory=list[str])  # of its control group
    killed: int = 0  # processes that the kernel had ended for want of memory, when this was last asked

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
        """This process, and all that it starts from now on."""
        try:
            for folder in self.folders:
                Path(folder, "cgroup.procs").write_text(str(os.getpid()))
        except OSError:  # it was removed from outside
            self.folders = []
        if not self.folders:
            limit_data(self.memory)

    def exceeded(self) -> bool:
        """Whether the kernel has ended one of them for want of memory since the last time."""
        before, self.killed = self.killed, out_of_memory(self.folders)
        return self.killed > before

    def end(self) -> None:
        """Kill what is in the control group, and let nothing new begin meanwhile."""
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
    """Take leave of those that are our children and have ended."""
    for process in processes:
        with suppress(ChildProcessError):
            os.waitpid(process, os.WNOHANG)


def orphans(worker: int) -> bool:
    """Whether this process has other children than its worker: quickly, where the kernel tells."""
    me = os.getpid()
    with suppress(OSError):
        return any(int(child) != worker for child in Path(f"/proc/{me}/task/{me}/children").read_text().split())
    return False


def memory_taken(processes: Iterable[int]) -> int:
    """Bytes of memory that these processes have and did not begin with; they descend from this one.

    Each began with the memory of this process, and shares it until one of them writes there. A page that n processes
    share counts as an n-th for each. So of what they have they share with this process at most their number times its
    own shared part. That is too much where they have written, so that what they share with anybody bounds it too.
    """
    each = [_anonymous(process) for process in processes]
    began_with = min(sum(shared for _, shared in each), len(each) * _anonymous(os.getpid())[1])
    return sum(size for size, _ in each) - began_with


def _anonymous(process: int) -> tuple[int, int]:
    """Bytes of its memory that is no file's, shared pages counted in part; and how many of these bytes are shared."""
    with suppress(OSError):  # it has just ended
        text = Path(f"/proc/{process}/smaps_rollup").read_text()
        sizes = {name: 1024 * int(size) for name, size in re.findall(r"^(Pss_Anon|Private_Dirty):\s+(\d+)", text, re.M)}
        size = sizes.get("Pss_Anon", 0)
        return size, max(0, size - sizes.get("Private_Dirty", 0))
    return 0, 0


def peak(process: int) -> int:
    """Most bytes of memory that this process has had at once, less what it maps of files; 0 where nobody tells."""
    with suppress(OSError, ValueError):  # it has just ended
        text = Path(f"/proc/{process}/status").read_text()
        sizes = {name: 1024 * int(size) for name, size in re.findall(r"^(VmHWM|RssFile|RssShmem):\s+(\d+)", text, re.M)}
        return sizes.pop("VmHWM", 0) - sum(sizes.values())
    return 0
