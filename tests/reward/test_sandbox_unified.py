"""cgroup v2 on a kernel of its own: Linux as a process (user-mode-linux), where this machine has it installed."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
KERNEL = shutil.which("linux.uml") or ""
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not KERNEL, reason="there is no linux.uml: install Debian's user-mode-linux"),
    pytest.mark.skipif(not os.access("/usr/bin/python3", os.X_OK), reason="no interpreter that other users may run"),
]
# its root is this machine's, read-only; what it prints goes to our pipe
INIT = """#!/bin/sh
export PATH=/usr/bin:/usr/sbin:/bin:/sbin TMPDIR=/run PYTHONDONTWRITEBYTECODE=1 PYTHONPATH={source}
mount -t proc proc /proc; mount -t sysfs sys /sys; mount -t tmpfs run /run
mount -t cgroup2 none /sys/fs/cgroup
cp {folder}/try.py /run; chmod 1777 /run; chmod 644 /run/try.py; cd /sys/fs/cgroup
{make}
echo o >/proc/sysrq-trigger
sleep 60
"""
TRY = """
import json, os, pathlib, time
from hone.reward import sandbox_cgroups as cgroups
from hone.reward.sandbox.sandbox import Call, SandboxLimits, Program, Sandbox
from hone.reward.sandbox.namespaces import remove_groups
home, said = cgroups.find(), {}
base = None if home is None else home.folders["memory"]
groups = lambda: [] if base is None else list(base.glob("hone-*"))
limits = SandboxLimits(memory=100 << 20, addresses=4 << 30, processes=8, cores=0.5, seconds=60)
with Sandbox(limits=limits, slots=1) as sandbox:
    said["files"] = {f: (g / f).read_text().strip() for g in groups()
                     for f in ("memory.max", "memory.swap.max", "pids.max", "cpu.max") if (g / f).exists()}
    said["replaced"] = [p.name for p in sandbox.report() if p.replaced]
    run = lambda source: sandbox.run(Program(source=source, stdin=""))
    said["greedy"] = run("x = []\\nwhile 1: x.append(bytearray(1 << 22))").limit
    said["forks"] = int(run("import os, time\\nn = 0\\ntry:\\n    while os.fork(): n += 1\\n    time.sleep(60)\\n"
                            "except OSError: print(n)").stdout)
    busy = "import os, time\\nt = time.time()\\nwhile time.time() - t < 3: pass\\nprint(sum(os.times()[:2]))"
    said["cpu"] = float(run(busy).stdout)
    said["value"] = sandbox.run(Program(source="def f(): return 42", calls=[Call("f")])).results[0].value
said["home"] = None if home is None else [home.version, str(base), sorted(home.folders)]
if home is not None:
    made = home.make(memory=64 << 20, processes=5, cores=1)
    if not (pid := os.fork()):
        pathlib.Path(made[0], "cgroup.procs").write_text("0")
        time.sleep(60)
    while not pathlib.Path(made[0], "cgroup.procs").read_text(): time.sleep(0.01)
    cgroups.end_all(made)
    said["ended"] = [os.waitpid(pid, 0)[1], remove_groups(made)]
said["left"] = list(map(str, groups()))
print("SAID", json.dumps(said))
"""
NOBODY = "setpriv --reuid 65534 --regid 65534 --clear-groups"
# the folder of a user's service manager, which may make others in it and switch controllers on
DELEGATED = """echo "+memory +pids +cpu" >cgroup.subtree_control; mkdir -p user/app/run
echo "+memory +pids +cpu" >user/cgroup.subtree_control
for f in app app/run; do chown 65534 user/$f user/$f/cgroup.procs user/$f/cgroup.subtree_control; done
sh -c "echo 0 >{place}/cgroup.procs; exec %s /usr/bin/python3 /run/try.py" """
LIMITS = {"memory.max": "104857600", "memory.swap.max": "0", "pids.max": "10", "cpu.max": "50000 100000"}


def said_on(folder: Path, make: str) -> dict:
    """What a sandbox says that is opened on such a kernel."""
    (folder / "try.py").write_text(TRY)
    (folder / "init").write_text(INIT.format(source=ROOT / "src", folder=folder, make=make))
    (folder / "init").chmod(0o755)
    root = ["root=/dev/root", "rootfstype=hostfs", "rootflags=/", "ro", f"init={folder}/init"]
    command = [KERNEL, "mem=1G", *root, "con=null", "con0=null,fd:1", "quiet"]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("SAID ")] or [done.stdout[-2000:]]
    return json.loads(line.removeprefix("SAID "))


@pytest.mark.parametrize(
    ("make", "base"),
    [("/usr/bin/python3 /run/try.py", ""), (DELEGATED.format(place="user/app/run") % NOBODY, "/user/app")],
    ids=["root", "a user in a delegated folder"],
)
def test_version_2_bounds_memory_processes_and_processor(tmp_path: Path, make: str, base: str):
    said = said_on(tmp_path, make)
    assert said["home"] == [2, f"/sys/fs/cgroup{base}", ["cpu", "memory", "pids"]]
    assert said["files"] == LIMITS
    assert said["replaced"] == []
    assert (said["greedy"], said["forks"]) == ("memory", 7)
    assert 1.0 < said["cpu"] < 2.4  # of 3 s, half a core
    assert said["value"] == 42
    assert said["ended"] == [9, True]
    assert said["left"] == []


def test_where_processes_live_in_the_folder_that_may_be_used_it_is_replaced_and_said(tmp_path: Path):
    said = said_on(tmp_path, DELEGATED.format(place="user/app") % NOBODY)
    assert said["home"] is None
    assert said["replaced"] == ["memory and processes", "CPU"]
    assert (said["greedy"], said["value"]) == ("memory", 42)
