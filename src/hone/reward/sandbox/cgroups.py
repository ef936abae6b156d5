"""Control groups for slots, version 1 or 2, wherever this user may make them: memory, processes and CPU together.

Without one, rlimits and a watch over the slot's processes stand in, and `hone sandbox doctor` says so.
"""

import contextlib
import os
import re
import secrets
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hone.reward.sandbox.limits import Protection, SandboxLimits
from hone.reward.sandbox.namespaces import remove_groups, with_inner_groups
from hone.reward.sandbox.protocol import SandboxError

PERIOD = 100_000  # microseconds of the CPU quota
NEEDED, WISHED = {"memory", "pids"}, {"cpu"}
NAME = "hone-sandbox"
OPTIONAL = {"memory.memsw.limit_in_bytes", "memory.swap.max", "memory.swappiness"}  # not every kernel counts swap
SETTLED = 60  # seconds after which an empty group is nobody's: one just made may be a client's in another container


@dataclass(frozen=True, slots=True, kw_only=True)
class CgroupParent:
    """Where cgroups can be made: one folder for version 2, one a controller for version 1."""

    version: int
    folders: Mapping[str, Path]  # controller -> folder

    def describe(self) -> str:
        """For people."""
        return f"cgroup v{self.version}: {', '.join(sorted(self.folders))}"

    def make(self, *, memory: int, processes: int, cores: float) -> list[str]:
        """A fresh cgroup with its limits set; its folders."""
        name = f"{NAME}-{os.getpid()}-{secrets.token_hex(4)}"  # another container may have the same process number
        folders = {controller: base / name for controller, base in self.folders.items()}
        limits = _limits(self.version, memory, processes, int(cores * PERIOD))
        made = list[str]()
        try:
            for folder in dict.fromkeys(folders.values()):
                folder.mkdir()
                made.append(str(folder))
            for controller, folder in folders.items():
                _write(folder, limits[controller])
        except OSError as error:
            remove_groups(made, seconds=0.0)
            raise SandboxError(
                f"a cgroup cannot be made ({error}): see that this user may write where it is"
            ) from error
        return made


def _limits(version: int, memory: int, processes: int, quota: int) -> dict[str, dict[str, int | str]]:
    """Controller to file to text."""
    pids: dict[str, int | str] = {"pids.max": processes}
    if version == 1:
        size: dict[str, int | str] = {
            "memory.limit_in_bytes": memory,
            "memory.memsw.limit_in_bytes": memory,
            "memory.swappiness": 0,
        }
        return {"memory": size, "pids": pids, "cpu": {"cpu.cfs_period_us": PERIOD, "cpu.cfs_quota_us": quota}}
    size = {"memory.max": memory, "memory.swap.max": 0}
    return {"memory": size, "pids": pids, "cpu": {"cpu.max": f"{quota} {PERIOD}"}}


def _write(folder: Path, limits: Mapping[str, int | str]) -> None:
    for file, value in limits.items():
        if file not in OPTIONAL or (folder / file).exists():
            (folder / file).write_text(str(value))


def protections_of(home: CgroupParent | None, limits: SandboxLimits) -> list[Protection]:
    """What bounds memory, processes and CPU: control groups, or what replaces them."""
    memory = Protection(
        name="memory and processes",
        how="rlimits, and a watch that sums the job's processes every 10 ms",
        replaced=True,
        remedy="open it where cgroups can be written: as root, or in a delegated systemd scope",
    )
    cpu = Protection(
        name="CPU",
        how="seconds of CPU, a process by rlimit" + (" and together by the watch" if home is None else ""),
        replaced=True,
        remedy="delegate the cpu controller",
    )
    if home is not None:
        memory = Protection(name=memory.name, how=home.describe())
    if home is not None and "cpu" in home.folders:
        cpu = Protection(name=cpu.name, how=f"a quota of {limits.cores:g} cores a slot")
    return [memory, cpu]


def out_of_memory(folders: Sequence[str]) -> int:
    """How many processes of the cgroup the kernel has ended for want of memory."""
    for folder in folders:
        for name in ("memory.oom_control", "memory.events"):
            path = Path(folder, name)
            if path.exists() and (found := re.search(r"^oom_kill (\d+)", path.read_text(), re.MULTILINE)):
                return int(found.group(1))
    return 0


def end_all(folders: Sequence[str]) -> bool:
    """Kill every process of a cgroup and of those inside it; whether there was one."""
    found = [pid for folder in folders[:1] for pid in _members(folder)]  # each process is in all of them
    for pid in found:
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.kill(pid, signal.SIGKILL)
    return bool(found)


def _members(folder: str) -> list[int]:
    found = list[int]()
    for group in with_inner_groups(folder):
        with contextlib.suppress(OSError):  # it has just been removed
            found += map(int, Path(group, "cgroup.procs").read_text().split())
    return found


def find(root: Path = Path("/")) -> CgroupParent | None:
    """The home of new cgroups with every controller needed, or None. Version 1 wins where both are mounted."""
    own = {}
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        own[controllers] = path
    mounts = _mounts(_lines(root / "proc/self/mountinfo"))
    first = _version_1(root, own, mounts)
    return first or _version_2(root, own, mounts)


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def _mounts(lines: Sequence[str]) -> list[tuple[str, str, str, set[str]]]:
    """Kind, root within the hierarchy, mount point and options of every cgroup mount."""
    found = []
    for line in lines:
        left, _, right = line.partition(" - ")
        kind, _, options = right.split(" ", 2)
        if kind in ("cgroup", "cgroup2"):
            found.append((kind, left.split()[3], left.split()[4], set(options.split(","))))
    return found


def _version_1(root: Path, own: Mapping[str, str], mounts: list[tuple[str, str, str, set[str]]]) -> CgroupParent | None:
    paths = {controller: path for names, path in own.items() for controller in names.split(",")}
    folders = dict[str, Path]()
    for kind, top, point, options in mounts:
        for controller in options & (NEEDED | WISHED) if kind == "cgroup" else ():
            folder = root / point[1:] / os.path.relpath(paths[controller], top)
            if _usable(folder):
                folders[controller] = Path(os.path.normpath(folder))
    return CgroupParent(version=1, folders=folders) if set(folders) >= NEEDED else None


def _version_2(root: Path, own: Mapping[str, str], mounts: list[tuple[str, str, str, set[str]]]) -> CgroupParent | None:
    """The nearest ancestor whose children have the controllers: a process may not share a folder with groups."""
    for kind, top, point, _ in mounts:
        if kind != "cgroup2" or "" not in own:
            continue
        base = root / point[1:]
        folder = Path(os.path.normpath(base / os.path.relpath(own[""], top)))
        while folder.is_relative_to(base):
            found = _enabled(folder) if _usable(folder) else set[str]()
            if found >= NEEDED:
                return CgroupParent(version=2, folders=dict.fromkeys(sorted(found), folder))
            folder = folder.parent
    return None


def _enabled(folder: Path) -> set[str]:
    """The controllers that children have, switched on here if the kernel allows it."""
    switch = folder / "cgroup.subtree_control"
    wanted = (NEEDED | WISHED) & set((folder / "cgroup.controllers").read_text().split())
    missing = wanted - set(switch.read_text().split())
    if missing:
        try:
            switch.write_text(" ".join(f"+{name}" for name in sorted(missing)))
        except OSError:
            wanted -= missing  # processes live in this folder, or it is not ours to change
    return wanted


def _usable(folder: Path) -> bool:
    return folder.is_dir() and os.access(folder, os.W_OK) and os.access(folder / "cgroup.procs", os.W_OK)


def sweep(home: CgroupParent) -> None:
    """Remove what a client that was killed has left: groups named after a process that is no more."""
    for base in set(home.folders.values()):
        for folder in base.glob(f"{NAME}-*-*"):
            pid = folder.name.removeprefix(f"{NAME}-").partition("-")[0]
            if pid.isdigit() and not Path("/proc", pid).exists() and _settled(folder):
                remove_groups([str(folder)], seconds=0.0)


def _settled(folder: Path) -> bool:
    try:
        return time.time() - folder.stat().st_mtime > SETTLED
    except FileNotFoundError:  # another client has just removed it
        return False
