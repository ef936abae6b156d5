"""The tests of a coding task, as HumanEval, MBPP, APPS and their kin write them, read without running them.

An assert that compares a call on literals with a literal becomes a case: inputs go into the sandbox, the expected value
stays outside. Any other assert is run as it is, in a sandbox of its own where the function is only a voice (`Asserts`).
"""

import ast
import builtins
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hone.reward.sandbox import Call, Finished, Returned
from hone.types import Task

Meets = Callable[[Any], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A call, and whether a returned value is right."""

    call: Call
    meets: Meets


@dataclass(frozen=True, slots=True)
class Cases:
    """Calls on literals, judged outside."""

    cases: Sequence[Case]
    after: str = ""  # to be put behind the program


@dataclass(frozen=True, slots=True)
class Scripts:
    """Standard input, and the output that is wanted."""

    pairs: Sequence[tuple[str, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asserts:
    """Functions that raise where the program is wrong; `names` are those they want from it."""

    source: str
    tests: Sequence[str]
    names: Sequence[str]


Tests = Cases | Scripts | Asserts


class NoTests(ValueError):
    """The task has no tests, or they cannot be read."""


def read_tests(task: Task) -> Tests:
    """What the columns of the row ask for: `test` and `entry_point`, `test_list`, or `inputs` and `outputs`."""
    extra = dict(task.extra)
    if isinstance(extra.get("input_output"), str):
        extra |= _object(extra["input_output"])
    if "test_list" in extra:
        return _asserts(_texts(extra, "test_list"), str(extra.get("test_setup_code") or ""))
    if "test" in extra:
        return _check(str(extra["test"]), task)
    if "inputs" in extra and "outputs" in extra:
        return _pairs(extra)
    raise NoTests("the task has no tests: its row needs test and entry_point, test_list, or inputs and outputs")


def _object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise NoTests("input_output is not JSON") from error
    if not isinstance(found, dict):
        raise NoTests("input_output is not a JSON object")
    return found


def _texts(extra: Mapping[str, Any], name: str) -> list[str]:
    found = extra[name]
    if not isinstance(found, list | tuple) or not found or not all(isinstance(text, str) for text in found):
        raise NoTests(f"{name} is not a list of texts")
    return list(found)


def _pairs(extra: Mapping[str, Any]) -> Tests:
    inputs, outputs, name = extra["inputs"], extra["outputs"], extra.get("fn_name")
    if not isinstance(inputs, list | tuple) or not isinstance(outputs, list | tuple):
        raise NoTests("inputs and outputs are not lists")
    if len(inputs) != len(outputs) or not inputs:
        raise NoTests(f"there are {len(inputs)} inputs and {len(outputs)} outputs")
    if not name and None in (*inputs, *outputs):
        raise NoTests("an input or output is missing")
    if not name:
        return Scripts([(_text(i), _text(o)) for i, o in zip(inputs, outputs, strict=True)])
    if not str(name).isidentifier() or not all(isinstance(arguments, list | tuple) for arguments in inputs):
        raise NoTests("an input of a function is not a list of arguments, or fn_name is no name")
    calls = [Call(str(name), list(arguments)) for arguments in inputs]
    boxed = all(isinstance(o, list | tuple) and len(o) == 1 for o in outputs)  # as APPS does it
    meets = [_equals(o, *(o if boxed else ())) for o in outputs]
    return Cases([Case(call=c, meets=m) for c, m in zip(calls, meets, strict=True)], after=_METHOD.format(name))


# LeetCode's tasks, of which APPS has many, ask for a method
_METHOD = """
if {0!r} not in globals() and "Solution" in globals():
    {0} = Solution().{0}
"""


def _text(lines: Any) -> str:
    """APPS has some inputs and outputs as lists of lines."""
    return "\n".join(map(str, lines)) if isinstance(lines, list | tuple) else str(lines)


def _parse(text: str) -> list[ast.stmt]:
    try:
        return ast.parse(text).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise NoTests(f"a test is not Python: {type(error).__name__}") from error


def _asserts(texts: Sequence[str], setup: str) -> Tests:
    """MBPP: one statement a test."""
    statements = [s for text in texts for s in _parse(text)]
    cases = [_case(s) for s in statements]
    if all(_says_nothing(s) for s in statements):
        raise NoTests("test_list tests nothing")
    if not setup and all(cases):
        return Cases([case for case in cases if case])
    source = "\n".join([setup, *(_function(f"test_{i}", _parse(text)) for i, text in enumerate(texts))])
    return Asserts(source=source, tests=[f"test_{i}" for i in range(len(texts))], names=_wanted(source))


def preamble(task: Task) -> str | None:
    """What a HumanEval prompt puts before the function that is asked for: imports, helpers; None without such one."""
    entry = re.escape(str(task.extra.get("entry_point") or ""))
    if not entry or not isinstance(task.prompt, str):
        return None
    start = re.search(rf"^def {entry}\b", task.prompt, re.MULTILINE)
    return None if start is None else task.prompt[: start.start()]


def _check(text: str, task: Task) -> Tests:
    """HumanEval: a function `check(candidate)` of asserts."""
    body, entry = _parse(text), str(task.extra.get("entry_point") or "")
    checks = [s for s in body if isinstance(s, ast.FunctionDef) and s.name == "check" and len(s.args.args) == 1]
    if len(checks) != 1 or not entry.isidentifier():
        raise NoTests("test has no function check(candidate), or there is no entry_point")
    candidate = checks[0].args.args[0].arg
    told = [s for s in checks[0].body if not _says_nothing(s)]
    others = [s for s in body if s is not checks[0] and not _says_nothing(s)]
    if not told:
        raise NoTests("check(candidate) tests nothing")
    cases = [_case(s, {candidate: entry}) for s in told]
    if not others and all(cases):
        return Cases([case for case in cases if case])
    source = f"{preamble(task) or ''}\n{text}\ndef test_0(): check({entry})\n"
    return Asserts(source=source, tests=["test_0"], names=[entry])


def _says_nothing(statement: ast.stmt) -> bool:
    """Docstrings, `pass`, METADATA, `print("..")` and `assert True, ".."` test nothing."""
    if isinstance(statement, ast.Pass):
        return True
    if isinstance(statement, ast.Assign):
        return [ast.unparse(t) for t in statement.targets] == ["METADATA"]
    if isinstance(statement, ast.Assert):
        return isinstance(statement.test, ast.Constant) and statement.test.value is True
    value = statement.value if isinstance(statement, ast.Expr) else None
    printed = isinstance(value, ast.Call) and ast.unparse(value.func) == "print"
    return isinstance(value, ast.Constant) or printed


def _function(name: str, body: list[ast.stmt]) -> str:
    made = ast.parse(f"def {name}(): pass")
    assert isinstance(made.body[0], ast.FunctionDef)
    made.body[0].body = body or [ast.Pass()]
    return ast.unparse(ast.fix_missing_locations(made))


def _wanted(source: str) -> list[str]:
    """The names that are called and that the tests themselves do not define."""
    tree = ast.parse(source)
    called = {n.func.id for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}
    own = {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.ClassDef)}
    own |= {a.asname or a.name.partition(".")[0] for n in ast.walk(tree) if isinstance(n, _IMPORTS) for a in n.names}
    own |= {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    return sorted(called - own - set(dir(builtins)))


_IMPORTS = (ast.Import, ast.ImportFrom)


def _case(statement: ast.stmt, names: Mapping[str, str] | None = None) -> Case | None:
    """`assert f(literals) == literal`, `is`, truth, `not`, `abs(f(..) - x) < eps`; None for anything else."""
    if not isinstance(statement, ast.Assert):
        return None
    try:
        return _compared(statement.test, names)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None  # not a literal


def _compared(test: ast.expr, names: Mapping[str, str] | None) -> Case | None:
    if isinstance(test, ast.Call):
        return _made(test, bool, names)
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return _made(test.operand, lambda value: not value, names)
    if not isinstance(test, ast.Compare) or len(test.ops) != 1:
        return None
    left, right, op = test.left, test.comparators[0], test.ops[0]
    if isinstance(op, ast.Lt) and isinstance(left, ast.Call) and ast.unparse(left.func) == "abs":
        return _near(left.args[0], ast.literal_eval(right), names)
    if isinstance(op, ast.Eq):
        return _made(left, _equals(ast.literal_eval(right)), names)
    if isinstance(op, ast.Is) and isinstance(right, ast.Constant) and right.value in (True, False, None):
        return _made(left, lambda value: value is right.value, names)
    return None


def _near(difference: ast.expr, most: float, names: Mapping[str, str] | None) -> Case | None:
    if not isinstance(difference, ast.BinOp) or not isinstance(difference.op, ast.Sub):
        return None
    target = ast.literal_eval(difference.right)
    return _made(difference.left, lambda value: isinstance(value, int | float) and abs(value - target) < most, names)


def _made(call: ast.expr, meets: Meets, names: Mapping[str, str] | None) -> Case | None:
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
        return None
    name = call.func.id if names is None else names.get(call.func.id, "")
    if not name or hasattr(builtins, name):
        return None
    args = [ast.literal_eval(argument) for argument in call.args]
    kwargs = {k.arg: ast.literal_eval(k.value) for k in call.keywords if k.arg}
    return Case(call=Call(name, args, kwargs), meets=meets) if len(kwargs) == len(call.keywords) else None


def _equals(*expected: Any) -> Meets:
    return lambda value: any(bool(value == one) for one in expected)


def passed(cases: Sequence[Case], done: Finished) -> list[bool]:
    """One verdict a case, from what was returned and nothing else; a call that was not answered fails."""
    found = [isinstance(r, Returned) and case.meets(r.value) for case, r in zip(cases, done.results, strict=False)]
    return found + [False] * (len(cases) - len(found))
