"""A process that imports torch and pytest once, then forks a child for each run of tests on a patched source tree.

Jobs come as JSON lines on stdin, answers go as JSON lines to stdout. It must never import hone itself: each child does,
from the tree of its job.
"""

import contextlib
import json
import os
import select
import signal
import sys
import time
from collections.abc import Mapping
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import hypothesis
import jinja2
import numpy
import pytest
import rich.console
import safetensors.torch
import tokenizers
import torch.distributed.tensor
import torch.testing
import yaml

WARM = (hypothesis, jinja2, numpy, rich.console, safetensors.torch, tokenizers, yaml)  # imported for the children
TIMED_OUT, DIED = -1, -2  # instead of pytest's exit code
OPTIONS = (
    "-x", "-q", "--tb=line", "--no-header", "--no-summary", "--hypothesis-seed=0", "-m", "not slow and not gpu",
    *("-p", "no:cacheprovider", "-p", "no:logging", "-p", "no:junitxml", "-p", "no:faulthandler", "-p", "no:anyio"),
)  # fmt: skip


class Watch:
    """A pytest plugin: runs the tests that often go red first, and remembers the first that did."""

    def __init__(self, first: list[str]) -> None:
        self.place = {name: i for i, name in enumerate(first)}
        self.red, self.why, self.passed = "", "", 0

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items.sort(key=lambda item: self.place.get(item.nodeid, len(self.place)))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._note(report.nodeid, str(report.longrepr))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._note(report.nodeid, str(report.longrepr))
        self.passed += report.passed and report.when == "call"

    def _note(self, name: str, text: str) -> None:
        said = [line.removeprefix("E").strip() for line in text.splitlines() if line.startswith("E ")]
        self.red, self.why = self.red or name, self.why or (said or text.splitlines() or [""])[0][:200]


def run_tests(job: Mapping[str, Any]) -> dict[str, Any]:
    """In the child: pytest over the job's tests with its tree first on the path."""
    sys.path.insert(0, job["tree"])
    os.environ["PYTHONPATH"] = job["tree"]
    os.environ["HYPOTHESIS_STORAGE_DIRECTORY"] = job["scratch"]
    os.chdir(job["root"])
    torch.set_num_threads(1)
    watch = Watch(job["first"])
    code = pytest.main([*OPTIONS, f"--basetemp={job['scratch']}/tests", *job["tests"]], plugins=[watch])
    found = getattr(sys.modules.get("hone"), "__file__", None) or job["tree"]
    assert found.startswith(job["tree"]), f"the tests ran on {found}"
    return {"code": int(code), "by": watch.red, "why": watch.why, "passed": watch.passed}


def in_child(job: Mapping[str, Any], answer: int) -> None:
    """Never returns: the answer goes through the pipe, what the tests print goes nowhere."""
    status = 1
    try:
        os.setsid()
        nowhere = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(nowhere, stream)
        os.write(answer, json.dumps(run_tests(job)).encode())
        status = 0
    finally:
        os._exit(status)


def answer_to(job: Mapping[str, Any]) -> dict[str, Any]:
    """Forks, waits no longer than the job's limit, and ends the child with all it started."""
    start = time.monotonic()
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.close(read)
        in_child(job, write)
    os.close(write)
    try:
        said = _read(read, until=start + job["limit"])
    finally:
        os.close(read)
        _end(child)
    code = TIMED_OUT if time.monotonic() >= start + job["limit"] else DIED
    lost = {"code": code, "by": "", "why": "", "passed": 0}
    return {**(json.loads(said) if said else lost), "seconds": time.monotonic() - start}


def _end(child: int) -> None:
    """The child is not waited for yet, so that its number, and its group's, are nobody else's."""
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError):  # no group yet, or an ended one
            kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def _read(pipe: int, *, until: float) -> bytes:
    """All that comes before the pipe is closed or the time is up."""
    said = b""
    while (left := until - time.monotonic()) > 0 and select.select([pipe], [], [], left)[0]:
        part = os.read(pipe, 1 << 16)
        if not part:
            break
        said += part
    return said


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(answer_to(json.loads(line))), flush=True)
