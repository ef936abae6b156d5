"""The tests of a coding task, as HumanEval, MBPP, APPS and their kin write them, read without running them.

An assert that compares a call on literals with a literal becomes a case: inputs go into the sandbox, the expected value
stays outside. Other tests run as they are, in a sandbox of their own where the program's names are remote (`Asserts`).
"""

import ast
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache
from typing import Any

from hone.data.rows.code_asserts import always, asserts, says_nothing
from hone.data.rows.code_names import UNREAD, Names, last_name, names_of, setup_of
from hone.log.samples import prompt_text
from hone.reward.sandbox.sandbox import Call, Finished, Returned
from hone.types import Task

Meets = Callable[[Any], bool]
READ = 1024  # rows whose tests are remembered: many completions are judged by each


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A call, and whether a returned value is right."""

    call: Call
    meets: Meets
    wanted: Sequence[Any] = ()  # the value that is expected, where it is one


@dataclass(frozen=True, slots=True)
class Cases:
    """Calls on literals, judged outside."""

    cases: Sequence[Case]
    after: str = ""  # to be put behind the program

    @property
    def wanted(self) -> tuple[str, ...]:
        """The names that it calls."""
        return tuple(dict.fromkeys(case.call.name for case in self.cases))


@dataclass(frozen=True, slots=True)
class Scripts:
    """Standard input, and the output that is wanted."""

    pairs: Sequence[tuple[str, str]]

    @property
    def wanted(self) -> tuple[str, ...]:
        """None: a script is run, and not called."""
        return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Asserts:
    """Python that raises where the program is wrong, a text a test."""

    setup: str  # what runs before the first
    texts: Sequence[str]
    refers: Names
    after: str = ""  # to be put behind the program
    foreign: Sequence[str] = ()  # names that neither the task mentions nor the tests call, beside others that they call

    @property
    def wanted(self) -> tuple[str, ...]:
        """The names that it wants from the program."""
        return (*self.refers.called, *self.refers.used)

    @property
    def tests(self) -> list[str]:
        """The names of the functions that run the texts, one after the other in one namespace."""
        return [f"test_{i}" for i in range(len(self.texts))]

    @property
    def source(self) -> str:
        """What the sandbox of the tests runs."""
        functions = [f"def {n}(): exec({t!r}, globals())" for n, t in zip(self.tests, self.texts, strict=True)]
        return "\n".join([*self.refers.lacking.values(), self.setup, *functions, ""])

    @property
    def imports(self) -> list[str]:
        """Everything that the tests import anywhere, except imports inside a `try`."""
        lines = [*self.refers.lacking.values()]
        for text in (self.setup, *self.texts):
            lines += _imports(ast.parse(text, UNREAD).body)
        return list(dict.fromkeys(lines))


Tests = Cases | Scripts | Asserts


class NoTests(ValueError):
    """The task has no tests, or they cannot be read."""


def read_tests(task: Task) -> Tests:
    """What the columns of the row ask for: `test` and `entry_point`, `test_list`, or `inputs` and `outputs`."""
    extra = {name: value for name, value in task.extra.items() if value is not None}
    if isinstance(extra.get("input_output"), str):
        extra |= _object(extra["input_output"])
    if extra.get("test_list") or ("test_list" in extra and not extra.keys() & {"test", "inputs"}):
        setup = "\n".join(setup_of(extra))
        return _asserts(tuple(_texts(extra, "test_list")), setup, prompt_text(task))
    if "test" in extra:
        return _check(str(extra["test"]), str(extra.get("entry_point") or ""), prompt_text(task))
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
    meets = [_equals_json(o, *(o if boxed else ())) for o in outputs]
    cases = [Case(call=c, meets=m, wanted=[o]) for c, m, o in zip(calls, meets, outputs, strict=True)]
    return Cases(cases, after=_METHOD.format(name))


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
        return ast.parse(text, UNREAD).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise NoTests(f"a test is not Python: {type(error).__name__}") from error


@lru_cache(READ)
def _asserts(texts: tuple[str, ...], setup: str, prompt: str) -> Tests:
    """MBPP: one text a test."""
    statements = [s for text in texts for s in _parse(text)]
    whole = "\n".join([setup, *texts])
    if not asserts(whole):
        raise NoTests("test_list tests nothing: write asserts on what the function returns")
    names = _names(whole, prompt)
    cases = [_case(s, dict.fromkeys(names.called)) for s in statements if not says_nothing(s)]
    if all(cases):
        return Cases([case for case in cases if case])
    return Asserts(setup=setup, texts=_grouped(texts), refers=names, foreign=_foreign(names, prompt))


def _foreign(names: Names, prompt: str) -> list[str]:
    return [name for name in names.used if names.called and name not in prompt]


def _names(source: str, prompt: str) -> Names:
    tree = ast.Module(_parse(source), [])
    if found := _WATCHES & {last_name(n) for n in ast.walk(tree) if isinstance(n, ast.Name | ast.Attribute)}:
        raise NoTests(f"the tests look into the program's own process ({min(found)}): compare what it returns")
    stored = [n for n in ast.walk(tree) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)]
    if any(n.attr in ("stdin", "stdout", "stderr") for n in stored):
        raise NoTests("the tests replace sys.stdin or sys.stdout: give inputs and outputs, or compare what it returns")
    try:
        names = names_of(source, prompt=prompt)
    except SyntaxError as error:
        raise NoTests(f"a test is not Python: {error.msg}") from error
    bases = {last_name(b) for n in ast.walk(tree) if isinstance(n, ast.ClassDef) for b in n.bases}
    if mine := bases & {*names.called, *names.used}:
        raise NoTests(f"the tests derive a class from the program's {min(mine)}: let them use the class itself")
    return names


# what a test may do only in one process with the program
_WATCHES = {"redirect_stdout", "redirect_stderr", "capsys", "capfd", "monkeypatch", "patch", "getsource", "inspect"}


def _grouped(texts: Sequence[str]) -> list[str]:
    """A text that asserts nothing belongs to the next that does: it is no test that a program could pass."""
    groups, waiting = list[str](), list[str]()
    for text in texts:
        waiting.append(text)
        if any(isinstance(node, _CHECKS) or _asserting(node) for s in _parse(text) for node in ast.walk(s)):
            groups.append("\n".join(waiting))
            waiting.clear()
    return [*groups[:-1], "\n".join([*groups[-1:], *waiting])]


_CHECKS = (ast.Raise, ast.With, ast.Try)


def _asserting(node: ast.AST) -> bool:
    if isinstance(node, ast.Assert):
        return not always(node.test, True)
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and last_name(node.value.func) != "print"


def _imports(body: Sequence[ast.stmt]) -> list[str]:
    """Every import of these statements, whatever function it stands in; none that stands in a `try`."""
    found = list[str]()
    for statement in body:
        if isinstance(statement, ast.Import | ast.ImportFrom):
            found.append(ast.unparse(statement))
        elif not isinstance(statement, ast.Try):
            inner = [getattr(statement, name, []) for name in ("body", "orelse")]
            found += [line for statements in inner for line in _imports(statements)]
    return found


def preamble(task: Task) -> str | None:
    """What a HumanEval prompt puts before the function that is asked for: imports, helpers; None without such one."""
    return _before(task.prompt, str(task.extra.get("entry_point") or "")) if isinstance(task.prompt, str) else None


def _before(prompt: str, entry: str) -> str | None:
    start = re.search(rf"^def {re.escape(entry)}\b", prompt, re.MULTILINE) if entry else None
    return None if start is None else prompt[: start.start()]


@lru_cache(READ)
def _check(text: str, entry: str, prompt: str) -> Tests:
    """HumanEval: a function `check(candidate)` of asserts. LeetCode's entry point is a method: `Solution().add`."""
    body = _parse(text)
    checks = [s for s in body if isinstance(s, ast.FunctionDef) and s.name == "check" and len(s.args.args) == 1]
    if len(checks) != 1 or not _ENTRY.fullmatch(entry):
        raise NoTests("test has no function check(candidate), or there is no entry_point")
    name = entry.rpartition(".")[2]
    after = "" if entry.isidentifier() else f"\n{name} = {entry}\n"
    if not asserts(f"{text}\ncheck({name})"):
        raise NoTests("check(candidate) tests nothing: write asserts on what candidate returns")
    candidate = checks[0].args.args[0].arg
    told = [s for s in checks[0].body if not says_nothing(s)]
    others = [s for s in body if s is not checks[0] and not says_nothing(s) and not isinstance(s, _IMPORTS)]
    cases = [_case(s, {candidate: name}) for s in told]
    if not others and all(cases):
        return Cases([case for case in cases if case], after=after)
    setup = f"{_before(prompt, entry) or ''}\n{text}"
    run = f"check({name})"
    return Asserts(setup=setup, texts=[run], refers=_names(f"{setup}\n{run}", prompt), after=after)


_ENTRY = re.compile(r"[^\W\d]\w*(?:\(\)\.[^\W\d]\w*)?")
_IMPORTS = (ast.Import, ast.ImportFrom)


def _case(statement: ast.stmt, names: Mapping[str, str | None]) -> Case | None:
    """`assert f(literals) == literal`, `is`, truth, `not`, `abs(f(..) - x) < eps`; None for anything else.

    names: what the tests call, and what the program calls it where that is another name.
    """
    if not isinstance(statement, ast.Assert):
        return None
    try:
        return _compared(statement.test, names)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None  # not a literal


def _compared(test: ast.expr, names: Mapping[str, str | None]) -> Case | None:
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
        case = _made(left, _equals(expected := ast.literal_eval(right)), names)
        return replace(case, wanted=[expected]) if case else None
    if isinstance(op, ast.Is) and isinstance(right, ast.Constant) and right.value in (True, False, None):
        return _made(left, lambda value: value is right.value, names)
    return None


def _near(difference: ast.expr, most: float, names: Mapping[str, str | None]) -> Case | None:
    if not isinstance(difference, ast.BinOp) or not isinstance(difference.op, ast.Sub):
        return None
    target = ast.literal_eval(difference.right)
    return _made(difference.left, lambda value: isinstance(value, _NUMBERS) and abs(value - target) < most, names)


_NUMBERS = (int, float, complex, Fraction, Decimal)


def _made(call: ast.expr, meets: Meets, names: Mapping[str, str | None]) -> Case | None:
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
        return None
    if call.func.id not in names:
        return None
    name = names[call.func.id] or call.func.id
    args = [ast.literal_eval(argument) for argument in call.args]
    kwargs = {k.arg: ast.literal_eval(k.value) for k in call.keywords if k.arg}
    return Case(call=Call(name, args, kwargs), meets=meets) if len(kwargs) == len(call.keywords) else None


def _equals(*expected: Any) -> Meets:
    return lambda value: any(bool(value == one) for one in expected)


def _equals_json(*expected: Any) -> Meets:
    """Whether two values are equal as JSON has them: a tuple is a list, and a key of a dictionary is text."""
    return lambda value: any(bool(value == one or _as_json(value) == _as_json(one)) for one in expected)


def _as_json(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_as_json(item) for item in value]
    if isinstance(value, dict):
        return {key if isinstance(key, str) else str(key): _as_json(item) for key, item in value.items()}
    return value


def case_verdicts(cases: Sequence[Case], done: Finished) -> list[bool]:
    """One verdict a case, from what was returned and nothing else; a call that was not answered fails."""
    found = [isinstance(r, Returned) and met(case, r.value) for case, r in zip(cases, done.results, strict=False)]
    return found + [False] * (len(cases) - len(found))


def met(case: Case, value: Any) -> bool:
    """Whether a returned value is right; one that cannot be compared, as a signalling NaN, is not."""
    try:
        return case.meets(value)
    except (ArithmeticError, TypeError, ValueError):
        return False
