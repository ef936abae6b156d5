"""Other people's walls: bubblewrap and nsjail, where they are installed. Each program starts an interpreter of its own.

The tool makes the namespaces and the root; limits, the filter of system calls and cgroups are the same as Hone's own.
"""

import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from threading import Semaphore
from typing import Any

from hone.reward import sandbox_cgroups as cgroups
from hone.reward.sandbox_job import ENVIRONMENT
from hone.reward.sandbox_limits import INSIDE_FILES, OWN_PROCESSES, Protection, Wanted, configuration
from hone.reward.sandbox_slots import GRACE, HOME, Ask, Conversation, SandboxError, Talk, await_lock, frame, names
from hone.reward.sandbox_wall import INSIDE, remove_groups

WHERE = "/hone"  # of the job's own code, inside
START = (
    "import sys; sys.path.insert(0, '/hone'); from hone.reward.sandbox_job import run_in_tool as r; r({}, sys.argv[1])"
)
JOIN = 'for g in $GROUPS_TO_JOIN; do echo 0 > "$g/cgroup.procs" || exit 71; done; unset GROUPS_TO_JOIN; exec "$@"'


def bubblewrap(root: Mapping[str, Any], disk: int, descriptor: int) -> list[str]:
    """Its command up to the program."""
    command = ["bwrap", "--unshare-all", "--die-with-parent", "--new-session", "--hostname", "sandbox", "--clearenv"]
    command += ["--cap-drop", "ALL", "--unshare-user", "--uid", str(INSIDE), "--gid", str(INSIDE)]
    for source, target in (*root["binds"], *_code()):
        command += ["--ro-bind", source, target]
    for name in root["files"]:
        command += ["--dev-bind" if name.startswith("/dev/") else "--ro-bind", name, name]
    for name, points in root["links"]:
        command += ["--symlink", points, name]
    for name, value in ENVIRONMENT.items():
        command += ["--setenv", name, value]
    # pid 1 of bubblewrap's own could be written to through /proc/1/mem
    command += ["--as-pid-1", "--dir", "/proc"]
    return [*command, "--size", str(disk), "--tmpfs", "/tmp", "--chdir", "/tmp", "--remount-ro", "/"]


def nsjail(root: Mapping[str, Any], disk: int, descriptor: int) -> list[str]:
    """Its command up to the program."""
    command = ["nsjail", "-Mo", "--quiet", "--iface_no_lo", "--hostname", "sandbox", "--pass_fd", str(descriptor)]
    command += ["--user", str(INSIDE), "--group", str(INSIDE), "--time_limit", "0", "--disable_rlimits"]
    for source, target in (*root["binds"], *_code(), *((name, name) for name in root["files"])):
        command += ["--bindmount_ro", f"{source}:{target}"]
    for name, points in root["links"]:
        command += ["--symlink", f"{points}:{name}"]
    for name, value in ENVIRONMENT.items():
        command += ["--env", f"{name}={value}"]
    return [*command, "--disable_proc", "--mount", f"none:/tmp:tmpfs:size={disk}", "--cwd", "/tmp", "--"]


def _code() -> list[tuple[str, str]]:
    return [(f"{HOME}/{name}", f"{WHERE}/{name}") for name in INSIDE_FILES]


TOOLS: dict[str, tuple[str, Callable[[Mapping[str, Any], int, int], list[str]]]] = {
    "bubblewrap": ("bwrap", bubblewrap),
    "nsjail": ("nsjail", nsjail),
}


class Tool:
    """A tool by name: as many programs at once as there are slots, each in namespaces of its own."""

    def __init__(self, name: str, wanted: Wanted) -> None:
        binary, self._command = TOOLS[name]
        if shutil.which(binary) is None:
            raise SandboxError(f"{binary} is not installed: install {name}, or use the backend native")
        self.name, self.wanted, self.home = name, wanted, cgroups.find()
        if self.home is None:
            raise SandboxError(f"{name} bounds memory by cgroups, and there are none here: use the backend native")
        self._conf = configuration(wanted, user=True, watched=False)
        self._free = Semaphore(wanted.slots)
        nothing = frame({"source": "", "stdin": None, "file": "", "build": [], "run": []})
        self.talk(nothing, Talk(output=1000, result=1000, most=1), seconds=GRACE)  # refused here, if it cannot be

    def talk(self, request: bytes, talk: Talk, *, seconds: float, ask: Ask | None = None) -> float:
        """One program in a fresh interpreter; the seconds it took."""
        limits = self.wanted.limits
        assert self.home is not None
        with self._free:
            folders = self.home.make(
                names(), memory=limits.memory, processes=limits.processes + OWN_PROCESSES, cores=limits.cores
            )
            try:
                return self._run(folders, request, talk, seconds=seconds, ask=ask)
            finally:
                if not remove_groups(folders, seconds=GRACE):
                    raise SandboxError(f"{self.name} left processes behind: use the backend native")

    def _run(self, folders: Sequence[str], request: bytes, talk: Talk, *, seconds: float, ask: Ask | None) -> float:
        inbox, out, err, result = (os.pipe() for _ in range(4))
        inner = [self.wanted.python, "-I", "-S", "-c", START.format(result[1]), json.dumps(self._conf["job"])]
        outer = self._command(self._conf["root"], self._conf["job"]["disk"], result[1])
        begun = time.monotonic()
        with subprocess.Popen(
            ["/bin/sh", "-c", JOIN, "sh", *outer, *inner],
            stdin=inbox[0],
            stdout=out[1],
            stderr=err[1],
            pass_fds=[result[1]],
            env={"PATH": os.environ.get("PATH", os.defpath), "GROUPS_TO_JOIN": " ".join(folders)},
            start_new_session=True,
        ) as process:
            for descriptor in (inbox[0], out[1], err[1], result[1]):
                os.close(descriptor)
            handle = os.pidfd_open(process.pid)
            job = (inbox[1], out[0], err[0], result[0], handle)
            try:
                await_lock(job)
            except SandboxError:
                process.kill()
                for descriptor in job:
                    os.close(descriptor)
                raise
            start, ended = time.monotonic(), cgroups.out_of_memory(folders)
            conversation = Conversation(job, handle, lambda: {"status": process.wait()}, talk=talk, ask=ask)
            conversation.hold(request, start + seconds)
        talk.limit = talk.limit or ("memory" if cgroups.out_of_memory(folders) > ended else "")
        return time.monotonic() - begun

    def close(self) -> None:
        """Nothing stays open between programs."""

    def report(self) -> list[Protection]:
        """What every program is held by."""
        assert self.home is not None
        return [
            Protection(name="rights, network, files, processes in sight", how=f"{self.name}; no /proc"),
            Protection(name="system calls", how="a list of allowed ones (seccomp)"),
            Protection(name="time, files, output", how="a clock outside, rlimits, bounded reads"),
            Protection(name="memory and processes", how=self.home.describe()),
        ]
