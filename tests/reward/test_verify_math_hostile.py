"""Answers that would hang, exhaust or mislead the verifier: each ends soon and none is accepted."""

import os
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from hone.reward.verify import math_workers
from hone.reward.verify.math import math_reward
from hone.reward.verify.math_guard import Refused, admitted
from hone.reward.verify.math_workers import Failed, Workers
from hone.types import Task

HANGING = [
    *("9^{9^{9^{9}}}", "9^9^9^9", "((9^9)^9)^9^9", "2^{30^{5}}", "x^{9^{9^9}}", "10^{10^{10}}", "2^{100000000}"),
    *("(((2^{999})^{999})^{999})^{999}", "2^{99*99*99*99}", "(1+2^{9999})^{9999}", "2^{3!!}", r"2^{\binom{99}{9}}"),
    *("100000!!", "99999!", "(10^9)!", "((3!)!)!", "1!+2!+3!+4!+5!", "2^9!", r"\binom{10^{9}}{5\cdot 10^{8}}"),
    *(r"\binom{100000000}{50000000}", r"\prod_{k=1}^{10^{8}} k", r"\sum_{k=1}^{10^{9}} \frac{1}{k}"),
    *(r"\int_0^1 x^{x^x} dx", r"\lim_{x\to0} \frac{\sin x}{x}", r"\begin{pmatrix}1&1\\1&0\end{pmatrix}^{10^{9}}"),
    *(r"\sqrt{" * 200 + "2" + "}" * 200, "(" * 200 + "5" + ")" * 200, "{" * 100 + "5" + "}" * 100, "-" * 900 + "5"),
    *("(" + "+".join(f"x_{{{i}}}" for i in range(80)) + ")^{40}", "5" + "+0" * 400, "1" * 200_000, "0." + "3" * 150),
    *(
        "5" + "!" * 100,
        r"\frac{1}{" * 40 + "5" + "}" * 40,
        "x" * 900,
        r"\sin " * 90 + "x",
        "5," * 400,
        r"\pm" * 90 + "5",
    ),
    *("$" * 20_000, "$$5" * 300, "5" + "^2" * 200, "|" * 200 + "5", r"\left(" * 90, "[" * 300 + "]" * 300),
]
STRANGE = [
    "",
    " ",
    "\udcff5",
    "\x00",
    "5\x00",
    "\ufffd",
    "\u202e5",
    "\uff15",
    "\u096b",
    "\U0001d7d3",
    "5\u200b6",
    "\\",
    "\\\\",
    "\\boxed{",
    "%",
]


def reward(answer: str, gold: str = "5"):
    return math_reward(f"The answer is $\\boxed{{{answer}}}$.", Task(prompt="q", answer=gold))


@pytest.mark.parametrize("answer", HANGING, ids=range(len(HANGING)))
def test_an_answer_that_would_hang_ends_at_once_and_is_not_accepted(answer):
    start = time.perf_counter()
    assert reward(answer).value != 1.0
    assert reward(answer, "x+1").value != 1.0
    assert math_reward(answer, Task(prompt="q", answer="5")).value != 1.0
    assert time.perf_counter() - start < 1.0


@pytest.mark.parametrize("answer", STRANGE)
def test_text_that_is_no_mathematics_gives_a_verdict(answer):
    assert reward(answer).value == 0.0
    assert reward(answer, "x+1").value == 0.0
    assert math_reward(answer, Task(prompt="q", answer="5")).value == 0.0


def test_an_enormous_completion_is_read_from_its_end():
    assert math_reward("9" * 10_000_000 + r"\boxed{5}", Task(prompt="q", answer="5")).value == 1.0
    assert math_reward(r"\boxed{5}" + "x" * 10_000_000, Task(prompt="q", answer="5")).value == 0.0


@pytest.mark.parametrize(
    "text",
    ["2^{10}", "x^2+2x+1", "e^{x^2}", r"\frac{1}{2004!}", "n!", r"\binom{52}{5}", "(x+1)^{100}", "x^{2n}", "2^{n-1}"],
)
def test_the_guard_lets_ordinary_answers_through(text):
    assert admitted(text)


@pytest.mark.parametrize(
    "text", ["x;y", r"\input{x}", r"\write18", "import(os)!!", "a.b", "f'", "x=", "5 5", "2^", "__a"]
)
def test_the_guard_refuses_what_is_no_expression(text):
    with pytest.raises(Refused):
        admitted(text)


def asked(answer: str) -> tuple[str, float]:
    """What comes of an answer that went past the guard, and after how long."""
    start = time.perf_counter()
    try:
        said = str(math_workers.WORKERS.ask({"kind": "value", "gold": "5", "answer": answer}))
    except Failed as failed:
        said = str(failed)
    return said, time.perf_counter() - start


def test_forty_that_hang_past_the_guard_are_ended_and_right_answers_beside_them_score_one():
    assert reward(r"\sqrt{25}").value == 1.0
    with ThreadPoolExecutor(50) as pool:
        hanging = [pool.submit(asked, r"\sqrt{" * 60 + "2" + "}" * 60 if i % 2 else "9^{9^{9^{9}}}") for i in range(40)]
        right = [pool.submit(reward, f"{i}", f"{i}.0") for i in range(200)]
        assert [r.result().value for r in right] == [1.0] * 200
        ended = [h.result() for h in hanging]
    assert [said for said, _ in ended if "'equal': True" in said] == []
    assert sum(said.startswith("timed out") for said, _ in ended) > 20
    assert max(seconds for _, seconds in ended) < 20  # one after the other they take 48; 2 on a quiet machine
    assert reward(r"\sqrt{625}", "25").value == 1.0


def test_memory_is_bounded():
    said, _ = asked("2^{999999999}")
    assert "True" not in said
    assert reward(r"\sqrt{49}", "7").value == 1.0


def children() -> set[int]:
    """The processes of ours that fork workers."""
    found = set[int]()
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, IndexError):
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            found |= {int(folder.name)} if parent == os.getpid() and b"math_symbolic" in read(folder) else set()
    return found


def read(folder: Path) -> bytes:
    return (folder / "cmdline").read_bytes()


def test_processes_that_were_ended_from_outside_are_replaced_and_none_is_left_behind():
    before = children()
    workers = Workers()
    call = {"kind": "value", "gold": "5", "answer": r"\sqrt { 25 }"}
    assert workers.ask(call)["equal"] is True
    started = children() - before
    assert len(started) == 1
    workers._idle[0].shutdown(2)  # as if its keeper had been killed
    assert workers.ask(call)["equal"] is True
    assert children() - before == started
    workers.close()
    until = time.monotonic() + 20
    while children() - before and time.monotonic() < until:
        time.sleep(0.05)
    assert children() == before
