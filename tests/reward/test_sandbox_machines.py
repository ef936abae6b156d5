"""Machines that lack something, made for real out of namespaces: each is found out, then replaced, told or refused."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from other_user import python_of_nobody

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.usefixtures("needs_sandbox"),
    pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("unshare"), reason="it takes root to make such machines"),
]
OPEN = """
import json
from hone.errors import HoneError
from hone.reward.sandbox.sandbox import Call, Program, Sandbox
try:
    with Sandbox(slots=1, backend="native") as sandbox:
        done = sandbox.run(Program(source="def f(): return 41 + 1", calls=[Call("f")]))
        proc = sandbox.run(Program(source="import os\\nprint(len(os.listdir('/proc')))")).stdout
        report = {p.name: ("replaced: " if p.replaced else "") + p.how for p in sandbox.report()}
        print(json.dumps({"value": done.results[0].value, "proc": int(proc), **report}))
except HoneError as error:
    print(json.dumps({"refused": str(error)}))
"""
MASKED = "mount -t tmpfs none /proc/sys"
NOBODY = "exec setpriv --reuid 65534 --regid 65534 --clear-groups"
NO_MORE = 'echo 0 >/proc/sys/user/max_user_namespaces; exec "$@"'
# what makes the machine, how the program is started there
MACHINES = {
    "no cgroups": ("mount -t tmpfs none /sys/fs/cgroup", "exec"),
    "one user": ("true", "exec unshare -Ur"),
    "one user, no more user namespaces": ("true", f"exec unshare -Ur sh -c '{NO_MORE}' -"),
    "one user, /proc masked": (MASKED, "exec unshare -Ur"),
    "no root, /proc masked": (MASKED, NOBODY),
}


def opened_on(name):
    """What a sandbox says that is opened on such a machine."""
    make, start = MACHINES[name]
    python = python_of_nobody("/usr/bin/python3") if start == NOBODY else sys.executable
    command = ["unshare", "-m", "sh", "-c", f'set -e; {make}; {start} "$@"', "sh", python, "-c", OPEN]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}/src"}
    done = subprocess.run(command, capture_output=True, text=True, cwd="/", env=environment)
    assert done.returncode == 0, done.stderr[-1000:]
    return json.loads(done.stdout)


def test_without_cgroups_memory_and_processor_are_held_otherwise_and_that_is_said():
    found = opened_on("no cgroups")
    assert found["value"] == 42
    assert found["memory and processes"].startswith("replaced: rlimits, and a watch")
    assert found["CPU"].startswith("replaced: seconds of CPU")


def test_a_container_of_one_user_holds_programs_as_a_whole_machine_does():
    found = opened_on("one user")
    assert found["value"] == 42
    assert found["rights"].startswith("a user namespace without rights")
    assert found["proc"] > 0


def test_without_user_namespaces_and_other_users_it_is_refused():
    found = opened_on("one user, no more user namespaces")
    assert "unshare" in found["refused"]
    assert "No space left on device" in found["refused"]
    assert "allow user namespaces (sysctl user.max_user_namespaces" in found["refused"]


def test_where_proc_is_masked_programs_have_none_and_that_is_said():
    found = opened_on("one user, /proc masked")
    if "refused" not in found:  # cgroups can be written here
        assert (found["value"], found["proc"]) == (42, 0)
        assert "no /proc, for the machine masks its own" in found["processes in sight"]
    else:
        assert "no cgroups and no /proc" in found["refused"]


def test_without_cgroups_and_proc_it_is_refused():
    found = opened_on("no root, /proc masked")
    assert "there are no cgroups and no /proc, so memory cannot be bounded" in found["refused"]
