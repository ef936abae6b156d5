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
