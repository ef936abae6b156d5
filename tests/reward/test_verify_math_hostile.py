"""Answers that would hang, exhaust or mislead the verifier: each ends soon and none is accepted."""

import gc
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
from each import each
from patience import patience

from benchmarks.trials.costly import COSTLY, leaves
from hone.reward.verify.math import workers as math_workers
from hone.reward.verify.math.expression import Refused, safe_for_parser
from hone.reward.verify.math.symbolic import _POINTS
from hone.reward.verify.math.verdict import math_reward
from hone.reward.verify.math.workers import Exhausted, NoVerdict, Workers
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


@each("answer", HANGING)
def test_an_answer_that_would_hang_ends_at_once_and_is_not_accepted(answer):
    start = time.perf_counter()
    assert reward(answer).value != 1.0
    assert reward(answer, "x+1").value != 1.0
    assert math_reward(answer, Task(prompt="q", answer="5")).value != 1.0
    assert time.perf_counter() - start < patience(1.0)


@each("answer", STRANGE)
def test_text_that_is_no_mathematics_gives_a_verdict(answer):
    assert reward(answer).value == 0.0
    assert reward(answer, "x+1").value == 0.0
    assert math_reward(answer, Task(prompt="q", answer="5")).value == 0.0


def test_an_enormous_completion_is_read_from_its_end():
    assert math_reward("9" * 10_000_000 + r"\boxed{5}", Task(prompt="q", answer="5")).value == 1.0
    assert math_reward(r"\boxed{5}" + "x" * 10_000_000, Task(prompt="q", answer="5")).value == 0.0


@each(
    "text",
    ["2^{10}", "x^2+2x+1", "e^{x^2}", r"\frac{1}{2004!}", "n!", r"\binom{52}{5}", "(x+1)^{100}", "x^{2n}", "2^{n-1}"],
)
def test_the_guard_lets_ordinary_answers_through(text):
    assert safe_for_parser(text)


@each("text", ["x;y", r"\input{x}", r"\write18", "import(os)!!", "a.b", "f'", "x=", "5 5", "2^", "__a"])
def test_the_guard_refuses_what_is_no_expression(text):
    with pytest.raises(Refused):
        safe_for_parser(text)


def asked(answer: str) -> tuple[str, float]:
    """What comes of an answer that went past the guard, and after how long."""
    start = time.perf_counter()
    try:
        said = str(math_workers.WORKERS.ask({"kind": "value", "gold": "5", "answer": answer}))
    except NoVerdict as failed:
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
    assert sum(said.startswith("timed out") for said, _ in ended) >= 20
    assert max(seconds for _, seconds in ended) < patience(10)  # one after the other they take 48; 2 on a quiet machine
    assert reward(r"\sqrt{625}", "25").value == 1.0


def test_memory_is_bounded():
    said, _ = asked("2^{999999999}")
    assert "True" not in said
    assert reward(r"\sqrt{49}", "7").value == 1.0


def test_an_answer_that_exhausts_its_process_scores_0_with_the_reason_whatever_the_gold_one_is():
    for gold, answer in (
        ("5", COSTLY[0]),
        (r"2\sqrt{3}", COSTLY[3]),
        ("1, 7", f"1, {COSTLY[0]}"),
        ("5", f"{COSTLY[0]} = 5"),
    ):
        outcome = reward(answer, gold)
        assert (outcome.value, outcome.reason[:26]) == (0.0, "the answer is not accepted"), answer


def test_a_gold_answer_that_exhausts_its_process_is_invalid_and_named():
    outcome = reward(r"\sqrt{2}", COSTLY[0])
    assert outcome.value is None
    assert "the gold answer" in outcome.reason


@pytest.fixture(scope="module")
def own():
    """Workers of these tests alone, and the processes that were there before."""
    before, workers = set(leaves(os.getpid())), Workers()
    workers._wall = 30.0
    return workers, before


def test_the_same_costly_call_is_tried_once(own):
    call = {"kind": "value", "gold": "5", "answer": "9 ^ { 9 ^ { 9 ^ { 9 } } }"}
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda _: _exhausts(own[0], call), range(8))) == [True] * 8
    own[0]._answer = lambda call: pytest.fail("it was tried again")
    assert _exhausts(own[0], call)
    del own[0]._answer


def _exhausts(workers: Workers, call: dict[str, str]) -> bool:
    try:
        workers.ask(call)
    except Exhausted:
        return True
    return False


@pytest.fixture
def stopped(own):
    """Workers of which the only process that compares stands still; and that process."""
    workers, before = own
    workers._wall = 30.0
    workers._drop()
    workers.ask({"kind": "value", "gold": "5", "answer": r"\sqrt { 25 }"})
    found = set(leaves(os.getpid())) - before
    send(found, signal.SIGSTOP)
    yield workers, found
    send(found, signal.SIGCONT)


def send(processes: set[int], how: signal.Signals) -> None:
    """To each that is still there: one that was dropped before may end at any moment."""
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process, how)


RIGHT = {"kind": "value", "gold": r"2 \sqrt { 3 }", "answer": r"\sqrt { 12 }"}


def test_a_right_answer_whose_process_gets_no_processor_for_a_while_is_right(stopped):
    workers, processes = stopped
    timer = threading.Timer(1.5, send, [processes, signal.SIGCONT])
    timer.start()
    assert workers.ask(RIGHT)["equal"] is True


def test_a_process_that_stands_still_is_no_verdict_and_not_the_answers_fault(stopped):
    workers, _ = stopped
    workers._wall = 0.5
    with pytest.raises(NoVerdict, match="timed out") as raised:
        workers.ask(RIGHT)
    assert not isinstance(raised.value, Exhausted)
    workers._wall = 30.0
    assert workers.ask(RIGHT)["equal"] is True


def test_a_process_that_is_killed_from_outside_is_no_verdict_and_not_the_answers_fault(stopped):
    workers, processes = stopped
    timer = threading.Timer(0.5, send, [processes, signal.SIGKILL])
    timer.start()
    with pytest.raises(NoVerdict, match="from outside") as raised:
        workers.ask(RIGHT)
    assert not isinstance(raised.value, Exhausted)


@pytest.mark.slow
def test_right_expressions_score_1_on_a_machine_with_ten_times_as_much_to_do_as_it_can():
    assert reward(r"\sqrt{36}", "6").value == 1.0
    busy = list[int]()
    for _ in range(10 * (os.cpu_count() or 1)):
        number = os.fork()
        if not number:
            while os.getppid() != 1:
                pass
            os._exit(0)
        busy.append(number)
    try:
        with ThreadPoolExecutor(8) as pool:
            found = list(
                pool.map(
                    lambda i: reward(rf"{i}\sqrt{{8}}+x^{{{i}}}", rf"x^{{{i}}}+{2 * i}\sqrt{{2}}").value, range(2, 26)
                )
            )
    finally:
        for number in busy:
            os.kill(number, signal.SIGKILL)
            os.waitpid(number, 0)
    assert found == [1.0] * 24


def test_an_answer_made_to_agree_with_the_gold_one_at_fixed_points_is_wrong():
    for shift in range(6):
        roots = "".join(rf"(x-\frac{{{a + b * shift}}}{{{b}}})" for a, b in _POINTS)
        assert reward(f"x+{roots}", "x").value == 0.0
    turned = "".join(rf"(x-\frac{{{a + b * i}}}{{{b}}})" for i, (a, b) in enumerate(_POINTS))
    assert reward(f"x+{turned}", "x").value == 0.0


def children() -> set[int]:
    """The processes of ours that fork workers."""
    found = set[int]()
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, IndexError):
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            found |= {int(folder.name)} if parent == os.getpid() and b"symbolic.serve" in read(folder) else set()
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
    workers._idle[0].shutdown(2)  # as if its supervisor had been killed
    assert workers.ask(call)["equal"] is True
    assert children() - before == started
    del workers
    until = time.monotonic() + patience(20)
    while children() - before and time.monotonic() < until:
        time.sleep(0.05)
    assert children() <= before


def test_workers_that_are_collected_as_garbage_end_and_nothing_hangs():
    before = children()
    workers = Workers()
    assert workers.ask({"kind": "value", "gold": "5", "answer": r"\sqrt { 25 }"})["equal"] is True
    assert len(children() - before) == 1
    cycle: list[object] = [workers]
    cycle.append(cycle)
    del workers, cycle
    gc.collect()
    assert children() <= before


def test_a_chain_of_inequalities_is_a_wrong_answer_and_no_crash():
    for text in ("1<x<2<3", "4>3>x>1", "1<2, x<1<3<5", "1<2<3<4<5"):
        assert reward(text).value == 0.0, text


def test_an_answer_whose_own_members_cannot_be_read_is_wrong_and_not_invalid():
    broken = [
        "0 = \\rfloor",
        "5 = |",
        "e = |",
        r"\exp = \pi \log",
        r"\log_3 = _",
        r"x = \sqrt[3]{} = \ln",
        "1,2 = \\log",
    ]
    broken += [r"(1, 2) = (1, \rfloor)", r"\{x<|\} = \{x<|\}"]
    for gold in ("5", r"2\sqrt{3}", "28\\%", r"90^\circ", "(1,2)", r"\sin x", "1,2,3", "x=5"):
        for answer in broken:
            found = math_reward(f"\\boxed{{{answer}}}", Task(prompt="q", answer=gold))
            assert found.value == 0.0, (gold, answer, found.reason)
    assert reward(f"{COSTLY[0]} = {COSTLY[0]}+0").value == 0.0


def test_a_gold_answer_whose_name_the_parser_cannot_read_makes_no_equation_invalid():
    for answer in ("2 f^{-1}(x) = 2x", "f^{-2}(x) = 2x", "f(x)^{-1} + 1 = 2x", "y - 1 = 2x"):
        found = math_reward(f"\\boxed{{{answer}}}", Task(prompt="q", answer="f^{-1}(x) = 2x"))
        assert found.value == 0.0, (answer, found.reason)
    assert math_reward(r"\boxed{f^{-1}(x) = x+x}", Task(prompt="q", answer="f^{-1}(x) = 2x")).value == 1.0
