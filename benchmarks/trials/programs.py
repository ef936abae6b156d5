"""Right programs that scored 0: by what they return, what their tests need, and how a completion holds them."""

import gzip
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.trials import completion_cases as completions
from benchmarks.trials import program_cases as programs
from benchmarks.trials import shape_cases as shapes
from benchmarks.trials.case import Case, expect
from hone.reward.verify.code.verdict import code_reward
from hone.types import Outcome, Task

TITLE = "Programs and their tests"
DATA = Path(os.environ.get("HONE_DATA") or Path(__file__).parents[3] / "shared" / "data")
HEADS = "\n".join(programs.IMPORTS)
FAILED_BEFORE = (82, 85, 98, 124, 126, 137, 139, 163, 233, 246, 248, 276, 300, 312, 596)  # of MBPP


def fenced(code: str) -> str:
    return f"```python\n{code}\n```"


def reward(completion: str, prompt: str = "", **extra: Any) -> Outcome:
    return code_reward(completion, Task(prompt=prompt, extra=extra))


def scores(wanted: float | None, completion: str, prompt: str = "", **extra: Any) -> Callable[[], str | None]:
    """The verdict; what is invalid has a reason."""

    def fails() -> str | None:
        found = reward(completion, prompt, **extra)
        if found.value == wanted:
            return None if found.valid or found.reason else "no reason"
        return f"{found.value} instead of {wanted}: {found.reason}"

    return fails


def explained(code: str, test: str) -> Callable[[], str | None]:
    """A 0 with a reason."""

    def fails() -> str | None:
        found = reward(fenced(code), test_list=[test], test_imports=programs.IMPORTS)
        return expect((found.value, bool(found.reason)), (0.0, True))

    return fails


def listed(wanted: float | None, code: str, *tests: str, **extra: Any) -> Callable[[], str | None]:
    return scores(wanted, fenced(code), test_list=list(tests), **extra)


def cases(quick: bool) -> Iterator[Case]:
    yield from references(quick)
    yield from values()
    yield from tests()
    yield from scripts()
    yield from sizes()
    yield from found()


def references(quick: bool) -> Iterator[Case]:
    """Every reference solution of MBPP and HumanEval passes its own tests."""
    for row in rows("mbpp/sanitized-mbpp.json"):
        if not quick or row["task_id"] in FAILED_BEFORE:
            yield Case("MBPP's reference solutions", str(row["task_id"]), scores(1.0, fenced(row["code"]), **row))
    for number, row in enumerate(rows("humaneval/HumanEval.jsonl.gz")):
        if not quick or number % 20 == 0:
            given = {name: row[name] for name in ("prompt", "test", "entry_point")}
            yield Case(
                "HumanEval's reference solutions", row["task_id"], scores(1.0, row["canonical_solution"], **given)
            )


def rows(name: str) -> list[Mapping[str, Any]]:
    """Of a dataset, none where it is not here."""
    path = DATA / name
    if not path.exists():
        return []
    if path.suffix == ".json":
        return json.loads(path.read_text())
    with gzip.open(path, "rt") as file:
        return [json.loads(line) for line in file]


def values() -> Iterator[Case]:
    """What is equal in plain Python is equal here, and nothing else."""
    for made, test in programs.FORMS:
        code = f"{HEADS}\ndef f(): return {made}"
        yield Case("values as Python compares them", f"{made}: {test}", _with_imports(1.0, code, test))
    for made, test in programs.UNEQUAL:
        code = f"{HEADS}\ndef f(): return {made}"
        yield Case("values that Python tells apart", f"{made}: {test}", _with_imports(0.0, code, test))
    for made in ("A()", "Point()", "L()"):
        for test in programs.FORGED:
            code = f"{programs.SLY}\ndef f(x): return {made}"
            yield Case("forged equality", f"{made}: {test}", _with_imports(0.0, code, test))


def _with_imports(wanted: float, code: str, test: str) -> Callable[[], str | None]:
    return listed(wanted, code, f"assert {test}", test_imports=programs.IMPORTS)


def tests() -> Iterator[Case]:
    """Tests that are more than comparisons, and those that cannot run."""
    for code, test, wanted in programs.RAISED:
        yield Case("expected exceptions", f"{code}: {test}", listed(wanted, code, test))
    for code, texts, wanted in programs.CHANGED:
        yield Case("arguments changed in place", f"{code}: {texts}", listed(wanted, code, *texts))
    for code, test, wanted in programs.OBJECTS:
        yield Case("functions and objects among tests", f"{code}: {test}", listed(wanted, code, test))
    for code, test, wanted in shapes.UNITTEST:
        yield Case("runs of unittest", f"{code}: {test}", listed(wanted, code, test))
    for code, test, wanted in shapes.RAISED:
        yield Case("expected exceptions", f"{code}: {test}", listed(wanted, code, test))
    for code, test, wanted in (*shapes.OBJECTS, *shapes.COROUTINES):
        yield Case("functions and objects among tests", f"{code}: {test}", listed(wanted, code, test))
    for code, test, wanted in shapes.BLIND:
        yield Case("tests that cannot run are invalid", f"{code}: {test}", listed(wanted, code, test))
    for test in programs.CANNOT_RUN:
        yield Case("tests that cannot run are invalid", test, listed(None, "def f(x): return x", test))
    wrong = [(code, test) for code, test, wanted in (*programs.RAISED, *programs.OBJECTS) if wanted == 0.0]
    wrong += [(f"{HEADS}\ndef f(): return {made}", f"assert {test}") for made, test in programs.UNEQUAL]
    for code, test in (*programs.FAILS, *wrong):
        yield Case("what the completion causes is 0, with a reason", f"{code}: {test}", explained(code, test))


def scripts() -> Iterator[Case]:
    """Scripts run to the end of all that they have started."""
    for code, printed in programs.SCRIPTS:
        check = scores(1.0, fenced(code), inputs=[""], outputs=[printed])
        yield Case("output at a script's end", code, check)


def sizes() -> Iterator[Case]:
    """What is larger than a setting names the setting."""
    big, huge = "x" * 300_000, "x" * (17 << 20)
    for setting, code, extra in (
        ("output", f"print('x' * {len(big)})", {"inputs": [""], "outputs": [big]}),
        ("input", "print(len(input()))", {"inputs": [huge], "outputs": [str(len(huge))]}),
        ("result", "def f(): return 'x' * 1200000", {"test_list": [f"assert f() == {'x' * 1200000!r}"]}),
        ("input", "def f(x): return len(x)", {"inputs": [[huge]], "outputs": [len(huge)], "fn_name": "f"}),
    ):
        yield Case("sizes are settings", setting, names(setting, fenced(code), extra))
    fits = scores(1.0, fenced("print(len(input()))"), inputs=["x" * (4 << 20)], outputs=[str(4 << 20)])
    yield Case("sizes are settings", "4 MiB of input are read", fits)


def names(setting: str, completion: str, extra: Mapping[str, Any]) -> Callable[[], str | None]:
    def fails() -> str | None:
        outcome = reward(completion, **extra)
        return expect((outcome.value, f"raise {setting} in" in outcome.reason), (None, True))

    return fails


def found() -> Iterator[Case]:
    """The program in a completion."""
    group = "programs in completions"
    for text, wanted in completions.FUNCTIONS:
        check = scores(wanted, text, test_list=["assert add(1, 2) == 3", "assert add(2, 2) == 4"])
        yield Case(group, repr(text), check)
    for text, wanted in completions.PROGRAMS:
        yield Case(group, repr(text), scores(wanted, text, inputs=["1 2\n", "3 4\n"], outputs=["3", "7"]))
    checks = {"test": "def check(candidate):\n    assert candidate([1, 2], 2) == [2, 4]", "entry_point": "scale"}
    for text, wanted in completions.CONTINUED:
        yield Case(group, repr(text), scores(wanted, text, prompt=completions.PROMPT, **checks))
    two = f"```python\n{completions.ADD}```\nIt prints:\n```\n3\n```"
    told = reward(two, test_list=["assert add(1, 2) == 3"])
    yield Case(group, "says which was taken", lambda: expect("block 1 of 2" in told.reason, True))
