"""The sandbox's parts by themselves: the filter on both machines, cgroups of both versions, values, the doctor."""

import errno
import json
import os
import shutil
import struct
import subprocess
import sys
import time
from functools import cache
from pathlib import Path

import pytest
from each import each
from hypothesis import given
from hypothesis import strategies as st
from patience import patience

from hone.cli import main
from hone.errors import HoneError
from hone.reward.sandbox.cgroups import find, out_of_memory, sweep
from hone.reward.sandbox.limits import library_of, root_of
from hone.reward.sandbox.protocol import JobOutput, SandboxError, frame
from hone.reward.sandbox.seccomp import ARCHITECTURES, assemble, numbers
from hone.reward.sandbox.values import Opaque, TooLarge, dumps, loads

ROOT = Path(__file__).parents[2]
ALLOWED = "allowed"


@cache
def steps_of(machine):
    return list(struct.iter_unpack("=HBBI", assemble(machine)))


def verdict(machine, number, *arguments, arch=None):
    """What the filter says of a call: the BPF that it uses, interpreted step by step."""
    arch = ARCHITECTURES[machine][1] if arch is None else arch
    data = struct.pack("=IIQ6Q", number, arch, 0, *(*arguments, 0, 0, 0, 0, 0, 0)[:6])
    steps = steps_of(machine)
    position, word = 0, 0
    while True:
        code, yes, no, k = steps[position]
        position += 1
        if code == 0x20:
            (word,) = struct.unpack_from("=I", data, k)
        elif code == 0x06:
            return {0x7FFF0000: ALLOWED, 0x80000000: "killed"}.get(k, k & 0xFFFF)
        else:
            holds = {0x15: word == k, 0x35: word >= k, 0x45: bool(word & k)}[code]
            position += yes if holds else no


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_the_filter_allows_what_is_listed_and_nothing_else(machine):
    known = numbers(machine)
    judged = {"socket", "socketpair", "prctl", "ioctl", "clone3", "setsockopt"}
    at_once = {"fsync", "fdatasync", "msync", "sync_file_range", "fadvise64"}
    for name, number in known.items():
        if name not in judged:
            assert verdict(machine, number) == (0 if name in at_once else ALLOWED), name
    assert not {"flock", "mincore", "preadv2", "memfd_create", "ptrace", "bpf", "io_uring_setup"} & known.keys()
    for number in range(600):
        if number not in known.values():
            assert verdict(machine, number) == errno.ENOSYS, number


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_the_filter_judges_by_arguments(machine):
    call = numbers(machine)
    assert verdict(machine, call["socket"], 1) == ALLOWED
    for family in (0, 2, 10, 16, 17, 38, 40):  # 40: VSOCK
        assert verdict(machine, call["socket"], family) == errno.EAFNOSUPPORT
        assert verdict(machine, call["socketpair"], family) == errno.EAFNOSUPPORT
    assert verdict(machine, call["clone"], 17) == ALLOWED
    assert verdict(machine, call["clone"], 0x3D0F00) == ALLOWED  # a thread
    for bit in (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000):
        assert verdict(machine, call["clone"], bit | 17) == errno.EPERM
    assert verdict(machine, call["clone3"]) == errno.ENOSYS
    assert verdict(machine, call["ioctl"], 0, 0x5412) == errno.ENOTTY  # TIOCSTI
    assert verdict(machine, call["ioctl"], 0, 0x5401) == ALLOWED
    assert verdict(machine, call["prctl"], 15) == ALLOWED
    assert verdict(machine, call["prctl"], 1) == errno.EPERM
    for command in (5, 8, 10, 15, 36, 1024, 1026, 1031, 1033, 1036):  # who locks, signals, leases, notices, sizes
        assert verdict(machine, call["fcntl"], 0, command) == errno.EPERM
    for command in (1, 2, 3, 4, 6, 7, 1030):
        assert verdict(machine, call["fcntl"], 0, command) == ALLOWED
    for option in (26, 50, 51, 52):  # SO_ATTACH_*
        assert verdict(machine, call["setsockopt"], 0, 1, option) == errno.ENOPROTOOPT
    assert verdict(machine, call["setsockopt"], 0, 1, 20) == ALLOWED
    assert verdict(machine, call["mmap"], 0, 4096, 3, 0x22) == ALLOWED
    for size in (0, 21 << 26, 30 << 26):  # huge pages
        assert verdict(machine, call["mmap"], 0, 1 << 21, 3, 0x40022 | size) == errno.ENOMEM
    assert verdict(machine, call["madvise"], 0, 4096, 4) == ALLOWED
    for advice in (12, 21, 100, 101):
        assert verdict(machine, call["madvise"], 0, 4096, advice) == errno.EINVAL


def test_other_kinds_of_calls_end_the_process():
    assert verdict("x86_64", 20, arch=0x40000003) == "killed"  # 32-bit
    assert verdict("x86_64", 0x40000000 + 39) == "killed"  # x32
    assert verdict("aarch64", 20, arch=0x40000028) == "killed"
    with pytest.raises(HoneError, match="no list of system calls for riscv64"):
        assemble("riscv64")


numeric = st.integers() | st.floats(allow_nan=False) | st.complex_numbers(allow_nan=False)
keys = st.text() | st.integers()


def containers(inner):
    return st.lists(inner, max_size=4) | st.tuples(inner, inner) | st.dictionaries(keys, inner, max_size=3)


plain = st.recursive(st.none() | st.booleans() | numeric | st.text() | st.binary(), containers, max_leaves=12)


@given(plain)
def test_values_cross_the_wall_unchanged(value):
    again = loads(dumps(value, limit=1 << 20))
    assert again == value
    assert type(again) is type(value)


def test_what_is_no_data_equals_nothing():
    class Sly(int):
        def __eq__(self, other):
            return True

        __hash__ = int.__hash__

    assert loads(dumps([Sly(7), {1}, frozenset([2])], limit=1000)) == [7, {1}, frozenset([2])]
    assert type(loads(dumps(Sly(7), limit=100))) is int
    opaque = loads(dumps(object(), limit=100))
    assert isinstance(opaque, Opaque)
    assert opaque != loads(dumps(object(), limit=100))
    assert repr(loads(dumps(len, limit=100))) == "<builtin_function_or_method>"


def test_values_are_bounded_before_they_are_written():
    start = time.perf_counter()
    for value in ("x" * 2000, b"x" * 2000, 1 << 20000, [0] * 10**6, {i: i for i in range(300000)}, list("x" * 900)):
        with pytest.raises(TooLarge):
            dumps(value, limit=1000)
    assert time.perf_counter() - start < patience(2)


RUBBISH = [
    *(
        b"",
        b"\xff",
        b"NaN",
        b"Infinity",
        b"{}",
        b"[1,]",
        b'"\\ud800',
        b"1" * 10000,
        b"[" * 100000,
        b"[" * 99 + b"]" * 99,
    ),
    *(b'{"int": 3}', b'{"int": "zz"}', b'{"x": 1}', b'{"tuple": 1}', b'{"tuple": {}}', b'{"int": "1", "float": "2"}'),
    *(b'{"dict": [[1]]}', b'{"dict": [[[], 1]]}', b'{"set": [[]]}', b'{"float": "x"}', b'{"float": "0x1p99999"}'),
    *(b'{"complex": ["x"]}', b'{"bytes": "0"}'),
    b'{"set": [' + b", ".join(b'{"int": "%x"}' % (k * (2**61 - 1)) for k in range(200)) + b"]}",
]


@each("text", RUBBISH)
def test_what_was_not_written_by_the_driver_is_refused(text):
    with pytest.raises(ValueError):
        loads(text)


def test_records_are_bounded_and_rubbish_ends_the_reading():
    job_output = JobOutput(output=10, result=100, most=2)
    assert job_output.data(frame({"a": 1})[:3]) is False
    assert job_output.data(frame({"a": 1})[3:] + frame({"b": 2})) is True
    assert job_output.records == [{"a": 1}, {"b": 2}]
    job_output.data(frame({"c": 3}))
    assert job_output.limit == "result"
    for rubbish in (b"\xff\xff\xff\xff", frame([1]), frame(None), b"\0\0\0\x02no"):
        job_output = JobOutput(output=10, result=100, most=2)
        job_output.data(rubbish)
        assert (job_output.limit, job_output.records) == ("result", [])
    job_output.text(job_output.stdout, b"x" * 50)
    assert job_output.stdout == b"x" * 10


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def unified(root, *, enabled, path="/user.slice/app.slice/run.scope"):
    """A machine with cgroup v2, as files."""
    write(root / "proc/self/cgroup", f"0::{path}\n")
    write(root / "proc/self/mountinfo", "30 25 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n")
    top = root / "sys/fs/cgroup"
    for folder in (top, *(top / part for part in ("user.slice", "user.slice/app.slice", path[1:]))):
        write(folder / "cgroup.procs", "")
        write(folder / "cgroup.controllers", "cpu memory pids")
        write(folder / "cgroup.subtree_control", "")
    write(top / "user.slice/app.slice/cgroup.subtree_control", enabled)
    return top


def test_version_2_uses_the_nearest_ancestor_whose_children_have_the_controllers(tmp_path):
    top = unified(tmp_path, enabled="cpu memory pids")
    run = top / "user.slice/app.slice/run.scope"
    run.joinpath("cgroup.controllers").write_text("")  # a leaf has none to give
    home = find(tmp_path)
    assert home is not None
    assert (home.version, set(home.folders)) == (2, {"cpu", "memory", "pids"})
    assert set(home.folders.values()) == {top / "user.slice/app.slice"}
    (folder,) = home.make(memory=1 << 28, processes=12, cores=0.5)
    files = {name: Path(folder, name).read_text() for name in ("memory.max", "pids.max", "cpu.max")}
    assert files == {"memory.max": str(1 << 28), "pids.max": "12", "cpu.max": "50000 100000"}
    assert home.describe() == "cgroup v2: cpu, memory, pids"


def test_version_2_without_the_cpu_controller_is_enough_and_without_memory_is_not(tmp_path):
    top = unified(tmp_path, enabled="memory pids")
    for file in top.rglob("cgroup.controllers"):
        file.write_text("memory pids" if file.parent.name == "app.slice" else "")
    home = find(tmp_path)
    assert home is not None
    assert set(home.folders) == {"memory", "pids"}
    for file in top.rglob("cgroup.controllers"):
        file.write_text("pids")
    assert find(tmp_path) is None


def test_version_1_needs_a_folder_for_each_controller(tmp_path):
    write(tmp_path / "proc/self/cgroup", "3:memory:/job\n2:cpu,cpuacct:/\n1:pids:/\n0::/\n")
    lines = [
        f"3{i} 25 0:{i} / /cg/{name} rw - cgroup cgroup rw,{options}"
        for i, (name, options) in enumerate((("memory", "memory"), ("cpu", "cpu,cpuacct"), ("pids", "pids")))
    ]
    write(tmp_path / "proc/self/mountinfo", "\n".join(lines))
    for folder in ("memory/job", "cpu", "pids"):
        write(tmp_path / "cg" / folder / "cgroup.procs", "")
    home = find(tmp_path)
    assert home is not None
    assert home.folders["memory"] == tmp_path / "cg/memory/job"
    made = home.make(memory=1 << 26, processes=5, cores=2)
    assert {Path(f, "memory.limit_in_bytes").read_text() for f in made if "memory" in f} == {str(1 << 26)}
    for folder in made:
        shutil.rmtree(folder)
    (tmp_path / "cg/pids").rename(tmp_path / "cg/gone")
    with pytest.raises(SandboxError, match=r"a cgroup cannot be made .*see that this user may write"):
        home.make(memory=1 << 26, processes=5, cores=2)
    assert not list(tmp_path.rglob("hone-sandbox-*"))
    assert find(tmp_path) is None


def test_groups_of_a_client_that_is_gone_are_swept_and_no_others(tmp_path):
    top = unified(tmp_path, enabled="cpu memory pids")
    home = find(tmp_path)
    assert home is not None
    base = top / "user.slice/app.slice/run.scope"
    assert set(home.folders.values()) == {base}
    gone, fresh, ours = (base / f"hone-sandbox-{pid}-1" for pid in (2**22 + 1, 2**22 + 2, os.getpid()))
    for folder in (gone, fresh, ours):
        folder.mkdir()
    for folder in (gone, ours):
        os.utime(folder, (1, 1))
    base.joinpath(f"hone-sandbox-{2**22 + 3}-1").symlink_to("removed")  # what is gone when it is looked at
    sweep(home)
    assert [folder.exists() for folder in (gone, fresh, ours)] == [False, True, True]


def test_a_machine_without_cgroups_has_none(tmp_path):
    assert find(tmp_path) is None


def test_ends_for_want_of_memory_are_read_from_either_version(tmp_path):
    write(tmp_path / "a/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n")
    write(tmp_path / "b/memory.events", "low 0\nmax 5\noom 2\noom_kill 4\noom_group_kill 9\n")
    found = [out_of_memory([str(tmp_path / name)]) for name in ("a", "b", "c")]
    assert found == [3, 4, 0]


def test_the_root_shows_interpreters_and_nothing_of_the_user():
    root = root_of(sys.executable, [])
    shown = [target for _, target in root["binds"]]
    assert not [p for p in shown if p in ("/", "/etc", "/var", "/tmp", "/proc", "/sys", "/dev", str(Path.home()))]
    assert not any(str(ROOT).startswith(p + "/") for p in shown)
    with pytest.raises(HoneError, match="no standard library beside"):
        library_of("/bin/no/python")


LOCKED = """
import sys
from hone.errors import HoneError
from hone.reward.sandbox import namespaces
from hone.reward.sandbox.sandbox import Sandbox
from hone.reward.sandbox.seccomp import assemble
namespaces.prctl(namespaces.NO_NEW_PRIVS, 1)
namespaces.install(assemble())
try:
    Sandbox()
except HoneError as error:
    print(error)
"""


def test_a_machine_without_namespaces_is_refused_with_the_remedy():
    done = subprocess.run([sys.executable, "-c", LOCKED], capture_output=True, text=True, cwd=ROOT)
    assert "did not start: unshare" in done.stdout, done.stderr
    assert "Function not implemented" in done.stdout
    assert "allow user namespaces" in done.stdout
    assert done.stdout.count("\n") == 1


@pytest.mark.usefixtures("needs_sandbox")
def test_the_doctor_says_what_holds_and_tries_it(capsys):
    assert main(["sandbox", "doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["holds"]
    assert "HONE_DOCTOR_SECRET" not in os.environ
    assert all(t["outside"] for t in found["tried"])
    assert not any(t["inside"] for t in found["tried"])
    assert {"rights", "network", "files", "system calls"} <= {p["name"] for p in found["protections"]}
    assert main(["sandbox", "doctor"]) == 0
    out = capsys.readouterr().out
    assert "a file of yours: not reached, reached without the sandbox" in out
    assert main(["sandbox", "doctor", "--backend", "docker"]) == 2
    assert "no sandbox backend 'docker'" in capsys.readouterr().err
