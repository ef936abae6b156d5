"""Reads the tests of a coding task, as HumanEval, MBPP, APPS and similar datasets write them, without running them.

An assert that compares a call on literals with a literal becomes a case: its inputs go into the sandbox, the expected
value stays outside. Other tests (`Asserts`) run in a sandbox of their own, where the program's names are remote.
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

Condition = Callable[[Any], bool]
CACHED_ROWS = 1024  # rows whose tests are cached: many completions are judged by each row


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A call, and whether a returned value is right."""

    call: Call
    condition: Condition
    wanted: Sequence[Any] = ()  # the expected value, if the condition is equality


@dataclass(frozen=True, slots=True)
class Cases:
    """Calls on literals, judged outside of the sandbox."""

    cases: Sequence[Case]
    after: str = ""  # code to append to the program

    @property
    def wanted(self) -> tuple[str, ...]:
        """The names that it calls."""
        return tuple(dict.fromkeys(case.call.name for case in self.cases))


@dataclass(frozen=True, slots=True)
class Scripts:
    """Pairs of a standard input and the expected output."""

    pairs: Sequence[tuple[str, str]]

    @property
    def wanted(self) -> tuple[str, ...]:
        """No names: a script is run, and nothing in it is called."""
        return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Asserts:
    """Python that raises where the program is wrong, one text for each test."""

    setup: str  # what runs before the first test
    texts: Sequence[str]
    refers: Names
    after: str = ""  # code to append to the program
    foreign: Sequence[str] = ()  # names that the tests read and do not call, and that the task does not mention

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
        """The program that the tests' sandbox runs."""
        functions = [f"def {n}(): exec({t!r}, globals())" for n, t in zip(self.tests, self.texts, strict=True)]
        return "\n".join([*self.refers.lacking.values(), self.setup, *functions, ""])

    @property
    def imports(self) -> list[str]:
        """All imports of the tests, except those inside a `try`."""
        lines = [*self.refers.lacking.values()]
        for text in (self.setup, *self.texts):
            lines += _imports(ast.parse(text, UNREAD).body)
        return list(dict.fromkeys(lines))


Tests = Cases | Scripts | Asserts


class NoTests(ValueError):
    """The task has no tests, or they cannot be read."""


def read_tests(task: Task) -> Tests:
    """The tests in the row's columns: `test` and `entry_point`, `test_list`, or `inputs` and `outputs`."""
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
    condition = [_equal_as_json(o, *(o if boxed else ())) for o in outputs]
    cases = [Case(call=c, condition=m, wanted=[o]) for c, m, o in zip(calls, condition, outputs, strict=True)]
    return Cases(cases, after=_METHOD.format(name))


# LeetCode's tasks, of which APPS has many, ask for a method
_METHOD = """
if {0!r} not in globals() and "Solution" in globals():
    {0} = Solution().{0}
"""


def _text(lines: Any) -> str:
    """APPS has some inputs and outputs as lists of lines."""
    return "\n".join(map(str, lines)) if isinstance(lines, list | tuple) else str(lines)


def _parse_test(text: str) -> list[ast.stmt]:
    try:
        return ast.parse(text, UNREAD).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise NoTests(f"a test is not Python: {type(error).__name__}") from error


@lru_cache(CACHED_ROWS)
def _asserts(texts: tuple[str, ...], setup: str, prompt: str) -> Tests:
    """MBPP: one text a test."""
    statements = [s for text in texts for s in _parse_test(text)]
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
    tree = ast.Module(_parse_test(source), [])
    if found := _IN_PROCESS_ONLY & {last_name(n) for n in ast.walk(tree) if isinstance(n, ast.Name | ast.Attribute)}:
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


# names of tools that work only in the program's own process
_IN_PROCESS_ONLY = {
    "redirect_stdout",
    "redirect_stderr",
    "capsys",
    "capfd",
    "monkeypatch",
    "patch",
    "getsource",
    "inspect",
}


def _grouped(texts: Sequence[str]) -> list[str]:
    """The texts as tests: a text that asserts nothing is joined to the next one that does."""
    groups, waiting = list[str](), list[str]()
    for text in texts:
        waiting.append(text)
        if any(isinstance(node, _CHECKS) or _asserting(node) for s in _parse_test(text) for node in ast.walk(s)):
            groups.append("\n".join(waiting))
            waiting.clear()
    return [*groups[:-1], "\n".join([*groups[-1:], *waiting])]


_CHECKS = (ast.Raise, ast.With, ast.Try)


def _asserting(node: ast.AST) -> bool:
    if isinstance(node, ast.Assert):
        return not always(node.test, True)
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and last_name(node.value.func) != "print"


def _imports(body: Sequence[ast.stmt]) -> list[str]:
    """Every import in these statements, also inside functions; none inside a `try`."""
    found = list[str]()
    for statement in body:
        if isinstance(statement, ast.Import | ast.ImportFrom):
            found.append(ast.unparse(statement))
        elif not isinstance(statement, ast.Try):
            inner = [getattr(statement, name, []) for name in ("body", "orelse")]
            found += [line for statements in inner for line in _imports(statements)]
    return found


def preamble(task: Task) -> str | None:
    """The part of a HumanEval prompt before the requested function: imports, helpers; None for other prompts."""
    return (
        _prompt_before_entry(task.prompt, str(task.extra.get("entry_point") or ""))
        if isinstance(task.prompt, str)
        else None
    )


def _prompt_before_entry(prompt: str, entry: str) -> str | None:
    start = re.search(rf"^def {re.escape(entry)}\b", prompt, re.MULTILINE) if entry else None
    return None if start is None else prompt[: start.start()]


@lru_cache(CACHED_ROWS)
def _check(text: str, entry: str, prompt: str) -> Tests:
    """HumanEval: a function `check(candidate)` of asserts. LeetCode's entry point is a method: `Solution().add`."""
    body = _parse_test(text)
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
    setup = f"{_prompt_before_entry(prompt, entry) or ''}\n{text}"
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
        return _case_of_test(statement.test, names)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None  # not a literal


def _case_of_test(test: ast.expr, names: Mapping[str, str | None]) -> Case | None:
    if isinstance(test, ast.Call):
        return _case_of_call(test, bool, names)
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return _case_of_call(test.operand, lambda value: not value, names)
    if not isinstance(test, ast.Compare) or len(test.ops) != 1:
        return None
    left, right, op = test.left, test.comparators[0], test.ops[0]
    if isinstance(op, ast.Lt) and isinstance(left, ast.Call) and ast.unparse(left.func) == "abs":
        return _near(left.args[0], ast.literal_eval(right), names)
    if isinstance(op, ast.Eq):
        case = _case_of_call(left, _equal_to(expected := ast.literal_eval(right)), names)
        return replace(case, wanted=[expected]) if case else None
    if isinstance(op, ast.Is) and isinstance(right, ast.Constant) and right.value in (True, False, None):
        return _case_of_call(left, lambda value: value is right.value, names)
    return None


def _near(difference: ast.expr, most: float, names: Mapping[str, str | None]) -> Case | None:
    if not isinstance(difference, ast.BinOp) or not isinstance(difference.op, ast.Sub):
        return None
    target = ast.literal_eval(difference.right)
    return _case_of_call(
        difference.left, lambda value: isinstance(value, _NUMBERS) and abs(value - target) < most, names
    )


_NUMBERS = (int, float, complex, Fraction, Decimal)


def _case_of_call(call: ast.expr, condition: Condition, names: Mapping[str, str | None]) -> Case | None:
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
        return None
    if call.func.id not in names:
        return None
    name = names[call.func.id] or call.func.id
    args = [ast.literal_eval(argument) for argument in call.args]
    kwargs = {k.arg: ast.literal_eval(k.value) for k in call.keywords if k.arg}
    return Case(call=Call(name, args, kwargs), condition=condition) if len(kwargs) == len(call.keywords) else None


def _equal_to(*expected: Any) -> Condition:
    return lambda value: any(bool(value == one) for one in expected)


def _equal_as_json(*expected: Any) -> Condition:
    """Whether two values are equal in JSON: a tuple is a list, and a dictionary's keys are texts."""
    return lambda value: any(bool(value == one or _as_json(value) == _as_json(one)) for one in expected)


def _as_json(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_as_json(item) for item in value]
    if isinstance(value, dict):
        return {key if isinstance(key, str) else str(key): _as_json(item) for key, item in value.items()}
    return value


def case_verdicts(cases: Sequence[Case], done: Finished) -> list[bool]:
    """One verdict for each case, from the returned value alone. A call without an answer fails."""
    found = [isinstance(r, Returned) and is_met(case, r.value) for case, r in zip(cases, done.results, strict=False)]
    return found + [False] * (len(cases) - len(found))


def is_met(case: Case, value: Any) -> bool:
    """Whether a returned value is right. A value that cannot be compared, such as a signalling NaN, is wrong."""
    try:
        return case.condition(value)
    except (ArithmeticError, TypeError, ValueError):
        return False
