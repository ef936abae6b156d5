"""The sandbox's own processes: a server that forks slots, a slot that forks jobs, and a job that runs a program.

    server    fresh interpreter, no environment, the host's namespaces; ends every slot when its client is gone
    parent    joins the slot's cgroup, makes the namespaces, waits
    slot      pid 1 of its namespaces behind a read-only root; only forks, waits and tells; sees no program
    job       pid 1 of namespaces of its own, locked in before it reads the program; nothing trusted is in there

A program's text, input, output and results go between client and job through pipes that the slot only hands over, so
a slot's memory, from which the next job is forked, never held anything of an earlier job.
"""

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
from collections.abc import Mapping
from typing import Any, NoReturn

from hone.reward.sandbox import namespaces
from hone.reward.sandbox.job import prepare_interpreter, run_job

Conf = Mapping[str, Any]
LOOK_EVERY = 0.01  # seconds between two looks at a job whose memory no cgroup bounds
TICKS, PAGE = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")


def serve(descriptor: int) -> None:
    """The server: orders from the client until it is gone, then nothing is left."""
    client = socket.socket(fileno=descriptor)
    conf: Conf = json.loads(client.recv(1 << 17))
    for name in conf["preload"]:
        importlib.import_module(name)
    prepare_interpreter([*conf["path"], *conf["packages"]])
    gc.collect()
    gc.freeze()  # objects that a collection in a child would touch, and so copy
    parents: dict[int, tuple[int, list[str]]] = {}
    while True:
        text, found, _, _ = socket.recv_fds(client, 1 << 16, 1)
        if not text:
            break
        order = json.loads(text)
        if order["do"] == "open":
            parents[order["slot"]] = (_start(found[0], client, conf, order), order["cgroups"])
            os.close(found[0])
        elif order["slot"] in parents:
            _end(*parents.pop(order["slot"]))
            client.send(b"ended")
    for parent in parents.values():
        _end(*parent)


def _end(parent: int, cgroups: list[str]) -> None:
    """Kill a slot with all that is in it; its cgroups go once the last process has."""
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    namespaces.remove_groups(cgroups)


def _start(descriptor: int, client: socket.socket, conf: Conf, order: Conf) -> int:
    pid = os.fork()
    if pid:
        return pid
    client.close()
    control = socket.socket(fileno=descriptor)
    try:
        _keep(control, conf, order)
    except OSError as error:
        control.send(json.dumps({"failed": error.strerror or str(error)}).encode())
    finally:
        os._exit(1)


def _keep(control: socket.socket, conf: Conf, order: Conf) -> NoReturn:
    for folder in order["cgroups"]:
        with open(f"{folder}/cgroup.procs", "w") as file:
            file.write("0")
    uid, gid = os.geteuid(), os.getegid()
    privileged = uid == 0 and namespaces.exists(conf["uid"])
    namespaces.unshare(namespaces.APART | (0 if privileged else namespaces.NEWUSER))
    if not privileged:
        namespaces.map_user(uid, gid)
    namespaces.prctl(namespaces.PDEATHSIG, signal.SIGKILL)
    pid = os.fork()
    if not pid:
        _slot(control, conf, privileged=privileged)
    control.close()
    os.waitpid(pid, 0)
    os._exit(0)


def _slot(control: socket.socket, conf: Conf, *, privileged: bool) -> NoReturn:
    """Pid 1 of the slot: builds the root, gives up the machine's rights, then forks job after job."""
    try:
        socket.sethostname("sandbox")
        proc = namespaces.build_root(conf["root"])
        inside = dict(conf["job"], uid=None)
        if privileged and conf["user"]:
            namespaces.become(conf["uid"], conf["uid"])
            namespaces.unshare(namespaces.NEWUSER | namespaces.NEWNS)
            namespaces.map_user(conf["uid"], conf["uid"])
        elif privileged:
            inside["uid"] = conf["uid"]
        namespaces.forbid_new_rights()
        namespaces.prctl(namespaces.PDEATHSIG, signal.SIGKILL)
        while True:
            _one_job(control, conf, inside, proc=proc)
    except OSError as error:
        with contextlib.suppress(OSError):  # the client may be gone
            control.send(json.dumps({"failed": error.strerror or str(error)}).encode())
    finally:
        os._exit(1)


def _one_job(control: socket.socket, conf: Conf, inside: Conf, *, proc: bool) -> None:
    """Fork a job, hand its pipes to the client, wait for its end and tell how it was."""
    request, out, err, result = (os.pipe() for _ in range(4))
    ours = (request[0], out[1], err[1], result[1])  # 0 to 3 of the job
    theirs = (request[1], out[0], err[0], result[0])
    pid = namespaces.fork_into(namespaces.NEWPID | namespaces.NEWNS)
    if not pid:
        run_job(ours, inside)
    handle = os.pidfd_open(pid)
    socket.send_fds(control, [json.dumps({"ready": True, "proc": proc}).encode()], [*theirs, handle])
    for descriptor in (*ours, *theirs):
        os.close(descriptor)
    over = _watch(control, handle, conf["watch"])
    if over:
        os.kill(pid, signal.SIGKILL)
    os.close(handle)
    _, status, usage = os.wait4(pid, 0)
    told = {"status": os.waitstatus_to_exitcode(status), "cpu": usage.ru_utime + usage.ru_stime, "over": over}
    control.send(json.dumps({**told, "rss": usage.ru_maxrss << 10}).encode())


def _watch(control: socket.socket, handle: int, watch: Conf | None) -> str:
    """Until the job has ended. Without cgroups, what it uses is looked at meanwhile: the limit it is over, or ""."""
    ended = select.poll()
    ended.register(handle, select.POLLIN)
    started = select.poll()
    started.register(handle, select.POLLIN)
    started.register(control, select.POLLIN)
    if not any(descriptor == handle for descriptor, _ in started.poll()) and not control.recv(16):
        os._exit(0)  # the client is gone
    while not ended.poll(None if watch is None else LOOK_EVERY * 1000):
        over = _over(watch or {})
        if over:
            return over
    return ""


def _over(watch: Conf) -> str:
    """The limit that the slot's processes but the first are over together."""
    pids = [name for name in os.listdir("/proc") if name.isdigit() and name != "1"]
    if len(pids) > watch["processes"]:
        return "processes"
    resident, cpu = 0, 0
    for pid in pids:
        fields = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
        if fields:
            cpu += sum(map(int, fields[11:15]))
            resident += int(fields[21]) * PAGE
    if cpu > watch["cpu"] * TICKS:
        return "cpu"
    if resident > watch["memory"] and sum(map(_share, pids)) > watch["memory"]:
        return "memory"
    return ""


def _share(pid: str) -> int:
    """Bytes of a process, pages that it shares counted in part."""
    lines = _read(f"/proc/{pid}/smaps_rollup").splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))


def _read(path: str) -> str:
    try:
        with open(path) as file:
            return file.read()
    except OSError:
        return ""  # the process has just ended
