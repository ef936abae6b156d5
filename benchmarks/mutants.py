"""Mutation testing of src/hone/algo: at least 95 % of all mutants make a test fail, and every survivor is explained.

The full run writes docs/dev/mutants.md. --quick judges a seeded sample, by the quick tests only.
"""

import random
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import survivors
from benchmarks.form import Row, main, row
from benchmarks.mutation import Mutant, mutants
from benchmarks.patched import ROOT, WORKERS, Bench, Verdict, bench

PAGE = ROOT / "docs" / "dev" / "mutants.md"
FOLDER = "hone/algo"
WORDS = {"explain"}  # texts that `hone algos` prints: another word is no other mathematics
LEAST = 95.0  # per cent of all mutants
LIMIT = 150.0  # seconds for one stage of tests
QUICK_SECONDS = 75.0

ALGO = "tests/algo"
EVERY, SETTINGS, WHAT, ALONE = (
    f"{ALGO}/test_{name}.py" for name in ("every_algorithm", "algo_settings", "definitions", "algo_alone")
)
HOME = {  # the tests nearest to a module: nine in ten of its mutants end there
    "control": (f"{ALGO}/test_weight_and_control.py",), "weight": (f"{ALGO}/test_weight_and_control.py",),
    "credit": (f"{ALGO}/test_credit.py",), "terms": (f"{ALGO}/test_terms.py",),
    "prefer": (f"{ALGO}/test_prefer.py",), "select": (f"{ALGO}/test_select.py",), "settings": (SETTINGS,),
    "offline": (WHAT, SETTINGS), "online": (WHAT, SETTINGS), "table": (EVERY, ALONE), "__init__": (WHAT,),
}  # fmt: skip
QUICKLY = ((ALGO,), ("tests/oracle",))
SLOWLY = (("tests/train", "tests/equal"), ("tests/learn", "tests/run/test_settings_take_effect.py"))


@dataclass(frozen=True, slots=True)
class Judged:
    """A mutant and the verdict that ended it, or the last one it survived."""

    mutant: Mutant
    verdict: Verdict

    @property
    def killed(self) -> bool:
        return self.verdict.red


class Killers:
    """Which tests have killed mutants of a module: they are asked first."""

    def __init__(self) -> None:
        self.count, self.lock = defaultdict[str, Counter[str]](Counter), threading.Lock()

    def add(self, module: str, test: str) -> None:
        with self.lock:
            self.count[module][test] += bool(test)

    def first(self, module: str) -> list[str]:
        """The module's own killers by their number, then everyone's."""
        with self.lock:
            own = [test for test, _ in self.count[module].most_common(100)]
            everyone = sum(self.count.values(), Counter[str]())
        return list(dict.fromkeys([*own, *(test for test, _ in everyone.most_common(100))]))


def judge(on: Bench, mutant: Mutant, killers: Killers, *, stages: Sequence[Sequence[str]]) -> Judged:
    """One stage of tests after the other, until one is red."""
    stem = Path(mutant.module).stem
    verdict = None
    for tests in ((HOME.get(stem, (EVERY,))), *stages):
        patch, first = {mutant.module: mutant.source}, killers.first(stem)
        verdict = on.verdict(patch, tests, limit=LIMIT, first=first)
        if verdict.red:
            killers.add(stem, verdict.by)
            break
    assert verdict is not None
    return Judged(mutant, verdict)


def explained() -> dict[str, str]:
    """Every mutant that may survive, with its reason."""
    return survivors.EQUIVALENT | survivors.ACCEPTED


def all_mutants(on: Bench) -> list[Mutant]:
    """Of every module of the folder."""
    paths = sorted(p for p in (on.root / "src" / FOLDER).glob("*.py") if p.stem not in WORDS)
    return [m for p in paths for m in mutants(f"{FOLDER}/{p.name}", on.source(f"{FOLDER}/{p.name}"))]


def judged(on: Bench, chosen: Sequence[Mutant], *, quick: bool) -> list[Judged]:
    """All of them; an explained one is asked of the quick tests only, where it must survive."""
    killers, known, start = Killers(), explained(), time.monotonic()
    stages = QUICKLY if quick else (*QUICKLY, *SLOWLY)
    found: list[Judged] = []

    def work(mutant: Mutant) -> Judged | None:
        if quick and time.monotonic() - start > QUICK_SECONDS:
            return None
        return judge(on, mutant, killers, stages=QUICKLY[:1] if mutant.name in known else stages)

    for mutant, result in on.each(work, chosen):
        if result is None:
            continue
        found.append(result)
        if not result.killed and mutant.name not in known:
            print(f"survived: {mutant.module}:{mutant.line} {mutant.name}", file=sys.stderr)
        if len(found) % 50 == 0:
            killed = sum(j.killed for j in found)
            print(f"{len(found)} of {len(chosen)}, {killed} killed, {time.monotonic() - start:.0f} s", file=sys.stderr)
    return found


def check_green(on: Bench, *, quick: bool) -> None:
    """Without a mutant every stage is green, or no verdict would mean anything."""
    for tests in QUICKLY[:1] if quick else (*QUICKLY, *SLOWLY):
        verdict = on.verdict({}, tests, limit=2 * LIMIT)
        if verdict.red:
            raise SystemExit(f"mutants: {' '.join(tests)} is {verdict.how} without any mutant: {verdict.by}")


def check_listed(every: Iterable[Mutant], found: Iterable[Judged]) -> list[str]:
    """What is wrong with the list of survivors: names that no mutant has, and mutants that do not survive."""
    names, known = {m.name for m in every}, explained()
    wrong = [f"no such mutant: {name}" for name in known if name not in names]
    wrong += [
        f"killed after all by {j.verdict.by}: {j.mutant.name}" for j in found if j.killed and j.mutant.name in known
    ]
    for line in wrong:
        print(f"benchmarks/survivors.py: {line}", file=sys.stderr)
    return wrong


def rows_of(found: Sequence[Judged], wrong: Sequence[str]) -> list[Row]:
    """Killed of all, killed of those that can be, and what nobody has explained."""
    killed = sum(j.killed for j in found)
    equivalent = sum(j.mutant.name in survivors.EQUIVALENT for j in found)
    open_ = [j for j in found if not j.killed and j.mutant.name not in explained()]
    share, fair = 100 * killed / len(found), 100 * killed / max(1, len(found) - equivalent)
    return [
        row("mutants", len(found), unit="mutants", goal="> 0", ok=bool(found)),
        row("killed of all", share, unit="%", goal=f">= {LEAST:g}", ok=share >= LEAST),
        row("killed of those that are not equivalent", fair, unit="%", goal=f">= {LEAST:g}", ok=fair >= LEAST),
        row("survivors without an explanation", len(open_), unit="mutants", goal="0", ok=not open_),
        row("wrong entries in the list of survivors", len(wrong), unit="entries", goal="0", ok=not wrong),
    ]


# --- the page ---


def page(found: Sequence[Judged], seconds: float) -> str:
    """docs/dev/mutants.md"""
    rows = [f"| {name} | {all_} | {killed} | {100 * killed / all_:.1f} |" for name, all_, killed in _by_module(found)]
    killed = sum(j.killed for j in found)
    other = len(found) - sum(j.mutant.name in survivors.EQUIVALENT for j in found)
    how = Counter(j.verdict.how for j in found if j.killed)
    return "\n".join(
        [
            *HEAD,
            "",
            f"{len(found)} mutants, {killed} killed: {100 * killed / len(found):.1f} % of all, "
            f"{100 * killed / other:.1f} % of the {other} that are not equivalent.",
            f"Of the killed, {', '.join(f'{n} {name}' for name, n in how.most_common())}. "
            f"It took {seconds / 60:.0f} minutes on {WORKERS} cores.",
            "",
            "| module | mutants | killed | % |",
            "|---|---|---|---|",
            *rows,
            "",
            *_survivors(found),
        ]
    )


HEAD = """# Mutation testing of the algorithms

`make mutants` (`python -m benchmarks.mutants`) writes this page. It makes one small change at a time in
`src/hone/algo`: another comparison, operator, constant or default, a condition negated or left out, a function taken
for its twin (min and max, sum and mean, exp and expm1, softplus and relu), a bound of a clamp on the wrong side, a
keyword or an entry forgotten, a `detach`, `clamp` or `flip` left out, arguments swapped, a sign lost, a statement or
decorator deleted, an argument returned as it came. The tests must notice: tests/algo and tests/oracle, then
tests/train, tests/equal and tests/learn.
Left alone are annotations, docstrings, the text of errors, axes (`-1`), the options of dataclasses, `__all__`, and what
could only crash: a name that is nowhere set.

The mutator is our own: mutmut 3 changes no decorated function and nothing outside functions, which is most of
`online.py`, `offline.py` and `settings.py`, and knows no torch; cosmic-ray rewrites the files in place and starts a
fresh interpreter with torch for each mutant, several times slower than a fork.
""".splitlines()


def _by_module(found: Sequence[Judged]) -> list[tuple[str, int, int]]:
    every, killed = Counter(j.mutant.module for j in found), Counter(j.mutant.module for j in found if j.killed)
    return [(module.rsplit("/", 1)[-1], n, killed[module]) for module, n in sorted(every.items())]


def _survivors(found: Sequence[Judged]) -> list[str]:
    lines: list[str] = []
    for title, table in (
        ("## Equivalent: no input tells them from the original", survivors.EQUIVALENT),
        ("## Accepted: they differ, but in nothing that is promised", survivors.ACCEPTED),
    ):
        here = [j.mutant for j in found if j.mutant.name in table and not j.killed]
        lines += [title, "", "| mutant | why it survives |", "|---|---|"]
        lines += [f"| `{m.name.replace('|', chr(92) + '|')}` | {table[m.name]} |" for m in here]
        lines += [""]
    rest = [j.mutant for j in found if not j.killed and j.mutant.name not in explained()]
    return lines + (["## Without an explanation", "", *(f"- `{m.name}`" for m in rest), ""] if rest else [])


def measure(quick: bool) -> list[Row]:
    """A sample, or all of them and the page."""
    start = time.monotonic()
    with bench() as on:
        check_green(on, quick=quick)
        every = all_mutants(on)
        chosen = random.Random(0).sample(
            every, len(every)
        )  # any order but that of the lines teaches the killers sooner
        found = judged(on, chosen, quick=quick)
    wrong = check_listed(every, found)
    if not quick:
        found.sort(key=lambda j: (j.mutant.module, j.mutant.line, j.mutant.name))
        PAGE.write_text(page(found, time.monotonic() - start), encoding="utf-8")
    return rows_of(found, wrong)


if __name__ == "__main__":
    sys.exit(main(measure, __doc__ or ""))
