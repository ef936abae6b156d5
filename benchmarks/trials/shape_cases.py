"""Tests in the shapes that people write them in, with a program and the verdict it deserves; None: invalid."""

_CASE = """import unittest
class T(unittest.TestCase):
    def setUp(self): self.x = 3
    def test_value(self): self.assertEqual(f(self.x), 3)
    def test_error(self):
        with self.assertRaises(TypeError): f()
"""
_RUNS = (
    "unittest.main()", "unittest.main(argv=[''], exit=False)", "if __name__ == '__main__':\n    unittest.main()",
    "unittest.TextTestRunner().run(unittest.defaultTestLoader.loadTestsFromTestCase(T))",
)  # fmt: skip
_LEAVES = (  # what leaves a test must not pass it
    "raise SystemExit(0)", "import sys; sys.exit()", "import unittest; raise unittest.SkipTest('x')",
    "raise KeyboardInterrupt", "import os; os._exit(0)",
)  # fmt: skip
UNITTEST = (
    *(("def f(x): return x", _CASE + run, 1.0) for run in _RUNS),
    *(("def f(x): return 1", _CASE + run, 0.0) for run in _RUNS),
    *((f"def f(x):\n    {how}", _CASE + run, 0.0) for how in _LEAVES for run in _RUNS[:2]),
    *((f"def f(x):\n    {how}", "assert [f(1)] == [1]", 0.0) for how in _LEAVES),
)
BLIND = (  # a right program, and tests that cannot see what they need of it from their own sandbox
    ("def f(x): return x", "import inspect\nassert len(inspect.signature(f).parameters) == 1", None),
    ("def f(x): return x", "assert eval('f(1)') == 1", None),
    ("def f(x): return x", "exec('assert f(1) == 1')", None),
    ("def f(x): return x", "rows = open('/nosuch').read()\nassert f(1) == 1", None),
    ("class A:\n    def f(self): return 1", "class B(A): pass\nassert B().f() == 1", None),
)
_POINT = """import dataclasses
@dataclasses.dataclass(frozen=True, order=True)
class Point:
    x: int
    def __neg__(self): return Point(-self.x)
    def __abs__(self): return abs(self.x)
    def __float__(self): return float(self.x)
    def __format__(self, spec): return f'<{self.x}{spec}>'
"""
_NODE = """class Node:
    def __init__(s, v): s.v, s.kids, s.seen = v, [], {}
    def size(s): return 1 + sum(k.size() for k in s.kids)
"""
_COLOR = "import enum\nclass Color(enum.Enum):\n    RED = 1\n    BLUE = 2\ndef f(): return Color.RED"
_FAMILY = "class A: pass\nclass B(A): pass"
OBJECTS = (  # objects of the program's classes, which tests name
    (_POINT, "assert {Point(1)} == {Point(1)} and {Point(1): 2}[Point(1)] == 2", 1.0),
    (_POINT, "assert {Point(1)} == {Point(2)}", 0.0),
    (_POINT, "assert -Point(1) == Point(-1) and abs(Point(-3)) == 3 and float(Point(2)) == 2.0", 1.0),
    (_POINT, "assert f'{Point(1):x}' == '<1x>'", 1.0),
    (_POINT, "import copy\nassert copy.deepcopy(Point(1)) == Point(1) and copy.copy(Point(2)).x == 2", 1.0),
    (_COLOR, "assert f() is Color.RED and f() is not Color.BLUE and f() in {Color.RED}", 1.0),
    (_COLOR, "assert f() is Color.BLUE", 0.0),
    (_FAMILY, "assert issubclass(B, A) and not issubclass(A, B)", 1.0),
    (_NODE, "n = Node(1)\nn.kids.append(Node(2))\nn.kids[0].kids.append(Node(3))\nassert n.size() == 3", 1.0),
    (_NODE, "n = Node(1)\nn.kids.append(Node(2))\nassert n.size() == 3", 0.0),
    (_NODE, "n = Node(1)\nn.seen['a'] = 1\nassert n.seen == {'a': 1}", 1.0),
    (_NODE, "n = Node(1)\ndel n.kids\nassert not hasattr(n, 'kids')", 1.0),
    ("def f(n): n.kids.append(5)", "class N: kids = []\nn = N()\nf(n)\nassert n.kids == [5]", 1.0),
    ("def f(t): t[0].append(1)", "t = ([],)\nf(t)\nassert t == ([1],)", 1.0),
    ("def f(d): d['a'].append(1)",
     "import collections\nd = collections.defaultdict(list)\nf(d)\nassert d == {'a': [1]}", 1.0),
    ("def f(a): a[0] = 5", "import array\na = array.array('i', [1, 2])\nf(a)\nassert a[0] == 5", 1.0),
    ("class P:\n    def __sub__(s, o): return s\n    def __abs__(s): return 0\ndef f(p): return p",
     "assert abs(f(P()) - 5) < 0.1", 0.0),
    ("class P:\n    def __hash__(s): return hash(3)\n    def __eq__(s, o): return True\ndef f(p): return p",
     "assert f(P()) in {3}", 0.0),
)  # fmt: skip
_MAIN = "import asyncio\nasync def main():\n    {}\nasyncio.run(main())"
COROUTINES = (
    ("async def f(x): return x", "import asyncio\nassert asyncio.run(f(1)) == 1", 1.0),
    ("async def f(x): return x + 1", "import asyncio\nassert asyncio.run(f(1)) == 1", 0.0),
    ("async def f(x): return x", _MAIN.format("assert await f(2) == 2"), 1.0),
    ("async def f(x): raise ValueError",
     "import asyncio, unittest\nunittest.TestCase().assertRaises(ValueError, asyncio.run, f(1))", 1.0),
    ("import asyncio\nasync def f(x):\n    await asyncio.sleep(0)\n    return x",
     _MAIN.format("assert await asyncio.gather(f(1), f(2)) == [1, 2]"), 1.0),
    ("async def f(n):\n    for i in range(n): yield i",
     _MAIN.format("assert [x async for x in f(3)] == [0, 1, 2]"), 1.0),
)  # fmt: skip
_BAD = """class Bad(ValueError):
    def __init__(self, x):
        super().__init__(f'bad {x}')
        self.x = x
def f(x): raise Bad(x)"""
RAISED = (  # what an exception holds, and what it is
    (_BAD, "try:\n    f(-1)\n    assert False\nexcept Bad as e:\n    assert e.x == -1 and str(e) == 'bad -1'", 1.0),
    (_BAD, "try:\n    f(-1)\n    assert False\nexcept Bad as e:\n    assert e.x == 1", 0.0),
    (_BAD, "try:\n    f(-1)\n    assert False\nexcept Bad as e:\n    assert isinstance(e, ValueError)", 1.0),
    (_BAD, "assert issubclass(Bad, ValueError)\ntry:\n    f(1)\n    assert False\nexcept Bad:\n    pass", 1.0),
    ("class Bad(Exception): pass\ndef f(x): raise Bad",
     "try:\n    f(1)\n    assert False\nexcept Bad as e:\n    assert isinstance(e, ValueError)", 0.0),
    ("def f(x): return open(x)",
     "try:\n    f('/nosuch')\n    assert 0\nexcept OSError as e:\n    assert e.errno == 2", 1.0),
    ("import sys\ndef f(x): sys.exit(3)",
     "try:\n    f(0)\n    assert 0\nexcept SystemExit as e:\n    assert e.code == 3", 1.0),
    ("import json\ndef f(x): return json.loads(x)",
     "import json\ntry:\n    f('[1,')\n    assert 0\nexcept json.JSONDecodeError as e:\n    assert e.pos == 3", 1.0),
)  # fmt: skip
