"""Test lists that no program can fail, which paid for anything, and tests that look like them and are none."""

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.trials.case import Case, expect, hone
from benchmarks.trials.programs import rows
from hone.data.rows.record import task_row
from hone.errors import HoneError

TITLE = "Test lists that assert nothing"
NOTHING = (
    "assert 1 == 1", "assert True", "assert (f(1) == 2, 'msg')", "assert 2 + 2 == 4", "# assert f(1) == 2", "", "pass",
    "def test():\n    assert f(1) == 2", "if False:\n    assert f(1) == 2", "if 0:\n    assert f(1) == 2",
    "while False:\n    assert f(1) == 2", "for x in []:\n    assert f(x) == 2", "assert f(1) or True", "assert f",
    "assert callable(f)", "assert f is not None", "assert isinstance(f, object)", "assert [f(1) == 2]",
    "assert {'a': f(1)}", "assert 'f(1) == 2'", "assert lambda: f(1) == 2", "f(1)", "f(1) == 2", "x = f(1)",
    "print(f(1))", "assert len([1, 2]) == 2", "assert sum([1, 2]) == 3", "assert f(1) == f(1)", "assert not False",
    "try:\n    assert f(1) == 2\nexcept Exception:\n    pass", "try:\n    f(1)\nexcept ValueError:\n    pass",
    "try:\n    assert f(1) == 2\nexcept AssertionError:\n    print('oh')", "x = 3\nassert x == 3", "assert (x := True)",
    "class T(unittest.TestCase):\n    def test(self):\n        self.assertEqual(f(1), 2)", "assert 1 if f(1) else 1",
    "import math\nassert math.pi > 3", "g = f\nassert g", "g = f\nassert callable(g)", "fs = [f]\nassert fs",
    "with open('x') as h:\n    f(1)", "g = f\ng(1)", "assert f'{f(1)}' or 1", '"""assert f(1) == 2"""',
)  # fmt: skip
SOMETHING = (
    "assert f(1) == 2", "assert sum(10, 15) == 6", "x = [3, 1]\nf(x)\nassert x == [1, 3]", "assert not f(1)",
    "assert list(map(f, [1])) == [2]", "def check(g):\n    assert g(1) == 2\ncheck(f)", "assert (f(1) == 2)",
    "try:\n    f(1)\n    assert False\nexcept ValueError:\n    pass", "assert f(1) == 2, 'x'", "assert MAX == 5",
    "try:\n    f(1)\nexcept ValueError:\n    pass\nelse:\n    raise AssertionError", "assert f(1) is not None",
    "import pytest\nwith pytest.raises(ValueError):\n    f(1)", "assert isinstance(f(1), int)",
    "import unittest\nunittest.TestCase().assertRaises(ValueError, f, 1)", "assert Solution().f(1) == 2",
    "import unittest\nclass T(unittest.TestCase):\n    def test(self): self.assertEqual(f(1), 2)\nunittest.main()",
    "for x in range(3):\n    assert f(x) == x", "s = Stack()\ns.push(1)\nassert s.pop() == 1",
    "def g(x): return f(x) + 1\nassert g(1) == 3", "if f(1) != 2:\n    raise ValueError", "x, y = f(1)\nassert x == 1",
    "import numpy as np\nnp.testing.assert_allclose(f(1), 2)", "assert all(f(x) == x for x in range(4))",
    "ok = False\ntry:\n    f(1)\nexcept ValueError:\n    ok = True\nassert ok", "def t():\n    assert f(1) == 2\nt()",
    "r = []\nfor x in range(3):\n    r.append(f(x))\nassert r == [1, 2, 3]", "assert abs(f(1) - 2) < 1e-6",
    "res = f(1)\nif res != 2:\n    assert False", "d = {}\nd['x'] = f(1)\nassert d == {'x': 2}",
    "@f\ndef g(x): return x\nassert g(1) == 2", "d = set()\nf(s=d)\nassert d == {1}", "assert f(1) and f(2) == 3",
    "g = f\nassert g(1) == 2", "fs = {'f': f}\nfor g in fs.values(): assert g(2) == 2",
    "fs = [f]\nassert fs[0](1) == 2",
    "import contextlib\nok = 1\nwith contextlib.suppress(ValueError):\n    f(1)\n    ok = 0\nassert ok",
    "def raises(g, *a):\n    try: g(*a)\n    except Exception as e: return type(e)\nassert raises(f, 1) == ValueError",
    "def raises(e, g):\n    try: g()\n    except e: return 1\nassert raises(ValueError, f)",
    "A()\nA()\nassert A.n == 2",
    "try:\n    raise Bad(3)\nexcept Bad as e:\n    assert e.x == 3", "for g in (f, h):\n    assert g(1) == 2",
    "import asyncio\nasync def t():\n    assert await f(1) == 2\nasyncio.run(t())",
)  # fmt: skip


def cases(quick: bool) -> Iterator[Case]:
    for text in NOTHING:
        yield Case("a test list that asserts nothing is refused", repr(text), refused({"test_list": [text]}))
    yield Case("a test list that asserts nothing is refused", "an empty list", refused({"test_list": []}))
    yield Case("a test list that asserts nothing is refused", "two of them", refused({"test_list": list(NOTHING[:2])}))
    for text in NOTHING[:12]:
        body = "\n".join(f"    {line}" for line in (text or "pass").replace("f(", "candidate(").split("\n"))
        check = f"def check(candidate):\n{body}\n    pass\n"
        yield Case("a check that asserts nothing is refused", repr(text), refused({"test": check, "entry_point": "f"}))
    for text in SOMETHING:
        yield Case("tests that assert are read", repr(text), accepted({"test_list": [text]}))
    for name in ("mbpp/sanitized-mbpp.json", "humaneval/HumanEval.jsonl.gz"):
        for number, row in enumerate(rows(name)):
            if not quick or number % 20 == 0:
                yield Case("tests that assert are read", f"{name} {number + 1}", accepted(row))
    yield Case("the row and the remedy are named", "hone rewards test", told)


def refused(row: Mapping[str, Any]) -> Callable[[], str | None]:
    def fails() -> str | None:
        try:
            task_row({"prompt": "Write f.", **row})
        except HoneError as error:
            return expect("asserts nothing" in str(error) and "write asserts" in str(error), True)
        return "read without a word"

    return fails


def accepted(row: Mapping[str, Any]) -> Callable[[], str | None]:
    def fails() -> str | None:
        task_row({"prompt": "Write f.", **row})
        return None

    return fails


def told() -> str | None:
    """The command names the row and says what to write."""
    good = {"prompt": "q", "code": "def f(x): return x", "test_list": ["assert f(1) == 1"]}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "rows.jsonl")
        path.write_text("".join(json.dumps(row) + "\n" for row in (good, {**good, "test_list": ["assert 1 == 1"]})))
        run = hone("rewards", "test", str(path), "--reward", "code", "--gold", "code")
    said = "row 2: " in run.stdout and "asserts nothing" in run.stdout and "write asserts" in run.stdout
    return expect((run.returncode, said), (2, True))
