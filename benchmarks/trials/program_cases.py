"""Programs and their tests, with the verdict each deserves: data for the trial and for the tests of the code reward."""

FORMS = (  # what f returns, and a test that is true of it in plain Python
    ("range(3)", "f() == range(3)"), ("range(10**9)", "len(f()) == 10**9"), ("range(3)", "list(f()) == [0, 1, 2]"),
    ("map(str, [1])", "list(f()) == ['1']"), ("filter(None, [0, 1])", "list(f()) == [1]"),
    ("zip([1], [2])", "list(f()) == [(1, 2)]"), ("enumerate('a')", "list(f()) == [(0, 'a')]"),
    ("reversed([1, 2])", "list(f()) == [2, 1]"), ("(x for x in range(3))", "list(f()) == [0, 1, 2]"),
    ("(i for i in range(20000))", "sum(f()) == 199990000"), ("iter([1, 2])", "next(f()) == 1"),
    ("iter([1, 2])", "2 in f()"), ("itertools.count()", "list(itertools.islice(f(), 3)) == [0, 1, 2]"),
    ("[map(str, [1])]", "[list(x) for x in f()] == [['1']]"), ("{1: 2}.keys()", "f() == {1}"),
    ("{1: 2}.keys()", "list(f()) == [1]"), ("{1: 2}.values()", "sorted(f()) == [2]"),
    ("{1: 2}.items()", "f() == {(1, 2)}"), ("{1: 2}.items()", "dict(f()) == {1: 2}"),
    ("collections.deque([1])", "f() == collections.deque([1])"), ("collections.deque([1])", "list(f()) == [1]"),
    ("collections.OrderedDict(a=1)", "f() == {'a': 1}"), ("collections.defaultdict(int, a=1)", "f() == {'a': 1}"),
    ("collections.Counter('aa')", "f() == {'a': 2}"), ("collections.Counter('aa')", "f()['z'] == 0"),
    ("collections.namedtuple('P', 'x y')(1, 2)", "f() == (1, 2)"),
    ("collections.namedtuple('P', 'x y')(1, 2)", "f().y == 2"), ("fractions.Fraction(1, 2)", "f() == 0.5"),
    ("fractions.Fraction(1, 2)", "f() == fractions.Fraction(2, 4)"), ("decimal.Decimal('0.5')", "f() == 0.5"),
    ("decimal.Decimal('1.10')", "f() == decimal.Decimal('1.1')"), ("frozenset([1])", "f() == {1}"),
    ("bytearray(b'a')", "f() == b'a'"), ("memoryview(b'a')", "f() == b'a'"), ("float('nan')", "f() != f()"),
    ("float('inf')", "f() == float('inf')"), ("True", "f() == 1"), ("1.0", "f() == 1"), ("-0.0", "f() == 0"),
    ("10 ** 400", "f() == 10 ** 400"), ("1 + 2j", "f() == 1 + 2j"), ("datetime.date(2020, 1, 2)", "f().day == 2"),
    ("datetime.timedelta(1)", "f() == datetime.timedelta(hours=24)"), ("{(1, 2): {3}}", "f() == {(1, 2): {3}}"),
    ("lambda x: x + 1", "f()(2) == 3"), ("None", "f() is None"), ("'a'", "f() in 'abc'"), ("''", "f() == ''"),
    ("collections.deque([1], maxlen=2)", "f().maxlen == 2"), ("collections.defaultdict(list)", "f()['z'] == []"),
    ("collections.defaultdict(lambda: 7)", "f()['z'] == 7"), ("collections.ChainMap({'a': 1})", "f() == {'a': 1}"),
    ("collections.UserDict(a=1)", "f() == {'a': 1}"), ("collections.UserList([1])", "f() == [1]"),
    ("collections.UserString('a')", "f() == 'a'"), ("...", "f() is ..."),
    ("NotImplemented", "f() is NotImplemented"), ("type(1)", "f() is int"), ("type(None)", "f() == type(None)"),
    ("datetime.timezone.utc", "f() == datetime.timezone.utc"), ("[int, str]", "f() == [int, str]"),
    ("__import__('uuid').UUID(int=5)", "f() == __import__('uuid').UUID(int=5)"),
    ("__import__('types').MappingProxyType({'a': 1})", "f() == {'a': 1}"),
    ("__import__('pathlib').PurePosixPath('/a')", "f() == __import__('pathlib').PurePosixPath('/a')"),
)  # fmt: skip
UNEQUAL = (  # what f returns, and a test that is false of it in plain Python
    ("range(3)", "f() == [0, 1, 2]"), ("map(str, [1])", "f() == ['1']"), ("(1, 2)", "f() == [1, 2]"),
    ("{1: 2}.keys()", "f() == [1]"), ("collections.deque([1])", "f() == [1]"), ("'1'", "f() == 1"),
    ("fractions.Fraction(1, 3)", "f() == 0.5"), ("decimal.Decimal('0.1')", "f() == 0.1"), ("[1]", "f() == {1}"),
    ("float('nan')", "f() == float('nan')"), ("b'a'", "f() == 'a'"), ("lambda: 3", "f() == 3"),
    ("collections.UserList([1])", "f() == (1,)"), ("collections.ChainMap({'a': 1})", "f() == {'a': 2}"),
    ("type(1)", "f() is float"), ("...", "f() is None"), ("collections.defaultdict(list)", "f()['z'] == 0"),
)  # fmt: skip
IMPORTS = ["import collections, datetime, decimal, fractions, itertools, math"]
SLY = """class A:
    def __eq__(s, o): return True
    def __ne__(s, o): return False
    def __lt__(s, o): return True
    __le__ = __gt__ = __ge__ = __contains__ = __eq__
    def __hash__(s): return hash(3)
    def __len__(s): return 1
    def __iter__(s): return iter([s])
    def __sub__(s, o): return 0
    __rsub__ = __sub__
    def __abs__(s): return 0
    def __float__(s): return 0.0
    def __getattr__(s, n): return lambda *a: True
    def __call__(s, *a): return s
class L(list):
    __eq__ = lambda s, o: True
class Point(A):
    def __init__(s, *a): pass
"""
FORGED = (
    "f(1) == 3", "3 == f(1)", "not f(1) != 3", "f(1) in [3]", "f(1) in {3}", "set([f(1)]) == {3}", "[f(1)] == [3]",
    "{f(1): 1} == {3: 1}", "sorted([f(1)]) == [3]", "3 in f(1)", "abs(f(1) - 3) < 0.1", "round(f(1) - 3) == 0",
    "math.isclose(f(1), 3)", "f(1).startswith('abc')", "f(1).issubset({1})", "f(1).isdigit() and f(1) == 3",
    "f(1)() == 3", "f(1) >= 3", "str(f(1)) == '3'", "list(f(1)) == [3]",
    "abs(f(Point(3, 4)) - 5) < 0.1",
)  # fmt: skip
RAISED = (  # a program, a test that expects an exception, the verdict
    ("def f(x): raise ValueError('bad')", "try:\n    f(1)\n    assert False\nexcept ValueError:\n    pass", 1.0),
    ("def f(x): raise KeyError('bad')", "try:\n    f(1)\n    assert False\nexcept ValueError:\n    pass", 0.0),
    ("def f(x): return 1", "try:\n    f(1)\n    assert False\nexcept ValueError:\n    pass", 0.0),
    (
        "def f(x): raise ValueError('bad')",
        "try:\n    f(1)\nexcept ValueError as e:\n    assert str(e) == 'bad'\nelse:\n    assert False",
        1.0,
    ),
    (
        "def f(x): raise ValueError('good')",
        "try:\n    f(1)\nexcept ValueError as e:\n    assert str(e) == 'bad'\nelse:\n    assert False",
        0.0,
    ),
    (
        "class E(ValueError): pass\ndef f(x): raise E",
        "import unittest\nunittest.TestCase().assertRaises(ValueError, f, 1)",
        1.0,
    ),
    ("class E(Exception): pass\ndef f(x): raise E", "try:\n    f(1)\n    assert False\nexcept E:\n    pass", 1.0),
    ("def f(x): return 1 / 0", "import unittest\nwith unittest.TestCase().assertRaises(ZeroDivisionError): f(1)", 1.0),
    ("def f(x): return x", "import unittest\nwith unittest.TestCase().assertRaises(ZeroDivisionError): f(1)", 0.0),
    (
        "import json\ndef f(x): return json.loads(x)",
        "import json\ntry:\n    f('{')\n    assert 0\nexcept json.JSONDecodeError:\n    pass",
        1.0,
    ),
    ("def f(x): raise SystemExit(2)", "try:\n    f(1)\n    assert False\nexcept SystemExit:\n    pass", 1.0),
    ("def f(x): return next(iter(x))", "try:\n    f([])\n    assert False\nexcept StopIteration:\n    pass", 1.0),
    ("def f(x): assert x", "try:\n    f(0)\nexcept AssertionError:\n    pass\nelse:\n    raise ValueError", 1.0),
    (
        "def f(x):\n    yield 1\n    raise ValueError",
        "g = f(1)\nassert next(g) == 1\ntry:\n    next(g)\n    assert 0\nexcept ValueError:\n    pass",
        1.0,
    ),
    ("import os\ndef f(x): os._exit(0)", "ok = 0\ntry:\n    f(1)\nexcept BaseException:\n    ok = 1\nassert ok", 0.0),
    ("g = 1", "ok = 0\ntry:\n    f(1)\nexcept Exception:\n    ok = 1\nassert ok", 0.0),
    ("def f(", "ok = 0\ntry:\n    f(1)\nexcept Exception:\n    ok = 1\nassert ok", 0.0),
)
STACK = """class Stack:
    def __init__(s): s.items = []
    def push(s, x): s.items.append(x)
    def pop(s): return s.items.pop()
    def __len__(s): return len(s.items)
    def __contains__(s, x): return x in s.items
"""
VECTOR = """class V:
    def __init__(s, x): s.x = x
    def __add__(s, o): return V(s.x + o.x)
    def __rmul__(s, k): return V(s.x * k)
    def __matmul__(s, o): return s.x * o.x
    def __eq__(s, o): return isinstance(o, V) and s.x == o.x
"""
CACHE = "def memo(g):\n    c = {}\n    def h(x):\n        if x not in c: c[x] = g(x)\n        return c[x]\n    return h"
CHANGED = (
    ("def f(x): x.sort()", ["x = [3, 1, 2]\nf(x)\nassert x == [1, 2, 3]"], 1.0),
    ("def f(x): x.sort()", ["x = [3, 1, 2]", "f(x)", "assert x == [1, 2, 3]"], 1.0),
    ("def f(x): sorted(x)", ["x = [3, 1, 2]", "f(x)", "assert x == [1, 2, 3]"], 0.0),
    ("def f(x): return sorted(x)", ["x = [3, 1]\nassert f(x) == [1, 3]\nassert x == [3, 1]"], 1.0),
    ("def f(x): x.sort(); return x", ["x = [3, 1]\nassert f(x) == [1, 3]\nassert x == [3, 1]"], 0.0),
    ("def f(x): x.append(4); return x", ["x = [3]\ny = f(x)\nassert y is x and x == [3, 4]"], 1.0),
    ("def f(x): x[0][0] = 9", ["x = [[1], [2]]\ny = x[0]\nf(x)\nassert y == [9]"], 1.0),
    ("def f(d): d['a'] = 1", ["d = {}\nf(d)\nassert d == {'a': 1}"], 1.0),
    ("def f(s): s.add(1)", ["d = set()\nf(s=d)\nassert d == {1}"], 1.0),
    ("def f(b): b[0] = 65", ["b = bytearray(b'x')\nf(b)\nassert b == b'A'"], 1.0),
)
OBJECTS = (
    ("def f(x): return x * 2", "assert list(map(f, [1, 2])) == [2, 4]", 1.0),
    ("def f(x): return x", "assert list(map(f, [1, 2])) == [2, 4]", 0.0),
    ("def f(x): return -x", "assert sorted([1, 3, 2], key=f) == [3, 2, 1]", 1.0),
    ("def f(g, x): return g(g(x))", "assert f(lambda v: v + 1, 1) == 3", 1.0),
    ("def f(g, x): return g(x)", "assert f(lambda v: v + 1, 1) == 3", 0.0),
    ("def f(g): return lambda x: g(x) + 1", "assert f(len)('ab') == 3", 1.0),
    ("def f(g): return list(g)", "assert f(x for x in range(3)) == [0, 1, 2]", 1.0),
    (CACHE, "n = []\n@memo\ndef g(x):\n    n.append(x)\n    return x * 2\nassert g(2) == g(2) == 4 and n == [2]", 1.0),
    (
        STACK,
        "s = Stack()\ns.push(1)\ns.push(2)\nassert len(s) == 2 and 1 in s and s.pop() == 2 and s.items == [1]",
        1.0,
    ),
    (STACK, "s = Stack()\ns.push(1)\nassert isinstance(s, Stack) and s.pop() == 2", 0.0),
    (VECTOR, "assert V(1) + V(2) == V(3) and 3 * V(2) == V(6) and V(2) @ V(3) == 6", 1.0),
    (VECTOR, "assert V(1) + V(2) == V(4)", 0.0),
    ("class Solution:\n    def f(self, x): return x + 1", "assert Solution().f(1) == 2", 1.0),
    ("MAX = 5\ndef f(): return MAX", "assert f() == MAX and MAX == 5", 1.0),
    ("def sum(a, b): return a * b", "assert sum(2, 3) == 6", 1.0),
    ("def f(g): return g.__globals__['EXPECTED']", "EXPECTED = 7\nassert f(lambda: 1) == EXPECTED", 0.0),
    (
        "def f(o): return o.go.__func__.__globals__['EXPECTED']",
        "EXPECTED = 7\nclass T:\n    def go(self): return 1\nassert f(T()) == EXPECTED",
        0.0,
    ),
)
CANNOT_RUN = (  # tests that no program can pass on this machine; the program is right
    "import numpy as np\nassert np.allclose(f(1), 1)",
    "assert np.allclose(f(1), 1)",
    "import pytest\nwith pytest.raises(ValueError):\n    f('x')",
    "with pytest.raises(ValueError):\n    f('x')",
    "import nosuchmodule\nassert f(1) == 1",
    "from math import nosuchname\nassert f(1) == nosuchname",
    "def check():\n    import nosuchmodule\n    assert f(1) == nosuchmodule.one\ncheck()",
    "assert math.isclose(f(1.0), 1.0)",
    "assert f(1) == helper.one",
    "import io, contextlib\nb = io.StringIO()\nwith contextlib.redirect_stdout(b): f(1)\nassert not b.getvalue()",
    "import sys, io\nsys.stdout = io.StringIO()\nf(1)\nassert sys.stdout.getvalue() == ''",
    "assert f(1) ==",
)
FAILS = (  # what only the completion causes
    ("import numpy\ndef f(x): return x", "assert f(1) == 1"),
    ("def g(x): return x", "assert f(1) == 1"),
    ("", "assert f(1) == 1"),
    ("x = (", "assert f(1) == 1"),
    ("def f(x): return 2 * x", "assert math.isclose(f(1.0), 1.0)"),
    ("isclose = lambda *a: True\ndef f(x): return 2", "assert isclose(f(1.0), 1.0)"),
    ("def f(x): raise MemoryError", "assert f(1) == 1"),
    ("import os\nos._exit(0)", "assert f(1) == 1"),
    ("import sys\nsys.exit()", "assert list(f(1)) == [1]"),
    ("def f(x):\n    import os\n    os.write(3, b'\\0\\0\\0\\2{}')\n    return 1", "for i in [f(1)]: assert i == 1"),
)
SCRIPTS = (  # a script without input, and what it prints
    ("import atexit\natexit.register(print, 'bye')\nprint('hi')", "hi\nbye"),
    (
        "import threading, time\nt = lambda: (time.sleep(0.1), print('late'))\nthreading.Thread(target=t).start()",
        "late",
    ),
    ("from concurrent.futures import ThreadPoolExecutor\nThreadPoolExecutor(2).submit(print, 'a')", "a"),
    (
        "import atexit, io, os, sys\nb = io.BytesIO()\nsys.stdout = io.TextIOWrapper(b)\n"
        "atexit.register(lambda: (sys.stdout.flush(), os.write(1, b.getvalue())))\nprint('x')",
        "x",
    ),
    ("f = open(1, 'w', closefd=False)\nprint('a')\nf.write('b')", "a\nb"),
    ("class A:\n    def __del__(s): print('gone')\na = A()", "gone"),
    ("import sys\nsys.__stdout__.write('abc')", "abc"),
    ("import sys, atexit\natexit.register(print, 'bye')\nsys.exit(0)", "bye"),
    ("import os\nprint('p', flush=True)\nif os.fork(): os.wait()\nelse: print('c')", "p\nc"),
    ("import multiprocessing as m\np = m.get_context('fork').Process(target=print, args=['c'])\np.start()", "c"),
    ("import threading, time\nthreading.Thread(target=time.sleep, args=[60], daemon=True).start()\nprint(1)", "1"),
)
