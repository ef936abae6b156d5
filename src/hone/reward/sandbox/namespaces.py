"""Namespaces, a read-only root, an unprivileged user, limits and the filter of system calls.

Everything here runs in processes of the sandbox's own, never in the one that trains. It raises OSError with the
step that failed; nothing is skipped because it failed.
"""

import contextlib
import ctypes
import errno
import os
import platform
import resource
import signal
import struct
import time
from collections.abc import Mapping, Sequence
from typing import Any

NEWNS, NEWCGROUP, NEWUTS, NEWIPC = 0x20000, 0x02000000, 0x04000000, 0x08000000
NEWUSER, NEWPID, NEWNET = 0x10000000, 0x20000000, 0x40000000
APART = NEWNS | NEWCGROUP | NEWUTS | NEWIPC | NEWPID | NEWNET
RDONLY, NOSUID, NODEV, NOEXEC, BIND, REC, PRIVATE = 1, 2, 4, 8, 4096, 16384, 1 << 18
DETACH = 2
MOUNT_SETATTR, RECURSIVE = 442, 0x8000
CLONE = {"x86_64": 56, "aarch64": 220}
PDEATHSIG, SET_DUMPABLE, SET_SECCOMP, DROP_BOUND, SECUREBITS, NO_NEW_PRIVS, AMBIENT = 1, 4, 22, 24, 28, 38, 47
LOCKED_BITS = 0xEF  # root is nobody special, no capability survives a change of user, and none of it can be undone
INSIDE = 1000  # the program's user and group as it sees them

_libc = ctypes.CDLL(None, use_errno=True)
_held = ctypes.PyDLL(None, use_errno=True)  # keeps the interpreter's lock, as a fork must


def _call(name: str, *arguments: Any, what: str = "") -> int:
    result = getattr(_libc, name)(*arguments)
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name} {what}".strip() + f": {os.strerror(number)}")
    return result


def mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    """mount(2)."""
    encoded = [None if text is None else text.encode() for text in (source, target, kind)]
    _call("mount", *encoded, ctypes.c_ulong(flags), options.encode(), what=f"{kind or 'bind'} on {target}")


def unshare(flags: int) -> None:
    """unshare(2)."""
    _call("unshare", flags, what=hex(flags))


def prctl(option: int, *arguments: int) -> None:
    """prctl(2)."""
    padded = [ctypes.c_ulong(a) for a in (*arguments, 0, 0, 0, 0)[:4]]
    _call("prctl", option, *padded, what=str(option))


def fork_into(flags: int) -> int:
    """fork(2) into new namespaces: pid 1 of a new pid namespace is the child itself."""
    ctypes.pythonapi.PyOS_BeforeFork()
    zero = ctypes.c_long(0)
    number = CLONE[platform.machine()]
    pid = _held.syscall(ctypes.c_long(number), ctypes.c_long(flags | signal.SIGCHLD), zero, zero, zero, zero)
    if pid == 0:
        ctypes.pythonapi.PyOS_AfterFork_Child()
        return 0
    failed = ctypes.get_errno() if pid < 0 else 0
    ctypes.pythonapi.PyOS_AfterFork_Parent()
    if failed:
        raise OSError(failed, f"clone: {os.strerror(failed)}")
    return pid


def exists(uid: int) -> bool:
    """Whether there is such a user in this user namespace; in a container without root's help there may be only one."""
    with open("/proc/self/uid_map") as file:
        ranges = [list(map(int, line.split())) for line in file]
    return any(first <= uid < first + count for first, _, count in ranges)


def map_user(uid: int, gid: int) -> None:
    """In a new user namespace: this user alone exists, as INSIDE."""
    for name, text in (("setgroups", "deny"), ("uid_map", f"{INSIDE} {uid} 1"), ("gid_map", f"{INSIDE} {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def build_root(wanted: Mapping[str, Any]) -> bool:
    """A root of named folders, read-only, without set-user-id and devices; says whether /proc could be mounted."""
    os.umask(0o022)  # the trainer's own may be 077, and programs are another user
    mount("none", "/", None, REC | PRIVATE)
    mount("root", "/tmp", "tmpfs", NOSUID | NODEV, "size=1m,nr_inodes=1024,mode=755")
    os.mkdir("/tmp/old")
    _call("pivot_root", b"/tmp", b"/tmp/old")
    os.chdir("/")
    for folder in ("/tmp", "/proc", "/dev", "/etc"):
        os.mkdir(folder)
    for source, target in wanted["binds"]:
        _bind(source, target)
    for name, points in wanted["links"]:
        os.symlink(points, name)
    for name, text in wanted["texts"]:
        with open(name, "w") as file:
            file.write(text)
    for name in wanted["files"]:
        os.close(os.open(name, os.O_CREAT | os.O_WRONLY, 0o444))
        mount(f"/old{name}", name, None, BIND)
        _set_attributes(name, RDONLY | NOSUID | NOEXEC | (0 if name.startswith("/dev/") else NODEV))
    proc = _own_proc("")
    _call("umount2", b"/old", DETACH)
    os.rmdir("/old")
    _set_attributes("/", RDONLY | NOSUID | NODEV)
    return proc


def _bind(source: str, target: str) -> None:
    os.makedirs(target, exist_ok=True)
    mount(f"/old{source}", target, None, BIND | REC)
    _set_attributes(target, RDONLY | NOSUID | NODEV, RECURSIVE)


def _set_attributes(target: str, flags: int, how: int = 0) -> None:
    attributes = ctypes.create_string_buffer(struct.pack("=QQQQ", flags, 0, 0, 0), 32)
    numbers = (ctypes.c_long(MOUNT_SETATTR), ctypes.c_long(-100), target.encode(), ctypes.c_long(how))
    _call("syscall", *numbers, attributes, ctypes.c_size_t(32), what=f"mount_setattr {target}")


def _own_proc(options: str) -> bool:
    """/proc of this pid namespace; where the machine masks its own, the kernel refuses, and nothing is shown."""
    try:
        mount("proc", "/proc", "proc", NOSUID | NODEV | NOEXEC, options)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EINVAL):
            raise
        mount("none", "/proc", "tmpfs", RDONLY | NOSUID | NODEV | NOEXEC, "size=0")
        return False
    return True


def become(uid: int, gid: int) -> None:
    """Another user, with no other groups. Capabilities go too, unless the secure bits keep them."""
    os.setgroups([])
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)
    prctl(SET_DUMPABLE, 1)  # else /proc/self belongs to root, and the user map cannot be written


def forbid_new_rights() -> None:
    """Make sure that neither this process nor any that it starts can gain a capability again."""
    prctl(NO_NEW_PRIVS, 1)
    prctl(SECUREBITS, LOCKED_BITS)
    with contextlib.suppress(OSError):  # the first number past the last capability
        for capability in range(64):
            prctl(DROP_BOUND, capability)


def confine(wanted: Mapping[str, Any]) -> None:
    """Confine the job's first process, in its own mount and pid namespace: a new /tmp and /proc, limits, no rights."""
    if os.path.exists("/proc/self"):
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")  # when memory runs out it is the job that ends, not its slot
    mount("tmp", "/tmp", "tmpfs", NOSUID | NODEV, f"size={wanted['disk']},nr_inodes=4096,mode=1777")
    _own_proc("subset=pid,hidepid=2")
    os.chdir("/tmp")
    limit(wanted["rlimits"])
    if wanted["uid"] is not None:
        become(wanted["uid"], wanted["uid"])
    drop_rights()
    install(bytes.fromhex(wanted["filter"]))


def limit(rlimits: Mapping[str, int]) -> None:
    """setrlimit(2), soft and hard, and never above what this process may have itself."""
    for name, value in rlimits.items():
        kind = getattr(resource, name)
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))


def drop_rights() -> None:
    """capset(2): nothing effective, permitted or inheritable; and none ambient."""
    prctl(AMBIENT, 4)
    header = ctypes.create_string_buffer(struct.pack("=Ii", 0x20080522, 0), 8)
    _call("capset", header, ctypes.create_string_buffer(24))


def install(program: bytes) -> None:
    """seccomp's filter, for this process and all it starts."""
    steps = ctypes.create_string_buffer(program, len(program))
    head = ctypes.create_string_buffer(struct.pack("@HP", len(program) // 8, ctypes.addressof(steps)))
    prctl(SET_SECCOMP, 2, ctypes.addressof(head))


def remove_groups(folders: Sequence[str], *, seconds: float = 5.0) -> bool:
    """Remove cgroups whose processes are ending, with those inside them; whether all are gone."""
    until, left = time.monotonic() + seconds, list(folders)
    while left:
        for folder in with_inner_groups(left[-1]):
            with contextlib.suppress(OSError):  # busy until its last process is gone
                os.rmdir(folder)
        if not os.path.isdir(left[-1]):
            left.pop()
        elif time.monotonic() >= until:
            return False
        else:
            time.sleep(0.001)
    return True


def with_inner_groups(folder: str) -> list[str]:
    """A cgroup and those inside it, the innermost first: a program in it may have made its own."""
    return [path for path, _, _ in os.walk(folder, topdown=False)]
