"""Other people's walls: bubblewrap, nsjail and gVisor, where they are installed. Each program starts an interpreter.

The tool makes the root and the namespaces, gVisor a kernel of its own; limits, the filter of system calls and cgroups
are the same as Hone's own. Records come out through a named pipe, the one thing of the machine that can be written to.
"""

import contextlib
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from threading import Semaphore
from typing import Any

from hone.reward.sandbox import cgroups as cgroups
from hone.reward.sandbox.job import ENVIRONMENT
from hone.reward.sandbox.limits import INSIDE_FILES, OWN_PROCESSES, Protection, Wanted, configuration
from hone.reward.sandbox.slots import HOME
from hone.reward.sandbox.talk import GRACE, Ask, Conversation, SandboxError, Talk, await_lock, frame
from hone.reward.sandbox.wall import INSIDE, remove_groups

WHERE = "/hone"  # of the job's own code, inside
START = (
    "import os, sys; sys.path.insert(0, '/hone'); from hone.reward.sandbox.job import run_in_tool as run; "
    "run(os.open('/hone/result', os.O_WRONLY), sys.argv[1])"
)
JOIN = 'for g in $GROUPS_TO_JOIN; do echo 0 > "$g/cgroup.procs" || exit 71; done; unset GROUPS_TO_JOIN; exec "$@"'
THREADS = {"gvisor": 256}  # of the tool's own, in the same cgroup

Conf = Mapping[str, Any]


def bubblewrap(folder: str, conf: Conf, inner: Sequence[str]) -> list[str]:
    """Its command."""
    command = ["bwrap", "--unshare-all", "--die-with-parent", "--new-session", "--hostname", "sandbox", "--clearenv"]
    command += ["--cap-drop", "ALL", "--unshare-user", "--uid", str(INSIDE), "--gid", str(INSIDE)]
    for source, target in _read_only(conf):
        command += ["--ro-bind", source, target]
    for name in conf["root"]["files"]:
        command += ["--dev-bind" if name.startswith("/dev/") else "--ro-bind", name, name]
    for name, points in conf["root"]["links"]:
        command += ["--symlink", points, name]
    for name, value in ENVIRONMENT.items():
        command += ["--setenv", name, value]
    # pid 1 of bubblewrap's own could be written to through /proc/1/mem
    command += ["--as-pid-1", "--dir", "/proc", "--bind", f"{folder}/result", f"{WHERE}/result"]
    return [*command, "--size", _disk(conf), "--tmpfs", "/tmp", "--chdir", "/tmp", "--remount-ro", "/", *inner]


def nsjail(folder: str, conf: Conf, inner: Sequence[str]) -> list[str]:
    """Its command."""
    command = ["nsjail", "-Mo", "--quiet", "--iface_no_lo", "--hostname", "sandbox"]
    command += ["--user", str(INSIDE), "--group", str(INSIDE), "--time_limit", "0", "--disable_rlimits"]
    for source, target in (*_read_only(conf), *((name, name) for name in conf["root"]["files"])):
        command += ["--bindmount_ro", f"{source}:{target}"]
    for name, points in conf["root"]["links"]:
        command += ["--symlink", f"{points}:{name}"]
    for name, value in ENVIRONMENT.items():
        command += ["--env", f"{name}={value}"]
    command += ["--disable_proc", "--bindmount", f"{folder}/result:{WHERE}/result"]
    return [*command, "--mount", f"none:/tmp:tmpfs:size={_disk(conf)}", "--cwd", "/tmp", "--", *inner]


def gvisor(folder: str, conf: Conf, inner: Sequence[str]) -> list[str]:
    """Its command; what is to be run stands in a bundle (the OCI's config.json), which is written here."""
    mounts = [_mount(source, target, "ro", "rbind") for source, target in _read_only(conf)]
    mounts.append(_mount(f"{folder}/result", f"{WHERE}/result", "rw", "bind"))
    for name in ("/tmp", "/dev/shm"):
        options = [f"size={_disk(conf)}", "mode=1777", "nosuid", "nodev"]
        mounts.append({"type": "tmpfs", "source": "tmpfs", "destination": name, "options": options})
    limits = [{"type": name, "hard": value, "soft": value} for name, value in conf["job"]["rlimits"].items()]
    process = {
        "user": {"uid": INSIDE, "gid": INSIDE},
        "args": list(inner),
        "env": [f"{name}={value}" for name, value in ENVIRONMENT.items()],
        "cwd": "/tmp",
        "capabilities": {},
        "noNewPrivileges": True,
        "rlimits": limits,
    }
    spaces = [{"type": kind} for kind in ("pid", "network", "ipc", "uts", "mount")]
    bundle = {
        "ociVersion": "1.0.0",
        "process": process,
        "root": {"path": "root", "readonly": True},
        "hostname": "sandbox",
        "mounts": mounts,
        "linux": {"namespaces": spaces},
    }
    root = Path(folder, "root")
    for name, points in conf["root"]["links"]:
        if not name.startswith("/dev/"):  # gVisor has devices of its own
            _below(root, name).symlink_to(points)
    for name, text in conf["root"]["texts"]:
        _below(root, name).write_text(text)
    Path(folder, "config.json").write_text(json.dumps(bundle))
    rootless = [] if os.geteuid() == 0 else ["--rootless"]
    command = ["runsc", "--root", f"{folder}/state", "--network", "none", "--ignore-cgroups", "--host-fifo", "open"]
    return [*command, *rootless, "run", "--bundle", folder, os.path.basename(folder)]


def _mount(source: str, target: str, *options: str) -> dict[str, Any]:
    return {"type": "bind", "source": source, "destination": target, "options": [*options, "nosuid", "nodev"]}


def _below(root: Path, name: str) -> Path:
    path = root / name.lstrip("/")
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def _read_only(conf: Conf) -> list[tuple[str, str]]:
    """What is seen inside: where it is, where it appears."""
    return [*conf["root"]["binds"], *((f"{HOME}/{name}", f"{WHERE}/{name}") for name in INSIDE_FILES)]


def _disk(conf: Conf) -> str:
    return str(conf["job"]["disk"])


Command = Callable[[str, Conf, Sequence[str]], list[str]]
TOOLS: dict[str, tuple[str, Command]] = {
    "bubblewrap": ("bwrap", bubblewrap),
    "nsjail": ("nsjail", nsjail),
    "gvisor": ("runsc", gvisor),
}


class Tool:
    """A tool by name: as many programs at once as there are slots, each in namespaces of its own."""

    def __init__(self, name: str, wanted: Wanted) -> None:
        binary, self._command = TOOLS[name]
        if shutil.which(binary) is None:
            raise SandboxError(f"{binary} is not installed: install {name}, or use the backend native")
        home = cgroups.find()
        if home is None:
            raise SandboxError(f"{name} bounds memory by cgroups, and there are none here: use the backend native")
        self.name, self.wanted, self.home = name, wanted, home
        self._conf = configuration(wanted, user=True, watched=False)
        self._free = Semaphore(wanted.slots)
        nothing = frame({"source": "", "stdin": None, "file": "", "build": [], "run": []})
        self.talk(nothing, Talk(output=1000, result=1000, most=1), seconds=GRACE)  # refused here, if it cannot be

    def talk(self, request: bytes, talk: Talk, *, seconds: float, ask: Ask | None = None) -> float:
        """One program in a fresh interpreter; the seconds it took."""
        begun = time.monotonic()
        with self._free, self._group() as groups, tempfile.TemporaryDirectory(prefix="hone-sandbox-") as folder:
            os.mkfifo(f"{folder}/result")
            os.chmod(f"{folder}/result", 0o622)  # whoever the program is outside
            inner = [self.wanted.python, "-I", "-S", "-c", START, json.dumps(self._conf["job"])]
            outer = self._command(folder, self._conf, inner)
            result = os.open(f"{folder}/result", os.O_RDONLY | os.O_NONBLOCK)
            with self._started(outer, groups, result) as (process, job):
                start, ended = time.monotonic(), cgroups.out_of_memory(groups)
                conversation = Conversation(job, job[-1], lambda: {"status": process.wait()}, talk=talk, ask=ask)
                conversation.hold(request, start + seconds)
            talk.limit = talk.limit or ("memory" if cgroups.out_of_memory(groups) > ended else "")
        return time.monotonic() - begun

    @contextlib.contextmanager
    def _group(self) -> Iterator[list[str]]:
        """A cgroup; when it is left, nothing in it runs any more."""
        limits, own = self.wanted.limits, OWN_PROCESSES + THREADS.get(self.name, 0)
        groups = self.home.make(memory=limits.memory, processes=limits.processes + own, cores=limits.cores)
        try:
            yield groups
        finally:
            cgroups.end_all(groups)
            if not remove_groups(groups, seconds=GRACE):
                raise SandboxError(f"{self.name} left processes behind: use the backend native")

    @contextlib.contextmanager
    def _started(
        self, command: Sequence[str], groups: Sequence[str], result: int
    ) -> Iterator[tuple[subprocess.Popen[bytes], list[int]]]:
        """The tool, and the client's ends of its job, once that is locked in."""
        inbox, out, err = (os.pipe() for _ in range(3))
        with subprocess.Popen(
            ["/bin/sh", "-c", JOIN, "sh", *command],
            stdin=inbox[0],
            stdout=out[1],
            stderr=err[1],
            env={"PATH": os.environ.get("PATH", os.defpath), "GROUPS_TO_JOIN": " ".join(groups)},
            start_new_session=True,
        ) as process:
            for descriptor in (inbox[0], out[1], err[1]):
                os.close(descriptor)
            job = [inbox[1], out[0], err[0], result, os.pidfd_open(process.pid)]
            try:
                await_lock(job)
            except SandboxError:
                process.kill()
                for descriptor in job:
                    os.close(descriptor)
                raise
            yield process, job

    def close(self) -> None:
        """Nothing stays open between programs."""

    def report(self) -> list[Protection]:
        """What every program is held by."""
        how = f"{self.name}; no /proc" if self.name != "gvisor" else "gVisor's own kernel, which has no network"
        return [
            Protection(name="rights, network, files, processes in sight", how=how),
            Protection(name="system calls", how="a list of allowed ones (seccomp)"),
            Protection(name="time, files, output", how="a clock outside, rlimits, bounded reads"),
            *cgroups.held_by(self.home, self.wanted.limits),
        ]
