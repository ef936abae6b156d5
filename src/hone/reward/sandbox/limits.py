"""What a program may use, and the settings of the sandbox's processes that follow from it."""

import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from hone.errors import HoneError
from hone.reward.sandbox.seccomp import assemble

MIB = 1 << 20
NOBODY = 65533  # the host's user that programs run as where the sandbox is opened by root
OWN_PROCESSES = 2  # the slot's, in the same cgroup
# What programs import most, imported once; the rest is imported by whoever wants it.
PRELOAD = (
    "collections",
    "datetime",
    "decimal",
    "fractions",
    "heapq",
    "itertools",
    "math",
    "random",
    "re",
    "statistics",
)
PRELOAD = (*PRELOAD, "bisect", "copy", "functools", "json", "operator", "string", "traceback", "typing")
SYSTEM = ("/usr/bin", "/usr/lib", "/usr/lib32", "/usr/lib64", "/usr/libexec", "/usr/include", "/usr/share/zoneinfo")
TOP = ("/bin", "/lib", "/lib32", "/lib64")  # links into /usr, or folders of their own
ETC = ("/etc/alternatives",)
TEXTS = (
    ("/etc/passwd", "program:x:1000:1000::/tmp:/bin/sh\n"),
    ("/etc/group", "program:x:1000:\n"),
    ("/etc/hosts", "127.0.0.1 localhost\n"),
)
FILES = ("/etc/ld.so.cache", "/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
DEV = (("/dev/shm", "/tmp"), ("/dev/fd", "/proc/self/fd"), ("/dev/stdin", "fd/0"), ("/dev/stdout", "fd/1"))


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxLimits:
    """The limits of one program together with all that it starts."""

    seconds: float = 5.0  # on the clock; waiting for a processor that others have does not count, up to 3 x
    memory: int = 512 * MIB  # bytes, files in /tmp among them
    addresses: int = 0  # bytes of address space a process; 0: as memory. Node and Java reserve more than they use
    processes: int = 32
    disk: int = 32 * MIB  # bytes in /tmp, which /dev/shm is too
    input: int = (
        16 * MIB
    )  # bytes that a program is given: its standard input, or all that its functions are called with
    output: int = MIB // 4  # bytes of stdout, and of stderr
    result: int = MIB  # bytes of one returned value
    files: int = 128  # open at once, a process
    cores: float = 1.0

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if not 0 < value < float("inf") and (f.name, value) != ("addresses", 0):
                raise HoneError(f"the sandbox's limit {f.name} is {value}: give a number above 0")
        if self.memory < 32 * MIB:
            raise HoneError(f"the sandbox's limit memory is {self.memory}: an interpreter needs {32 * MIB} bytes")
        least = {
            "disk": self.input,
            "memory": 8 * max(self.input, self.result),
        }  # copies are made on the way in and out
        for name, needed in least.items():
            if getattr(self, name) < needed and max(self.input, self.result) > 16 * MIB:
                raise HoneError(f"input and result need more {name}: set {name} to {needed // MIB} MiB or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendOptions:
    """What a backend is opened with."""

    limits: SandboxLimits
    slots: int
    python: str  # an interpreter outside virtual environments
    packages: Sequence[str]  # folders of modules that programs may import


@dataclass(frozen=True, slots=True, kw_only=True)
class Protection:
    """One thing that a program cannot do or reach, and what prevents it."""

    name: str
    how: str
    replaced: bool = False  # by something weaker, for the machine lacks what is asked for
    remedy: str = ""


def rlimits_of(limits: SandboxLimits, sharing: int = 1) -> dict[str, int]:
    """The limits of each process of a job. `sharing` slots have one user."""
    rlimits = {
        "RLIMIT_AS": limits.addresses or limits.memory,
        "RLIMIT_CPU": int(limits.seconds) + 2,
        "RLIMIT_FSIZE": limits.disk,
        "RLIMIT_NOFILE": limits.files,
        "RLIMIT_CORE": 1,  # at 0 the kernel still hands a dump to a program of the machine, where it is set to
        "RLIMIT_MEMLOCK": 0,
        "RLIMIT_MSGQUEUE": 0,
        "RLIMIT_NICE": 0,
        "RLIMIT_RTPRIO": 0,
        "RLIMIT_SIGPENDING": 128,
    }
    if kernel() >= (5, 14):  # before, it counted every process of the user, wherever it runs
        rlimits["RLIMIT_NPROC"] = (limits.processes + OWN_PROCESSES) * sharing
    return rlimits


def configuration(wanted: BackendOptions, *, user: bool, watched: bool) -> dict[str, Any]:
    """For the server: what every slot is made of, and every job locked in by."""
    limits, python, packages = wanted.limits, wanted.python, wanted.packages
    rlimits = rlimits_of(limits, 1 if user else wanted.slots)
    job = {"disk": limits.disk, "rlimits": rlimits, "filter": assemble().hex(), "result": limits.result}
    together = {
        "memory": limits.memory,
        "cpu": limits.seconds * limits.cores + 1,
        "processes": limits.processes + OWN_PROCESSES,
    }
    return {
        "user": user,
        "uid": NOBODY,
        "job": job,
        "root": root_of(python, packages),
        "watch": together if watched else None,
        "preload": PRELOAD,
        "path": library_of(python),
        "packages": list(packages),
    }


def kernel() -> tuple[int, int]:
    """The kernel's version."""
    major, minor, *_ = platform.release().split(".")
    return int(major), int("".join(c for c in minor if c.isdigit()) or 0)


def interpreter() -> str:
    """The Python that runs this, outside any virtual environment."""
    return getattr(sys, "_base_executable", "") or sys.executable


def prefix_of(python: str) -> str:
    """The folder that holds an interpreter and its library."""
    return str(Path(os.path.realpath(python)).parents[1])


def library_of(python: str) -> list[str]:
    """The folders of its standard library."""
    lib = Path(prefix_of(python), "lib")
    found = [p for p in sorted(lib.glob("python3.*")) if (p / "os.py").exists()]
    same = [p for p in found if p.name in os.path.realpath(python)] or found
    if not same:
        raise HoneError(f"no standard library beside {python}: name a Python of its own with python=")
    return [str(same[-1]), str(same[-1] / "lib-dynload")]


def root_of(python: str, packages: Sequence[str]) -> dict[str, Any]:
    """The folders that are seen inside, each (where it is, where it appears); nothing else of the machine is."""
    prefix = prefix_of(python)
    own = [] if prefix == "/usr" else [f"{prefix}/bin", f"{prefix}/lib"]
    wanted = [*SYSTEM, *(top for top in TOP if not os.path.islink(top)), *ETC, *own, *packages]
    found = [os.path.abspath(path) for path in wanted if os.path.isdir(path)]
    for path in found:
        if path.startswith("/tmp/"):
            raise HoneError(f"programs cannot see {path}, for each has a /tmp of its own: move it out of /tmp")
    kept = [p for p in found if not any(p != other and p.startswith(other + "/") for other in found)]
    links = [(top, os.readlink(top)) for top in TOP if os.path.islink(top)]
    return {
        "binds": [(os.path.realpath(path), path) for path in dict.fromkeys(kept)],
        "links": [*links, *DEV],
        "texts": TEXTS,
        "files": [name for name in FILES if os.path.exists(name)],
    }
