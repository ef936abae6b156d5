"""The mutator: which changes it makes, what it leaves alone, and names that tell mutants apart."""

import ast

import pytest
from each import each

from benchmarks import mutants as program
from benchmarks import survivors
from benchmarks.mutants import Judged, check_listed, page, rows_of
from benchmarks.mutation import Mutant, mutants
from benchmarks.patched import Verdict


def made(source: str) -> set[str]:
    """The one changed line of every mutant of a function's body."""
    found = set[str]()
    plain = ast.unparse(ast.parse(source)).splitlines()
    for m in mutants("hone/algo/x.py", source):
        changed = [line.strip() for line in m.source.splitlines() if line not in plain]
        found.add(" / ".join(changed) if changed else "(deleted)")
    return found


@each(
    ("line", "expected"),
    [
        ("return a < b", {"return a <= b", "return a > b"}),
        ("return a - b", {"return a + b", "return a"}),
        ("return -a", {"return a"}),
        ("return f(a, b)", {"return f(b, a)"}),
        ("return torch.minimum(a, b)", {"return torch.maximum(a, b)", "return torch.minimum(b, a)"}),
        ("return a.clamp(min=1)", {"return a", "return a.clamp()", "return a.clamp(max=1)", "return a.clamp(min=0)",
                                   "return a.clamp(min=2)"}),
        ("return a.sum(-1)", {"return a", "return a.mean(-1)"}),
        ("return a.detach()", {"return a"}),
        ("return a and b", {"return a or b", "return a", "return b"}),
        ("return a if c else b", {"return a", "return b"}),
        ("return a.old_logp", {"return a.gen_logp"}),
        ("return 0.5", {"return 1.0"}),
        ("return 'reward:k1'", {"return 'reward:k1_'"}),
        ("return {'a': b, 'x': 'give each row its reward'}", {"return {'x': 'give each row its reward'}",
                                                              "return {'a': b}"}),
        ("return {'a': 1, 'b': a}", {"return {'b': a}", "return {'a': 1}", "return {'a': 0, 'b': a}",
                                     "return {'a': 2, 'b': a}"}),
    ],
)  # fmt: skip
def test_a_line_and_its_mutants(line: str, expected: set[str]) -> None:
    assert made(f"def f(a, b, c):\n    {line}\n") == expected


def test_a_statement_and_a_decorator_can_be_forgotten_and_an_argument_returned() -> None:
    source = "@checked()\ndef f(a: int) -> int:\n    a = g(a)\n    h()\n    return a + 3\n"
    shown = [f"{m.before} -> {m.after}" for m in mutants("x.py", source)]
    assert "h() -> pass" in shown
    assert "a = g(a) -> pass" in shown
    assert "@checked() def f ... return a + 3 -> def f ... return a + 3" in shown
    assert "@checked() def f ... return a + 3 -> @checked() def f ... return a" in shown


@each(
    "source",
    [
        '"""One."""\n',
        "from a import b\n",
        "__all__ = ['x', 'y']\n",
        "Loss = tuple[float, int]\n",
        'def f(x: "int") -> "Tensor":\n    """Words."""\n    return x\n',
        "def f(x):\n    y = g(x)\n    return y\n",  # without its first line it could only crash
    ],
)
def test_what_is_left_alone(source: str) -> None:
    assert mutants("x.py", source) == []


def test_the_words_of_an_error_are_left_alone_but_not_the_raising() -> None:
    found = mutants("x.py", "def f(x):\n    raise ValueError('no')\n")
    assert [m.after for m in found] == ["pass"]


def test_names_are_unique_and_do_not_move_with_the_lines() -> None:
    source = "def f(a):\n    return a + 1 + (a + 1)\n"
    names = [m.name for m in mutants("x.py", source)]
    assert len(set(names)) == len(names)
    assert [m.name for m in mutants("x.py", f"\n\n{source}")] == names


def verdict(*, red: bool) -> Verdict:
    return Verdict(red=red, how="red" if red else "green", by="tests/t.py::test" if red else "", why="", seconds=1.0)


def judged(*reds: bool) -> list[Judged]:
    base = mutants("hone/algo/x.py", "def f(a, b):\n    return a < b + 1\n")
    assert len(base) >= len(reds)
    return [Judged(m, verdict(red=red)) for m, red in zip(base, reds, strict=False)]


def test_the_rows_count_killed_of_all_and_apart_from_the_equivalent(monkeypatch: pytest.MonkeyPatch) -> None:
    found = judged(True, True, True, False)
    monkeypatch.setattr(survivors, "EQUIVALENT", {found[3].mutant.name: "the same"})
    rows = {r["name"]: r for r in rows_of(found, [])}
    assert rows["killed of all"]["ours"] == 75.0
    assert not rows["killed of all"]["ok"]
    assert rows["killed of those that are not equivalent"]["ours"] == 100.0
    assert rows["survivors without an explanation"]["ok"]
    text = page(found, 60.0)
    assert "4 mutants, 3 killed: 75.0 % of all, 100.0 % of the 3 that are not equivalent" in text
    assert "the same" in text


def test_a_survivor_nobody_explains_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {r["name"]: r for r in rows_of(judged(True, False), [])}
    assert rows["survivors without an explanation"]["ours"] == 1
    assert not rows["survivors without an explanation"]["ok"]


def test_the_list_of_survivors_may_not_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    found = judged(True, False)
    names = [j.mutant.name for j in found]
    monkeypatch.setattr(survivors, "EQUIVALENT", {names[0]: "", names[1]: "", "gone": ""})
    monkeypatch.setattr(survivors, "ACCEPTED", {})
    wrong = check_listed([j.mutant for j in found], found)
    assert len(wrong) == 2
    assert wrong[0] == "no such mutant: gone"
    assert wrong[1].startswith("killed after all")


def test_every_listed_survivor_is_a_mutant_of_the_source() -> None:
    folder = program.ROOT / "src" / program.FOLDER
    every: list[Mutant] = [
        m for p in sorted(folder.glob("*.py")) for m in mutants(f"{program.FOLDER}/{p.name}", p.read_text())
    ]
    assert {m.name for m in every} >= program.explained().keys()
    assert len({m.name for m in every}) == len(every)
