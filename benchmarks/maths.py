"""The maths verifier on real gold answers and machine-made variants of them, beside the library it stands on.

Gold answers of GSM8K, SVAMP and MATH-500 (set HONE_DATA to the folder that has them), each as it is, in equivalent
forms, which must score 1, and perturbed, which must score 0. The peer is `math-verify` with its own parser, settings
and timeout, in the main thread, where its alarm works. Then forty hostile answers in flight beside right ones.
"""

import random
import re
import statistics
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from benchmarks.form import Row, main, note, row, say
from hone.data.feed import assemble
from hone.data.feed.locate import Reading, locate
from hone.data.rows.convert import RowCounts
from hone.reward.verify.math.amount import amount
from hone.reward.verify.math.normalise import normalise
from hone.reward.verify.math.verdict import _ask_worker, math_reward
from hone.reward.verify.math.workers import WORKERS, NoVerdict
from hone.types import Task

SETS = ("gsm8k:test", "svamp", "math500")
IN_FLIGHT = 40
HANGING = (
    *("9^{9^{9^{9}}}", "100000!!", r"\sqrt{" * 200 + "2" + "}" * 200, r"\binom{10^{9}}{5\cdot 10^{8}}", "2^{30^{5}}"),
    *(r"\prod_{k=1}^{10^{8}} k", r"\begin{pmatrix}1&1\\1&0\end{pmatrix}^{10^{9}}", "1" * 90_000, "$" * 20_000),
    *("(" + "+".join(f"x_{{{i}}}" for i in range(80)) + ")^{40}", "(((2^{999})^{999})^{999})^{999}", "9^9^9^9"),
)
PAST_THE_GUARD = ("9^{9^{9^{9}}}", r"\sqrt{" * 100 + "2" + "}" * 100, r"\prod_{k=1}^{10^{8}} k", "100000!!")


@dataclass
class Count:
    """How often a kind of variant was accepted, by us and by the library, and how often both said the same."""

    all: int = 0
    ours: int = 0
    theirs: int = 0
    agreed: int = 0
    seconds: float = 0.0
    their_seconds: float = 0.0
    wrong: list[str] = field(default_factory=list)


def reward(completion: str, gold: str) -> float | None:
    """Ours."""
    return math_reward(completion, Task(prompt="q", answer=gold)).value


def library(completion: str, gold: str) -> bool:
    """The library as its own readme calls it."""
    from math_verify import parse, verify

    return bool(verify(parse(f"\\boxed{{{gold}}}"), parse(completion)))


def equivalents(gold: str) -> Iterator[str]:
    """Whole completions that state the same answer in another place, dress or form."""
    yield f"The final answer is ${gold}$."
    yield f"<think>\\boxed{{7777}}</think> <answer>{gold}</answer>"
    yield f"\\boxed{{ {gold.replace('frac', 'dfrac').replace('ddfrac', 'dfrac')} }}"
    yield f"\\boxed{{{gold.replace('(', chr(92) + 'left(').replace(')', chr(92) + 'right)')}}}".replace(
        r"\left\left", r"\left"
    )
    stated = amount(normalise(gold))
    if stated is None:
        simple = re.fullmatch(r"[0-9a-z\s+*/^{}()-]*(?:\\(?:sqrt|frac|pi)[0-9a-z\s+*/^{}()-]*)*", gold)
        if simple and "," not in gold and not re.search(r"[A-Za-z]{5}", gold):
            yield rf"\boxed{{\frac{{2({gold})}}{{2}}}}"
            yield rf"\boxed{{-(-({gold}))}}"
        return
    if re.search(r"[^0-9.,-]", gold):  # a unit, currency or fraction stays as it is
        return
    value, _ = stated
    yield rf"\boxed{{\frac{{{(value * 6).numerator}}}{{{(value * 6).denominator * 6}}}}}"
    if value.denominator == 1:
        yield f"#### {value.numerator:,}"
        yield f"\\boxed{{{value.numerator}.00}}"
        yield f"\\boxed{{x = {value.numerator}}}"


def perturbed(gold: str, other: str) -> Iterator[str]:
    """Whole completions that state something else."""
    changed = re.sub(r"[0-9]", lambda digit: str((int(digit.group()) + 1) % 10), gold, count=1)
    if changed != gold:
        yield f"\\boxed{{{changed}}}"
        yield f"\\boxed{{{gold}}} or perhaps \\boxed{{{changed}}}"
    if other != gold:
        yield f"\\boxed{{{other}}}"
    yield f"\\boxed{{{gold}, 7777}}"
    yield f"\\boxed{{{gold} + 7777}}"
    yield f"\\boxed{{{gold}}}".replace("boxed", "boxe")


def variants(golds: Sequence[str]) -> dict[str, list[tuple[str, str]]]:
    """(completion, gold) of each kind."""
    others = [*golds[1:], golds[0]]
    return {
        "gold": [(f"\\boxed{{{gold}}}", gold) for gold in golds],
        "equivalent": [(text, gold) for gold in golds for text in equivalents(gold)],
        "perturbed": [
            (text, gold) for gold, other in zip(golds, others, strict=True) for text in perturbed(gold, other)
        ],
    }


def counted(cases: Sequence[tuple[str, str]], *, right: bool, peers: int) -> Count:
    """Verdicts on all cases; times of both sides on the first so many of them, for the library is slow."""
    count = Count(all=len(cases))
    for number_of, (completion, gold) in enumerate(cases):
        start = time.perf_counter()
        ours = reward(completion, gold)
        taken = time.perf_counter() - start
        count.ours += ours == 1.0
        count.wrong += [f"{completion} | {gold} -> {ours}"] if (ours == 1.0) != right else []
        if number_of < peers:
            start = time.perf_counter()
            theirs = library(completion, gold)
            count.their_seconds += time.perf_counter() - start
            count.seconds += taken
            count.theirs += theirs
            count.agreed += theirs == (ours == 1.0)
    return count


def answers(name: str) -> list[str]:
    """The gold answers of a dataset."""
    (part,) = locate(name, Reading(chat=False))
    return [str(found["answer"]) for found, _ in assemble.plain_rows(part, Reading(chat=False), RowCounts())]


def agreement(quick: bool) -> Iterator[Row]:
    """Shares accepted, and verifications a second."""
    for name in SETS:
        golds = answers(name)
        random.Random(0).shuffle(golds)
        for kind, cases in variants(golds[:100] if quick else golds).items():
            random.Random(1).shuffle(cases)
            right, peers = kind != "perturbed", min(len(cases), 200 if quick else 600)
            count = counted(cases, right=right, peers=peers)
            for text in count.wrong[:20]:
                say(f"{name} {kind}: {text}")
            share, goal = count.ours / count.all, (1.0 if right else 0.0)
            title = f"{name}, {kind}: accepted of {count.all}"
            yield row(title, share, unit="share", goal=f"{goal:g}", ok=share == goal, peer=count.theirs / peers)
            yield note(f"{name}, {kind}: same verdict as the library", count.agreed / peers, unit="share")
            rate, theirs = peers / count.seconds, peers / count.their_seconds
            yield note(f"{name}, {kind}: rate", rate, unit="verifications/s", peer=theirs)


def timed(completion: str, gold: str) -> tuple[float | None, float]:
    """Verdict and seconds."""
    start = time.perf_counter()
    return reward(completion, gold), time.perf_counter() - start


def hostile(quick: bool) -> Iterator[Row]:
    """Right answers, numbers and expressions, while forty threads do nothing but send hostile ones."""
    until = time.monotonic() + (3.0 if quick else 15.0)

    def attack(first: int) -> list[tuple[float | None, float]]:
        found, i = list[tuple[float | None, float]](), first
        while time.monotonic() < until:
            found.append(timed(f"\\boxed{{{HANGING[i % len(HANGING)]}}}", "5"))
            i += 1
            time.sleep(0.05)
        return found

    with ThreadPoolExecutor(IN_FLIGHT) as pool:
        attacks = [pool.submit(attack, i) for i in range(IN_FLIGHT)]
        plain, symbolic = list[tuple[float | None, float]](), list[tuple[float | None, float]]()
        while time.monotonic() < until:
            n = len(plain) + 2
            plain.append(timed(f"\\boxed{{{n}}}", f"{n}"))
            symbolic.append(timed(f"\\boxed{{{n}\\sqrt{{8}}}}", f"{2 * n}\\sqrt{{2}}"))
        ended = [verdict for found in attacks for verdict in found.result()]
    slowest = max(seconds for _, seconds in ended)
    yield row(f"hostile, {len(ended)} by {IN_FLIGHT} threads: slowest", slowest, unit="s", goal="<= 2", ok=slowest <= 2)
    accepted = sum(value == 1.0 for value, _ in ended)
    yield row("hostile: accepted", accepted, unit="answers", goal="0", ok=accepted == 0)
    for name, found in (("numbers", plain), ("expressions", symbolic)):
        share = sum(value == 1.0 for value, _ in found) / len(found)
        yield row(f"right {name} beside them: scored 1", share, unit="share", goal="1", ok=share == 1.0)
        seconds = sorted(s for _, s in found)
        yield note(f"right {name} beside them: median", statistics.median(seconds), unit="s")
        yield note(f"right {name} beside them: 99 %", seconds[int(0.99 * len(seconds))], unit="s")


def slowdown() -> float:
    """How many seconds pass here for one of processor time: 1 on a machine that has nothing else to do."""
    start, used = time.perf_counter(), time.process_time()
    while time.process_time() - used < 0.3:
        pass
    return (time.perf_counter() - start) / (time.process_time() - used)


def past_the_guard() -> Iterator[Row]:
    """Forty at once that do hang a worker, handed to the workers directly; and twenty right expressions beside them.

    Each of the four kinds may take a second of processor time, so on two cores all of them are to end within 4 s.
    """

    def hang(answer: str) -> tuple[bool, float]:
        start = time.perf_counter()
        try:
            equal = WORKERS.ask({"kind": "value", "gold": "5", "answer": answer}).get("equal") is True
        except NoVerdict:
            equal = False
        return equal, time.perf_counter() - start

    others = slowdown()
    with ThreadPoolExecutor(IN_FLIGHT + 20) as pool:
        hanging = [pool.submit(hang, PAST_THE_GUARD[i % len(PAST_THE_GUARD)]) for i in range(IN_FLIGHT)]
        right = [pool.submit(timed, f"\\boxed{{{i}\\sqrt{{12}}}}", f"{2 * i}\\sqrt{{3}}") for i in range(2, 22)]
        ended, beside = [h.result() for h in hanging], [r.result() for r in right]
    slowest = max(seconds for _, seconds in ended) / max(1.0, others, slowdown())
    yield row("past the guard, 40 at once: slowest, less other work", slowest, unit="s", goal="<= 4", ok=slowest <= 4)
    accepted = sum(equal for equal, _ in ended)
    yield row("past the guard: accepted", accepted, unit="answers", goal="0", ok=accepted == 0)
    share = sum(value == 1.0 for value, _ in beside) / len(beside)
    yield note("past the guard: right expressions among them: scored 1", share, unit="share")


def measure(quick: bool) -> Sequence[Row]:
    """Everything, after the processes have started."""
    start = time.perf_counter()
    reward(r"\boxed{\sqrt{8}}", r"2\sqrt{2}")
    started = note("first expression, which starts the processes", time.perf_counter() - start, unit="s")
    library(r"\boxed{\sqrt{8}}", r"2\sqrt{2}")  # the library is imported and warm, as ours is
    rows = [started, *agreement(quick), *hostile(quick), *past_the_guard()]
    _ask_worker.cache_clear()
    return rows


if __name__ == "__main__":
    raise SystemExit(main(measure, __doc__ or ""))
