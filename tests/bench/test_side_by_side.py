"""A peer is measured as Hone is: the same warm-up at full length, as many repeats, in turns."""

import ast
from collections import Counter
from pathlib import Path

from benchmarks.learning.turns import Clock, Took, median
from benchmarks.side_by_side import in_turns

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
LIBRARIES = {"transformers", "trl", "math_verify"}
ALIKE = {"in_turns", "apart", "Clock"}  # functions that give every side as many turns
OTHERWISE = {
    "loading.py": "each loading is a process of its own; they take turns after one of each",
    "maths.py": "both judge the same answers one after the other",
    "parity.py": "compares numbers, not times",
}


def test_every_side_does_as_much_and_warms_up_as_long():
    calls = list[str]()
    in_turns({"ours": lambda: calls.append("ours"), "peer": lambda: calls.append("peer")}, repeats=3, warm=2)
    assert calls == ["ours", "peer"] * 5


def test_the_turns_that_warm_up_do_not_count():
    now = [0.0]
    costs = {"ours": iter([100.0, 1.0, 2.0, 3.0]), "peer": iter([500.0, 5.0, 5.0, 5.0])}

    def side(name: str):
        def work() -> None:
            now[0] += next(costs[name])

        return work

    found = in_turns({name: side(name) for name in costs}, repeats=3, warm=1, clock=lambda: now[0])
    assert found == {"ours": 2.0, "peer": 5.0}


def test_a_device_has_done_its_work_before_the_clock_is_read():
    waits = Counter[str]()
    in_turns({"ours": lambda: None}, repeats=1, warm=0, settle=lambda: waits.update(["settled"]))
    assert waits["settled"] == 2  # before the start and before the end


def test_a_clock_with_more_warm_turns_does_more_iterations_and_counts_as_many():
    taken = list[Took | None]()
    clock = Clock(taken.append, turns=2, stretch=1, warm=4)
    clock.begin()
    for _ in range(clock.iterations):
        clock.lap()
    assert len(taken) == 1 + 4 + 2
    assert median([(9.0, 9.0)] * 4 + [(1.0, 1.0), (3.0, 3.0)], warm=4) == (2.0, 2.0)


def test_whoever_times_a_library_uses_one_of_the_stopwatches_that_treat_sides_alike():
    for path in sorted(BENCHMARKS.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        names |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        imported = {a.name.split(".")[0] for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
        imported |= {(n.module or "").split(".")[0] for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
        timed = "perf_counter" in names or "process_time" in names
        if imported & LIBRARIES and timed:
            assert names & ALIKE or path.name in OTHERWISE, f"{path.name} has a stopwatch of its own"
