"""Whether the tests of a coding row assert anything.

Tests that no program can fail would pay for anything, so a row that has only such tests is refused when it is read.
What is not understood here counts as an assertion: tests are refused only where it is plain that they assert nothing.
"""

import ast
import builtins
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hone.data.rows.code_names import UNREAD, last_name, names_of, root_name, setup_of
from hone.errors import HoneError

CHECKED_BY = ("assert", "raises", "fail", "warns")  # how names of functions begin that check what they are given
LOOKED_AT = {
    "callable",
    "hasattr",
    "id",
    "isinstance",
    "print",
    "repr",
    "str",
    "type",
}  # these do not call what they get


def check_row(row: Mapping[str, Any]) -> None:
    """HoneError where the row's tests assert nothing."""
    tests = row.get("test_list")
    if isinstance(tests, list | tuple) and all(isinstance(text, str) for text in tests):
        if not tests and ("inputs" in row or "input_output" in row or "test" in row):
            return
        source = "\n".join([*setup_of(row), *tests])
        if not asserts(source):
            raise _nothing("test_list", "\n".join(tests), "as in assert add(1, 2) == 3")
        return
    text, entry = row.get("test"), str(row.get("entry_point"))
    checked = isinstance(text, str) and "def check(" in text and entry.isidentifier()
    if checked and not asserts(f"{text}\ncheck({entry})"):
        raise _nothing("test", str(text), "in check(candidate), as in assert candidate(1, 2) == 3")


def _nothing(column: str, text: str, how: str) -> HoneError:
    said = " ".join(text.split())
    shown = f" ({said[:60]}{'..' if len(said) > 60 else ''})" if said else ""
    return HoneError(f'column "{column}" asserts nothing{shown}: write asserts on what the function returns, {how}')


def asserts(source: str) -> bool:
    """Whether some program would fail these tests. True if they are not Python: another check says that."""
    try:
        tree = ast.parse(source, UNREAD)
        if _plain(tree):
            return True
        names = names_of(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return True
    reading = _Reading(program={*names.called, *names.used, *names.raised}, tree=tree)
    return reading.block(tree.body) or reading.block(tree.body)  # what a loop changes is known the second time


def _plain(tree: ast.Module) -> bool:
    """Whether there is an `assert f(..) == ..` with an f of the program, as nearly always: that is quick to see."""
    others = {*dir(builtins), *sys.stdlib_module_names, *CHECKED_BY}
    for statement in tree.body:
        if not isinstance(statement, ast.Assert):
            own = [node for node in ast.walk(statement) if not isinstance(node, ast.expr)]
            others |= {getattr(node, "name", "") for node in own} | {getattr(node, "asname", "") for node in own}
            others |= {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}
            continue
        test = statement.test.left if isinstance(statement.test, ast.Compare) else statement.test
        called = isinstance(test, ast.Call) and isinstance(test.func, ast.Name) and test.func.id not in others
        if called and not always(statement.test, True):
            return True
    return False


def says_nothing(statement: ast.stmt) -> bool:
    """Docstrings, `pass`, METADATA, `print("..")` and asserts of what is always true."""
    if isinstance(statement, ast.Pass | ast.Import | ast.ImportFrom):
        return isinstance(statement, ast.Pass)
    if isinstance(statement, ast.Assign):
        return [ast.unparse(t) for t in statement.targets] == ["METADATA"]
    if isinstance(statement, ast.Assert):
        return always(statement.test, True)
    value = statement.value if isinstance(statement, ast.Expr) else None
    printed = isinstance(value, ast.Call) and ast.unparse(value.func) == "print"
    return isinstance(value, ast.Constant) or printed


def always(test: ast.expr, wanted: bool) -> bool:
    """Whether an expression is true (or false) whatever the program returns: a constant, a tuple, `x or True`."""
    if isinstance(test, ast.Constant):
        return bool(test.value) is wanted
    if isinstance(test, ast.Tuple | ast.List | ast.Set):
        starred = any(isinstance(item, ast.Starred) for item in test.elts)
        return not starred and bool(test.elts) is wanted
    if isinstance(test, ast.Dict):
        return None not in test.keys and bool(test.keys) is wanted
    if isinstance(test, ast.Lambda):
        return wanted
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return always(test.operand, not wanted)
    if isinstance(test, ast.BoolOp):
        decides = any if isinstance(test.op, ast.Or) is wanted else all
        return decides(always(value, wanted) for value in test.values)
    if isinstance(test, ast.IfExp):
        return always(test.body, wanted) and always(test.orelse, wanted)
    if isinstance(test, ast.NamedExpr):
        return always(test.value, wanted)
    if isinstance(test, ast.Compare) and len(test.ops) == 1 and wanted:
        same = ast.dump(test.left) == ast.dump(test.comparators[0])
        return same and isinstance(test.ops[0], ast.Eq | ast.Is | ast.LtE | ast.GtE)
    return False


_Defined = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass(slots=True, kw_only=True)
class _Reading:
    """Follows values of the program through the statements of its tests."""

    program: set[str]
    tree: ast.Module
    tainted: set[str] = field(default_factory=set[str])  # variables that hold something of the program
    open: set[str] = field(default_factory=set[str])  # functions that are being read
    functions: dict[str, _Defined] = field(default_factory=dict[str, _Defined])

    def block(self, body: Sequence[ast.stmt], *, guarded: bool = False) -> bool:
        """Whether anything in it checks the program. guarded: the program decides whether it runs."""
        for statement in body:
            if self._checks(statement, guarded=guarded):
                return True
            guarded = guarded or (isinstance(statement, _BRANCHES) and self._touched(statement))
        return False

    def _checks(self, statement: ast.stmt, *, guarded: bool) -> bool:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            self.functions[statement.name] = statement
            return False
        self._taint(statement, guarded=guarded)
        if isinstance(statement, ast.Assert):
            if always(statement.test, False):
                return guarded
            return not always(statement.test, True) and (self.touches(statement.test) or self._called(statement.test))
        if isinstance(statement, ast.Raise):
            return guarded
        if isinstance(statement, ast.Try):
            return self._tried(statement, guarded=guarded)
        if isinstance(statement, ast.With):
            raises, touched = any(_checker(item.context_expr) for item in statement.items), self._touched(statement)
            return (raises and touched) or self.block(statement.body, guarded=guarded or touched)
        if isinstance(statement, ast.If | ast.While | ast.For):
            return self._branches(statement, guarded=guarded)
        if isinstance(statement, ast.Match | ast.TryStar | ast.AsyncWith | ast.AsyncFor):
            return self._touched(statement)
        return any(self._called(value) for value in _expressions(statement))

    def _branches(self, statement: ast.If | ast.While | ast.For, *, guarded: bool) -> bool:
        test = statement.iter if isinstance(statement, ast.For) else statement.test
        if isinstance(statement, ast.If) and always(test, True):
            return self.block(statement.body, guarded=guarded)
        guarded = guarded or self.touches(test)
        runs = not always(test, False) and ast.unparse(test) not in ("range(0)", "''", '""')
        inside = runs and self.block(statement.body, guarded=guarded)
        return inside or self.block(statement.orelse, guarded=guarded)

    def _tried(self, statement: ast.Try, *, guarded: bool) -> bool:
        """Whether a `try` checks anything. A failure that it catches in silence checks nothing."""
        guarded = guarded or self._touched(statement)
        rest = [s for handler in statement.handlers for s in handler.body] + statement.orelse + statement.finalbody
        if self.block(rest, guarded=guarded):
            return True
        silent = any(_catches_asserts(handler) for handler in statement.handlers)
        return not silent and self.block(statement.body, guarded=guarded)

    def _called(self, expression: ast.expr) -> bool:
        """Whether it calls a function that checks the program: assertEqual(f(1), 2), check(f), run()."""
        for call in [n for n in ast.walk(expression) if isinstance(n, ast.Call)]:
            name, root = last_name(call.func), root_name(call.func)
            if name in ("exec", "eval") or (name == "main" and root == "unittest") or name in ("run", "runTest"):
                return name in ("exec", "eval") or any(map(self._enter, list(self.functions)))
            given = [*call.args, *(keyword.value for keyword in call.keywords)]
            if name.startswith(CHECKED_BY) and name not in self.functions and any(map(self.passes, given)):
                return not (len(given) > 1 and ast.dump(given[0]) == ast.dump(given[1]))
            if root in self.functions and self._enter(root, given):
                return True
        return False

    def _enter(self, name: str, given: Sequence[ast.expr] = ()) -> bool:
        """Whether the body of a function of the tests checks the program, called with these arguments."""
        function = self.functions[name]
        if name in self.open:
            return False
        self.open.add(name)
        try:
            if isinstance(function, ast.ClassDef):
                methods = [s for s in function.body if isinstance(s, ast.FunctionDef | ast.AsyncFunctionDef)]
                return any(self.block(method.body) for method in methods)
            for parameter, value in zip(function.args.args, given, strict=False):
                self.program |= {parameter.arg} if root_name(value) in self.program else set[str]()
                self.tainted |= {parameter.arg} if self.touches(value) else set[str]()
            return self.block(function.body)
        finally:
            self.open.remove(name)

    def passes(self, expression: ast.expr) -> bool:
        """Whether it contains something of the program, if only the function itself."""
        return self.touches(expression) or root_name(expression) in self.program

    def touches(self, expression: ast.AST) -> bool:
        """Whether its value depends on a call of the program."""
        for node in ast.walk(expression):
            if isinstance(node, ast.Name) and node.id in self.tainted:
                return True
            if isinstance(node, ast.Call):
                given = [*node.args, *(keyword.value for keyword in node.keywords)]
                lent = last_name(node.func) not in LOOKED_AT and any(self._lends(value) for value in given)
                if root_name(node.func) in self.program or lent or self._helps(root_name(node.func)):
                    return True
            if isinstance(node, ast.Compare) and any(self._constant(side) for side in (node.left, *node.comparators)):
                return True
        return False

    def _lends(self, value: ast.expr) -> bool:
        return any(isinstance(node, ast.Name) and node.id in self.program for node in ast.walk(value))

    def _constant(self, side: ast.expr) -> bool:
        """A name of the program that is compared and nowhere called, as in MAX == 5, or what a class of it holds."""
        if isinstance(side, ast.Attribute) and not side.attr.startswith("__"):
            return root_name(side) in self.program
        called = {root_name(n.func) for n in ast.walk(self.tree) if isinstance(n, ast.Call)}
        return isinstance(side, ast.Name) and side.id in self.program - called and side.id.isupper()

    def _helps(self, name: str) -> bool:
        """A function of the tests that uses the program."""
        function = self.functions.get(name)
        if function is None:
            return False
        return any(isinstance(node, ast.Name) and node.id in self.program for node in ast.walk(function))

    def _touched(self, statement: ast.stmt) -> bool:
        return any(self.touches(node) for node in ast.walk(statement) if isinstance(node, ast.expr))

    def _taint(self, statement: ast.stmt, *, guarded: bool) -> None:
        """Note which variables the statement gives a value of the program, and which objects the program may change.

        guarded: the program decides whether the statement runs, so every variable that it sets counts.
        """
        for node in ast.walk(statement) if not isinstance(statement, _BLOCKS) else [statement]:
            value = getattr(node, "value", None) or getattr(node, "iter", None)
            targets = getattr(node, "targets", None) or [getattr(node, "target", None)]
            given = {n.id for t in targets if t for n in ast.walk(t) if isinstance(n, ast.Name)}
            if isinstance(value, ast.expr) and (guarded or self.touches(value)):
                self.tainted |= given
            elif isinstance(value, ast.expr) and self._lends(value):  # g = f, and {"f": f}
                self.program |= given
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and any(map(self.passes, node.args)):
                self.tainted |= {root_name(node.func)} - self.program - {""}  # found.append(f(1))
            if isinstance(node, ast.Call) and root_name(node.func) in self.program | self.tainted:
                self.tainted |= {
                    n.id
                    for arg in (*node.args, *(k.value for k in node.keywords))
                    for n in ast.walk(arg)
                    if isinstance(n, ast.Name)
                } - self.program
        for item in statement.items if isinstance(statement, ast.With) else ():
            if item.optional_vars is not None and self.touches(item.context_expr):
                self.tainted |= {n.id for n in ast.walk(item.optional_vars) if isinstance(n, ast.Name)}


_BRANCHES = (ast.If, ast.While, ast.For, ast.Try)
_BLOCKS = (ast.If, ast.While, ast.For, ast.Try, ast.With)


def _checker(expression: ast.expr) -> bool:
    return isinstance(expression, ast.Call) and last_name(expression.func).lower().endswith(
        ("raises", "raisesregex", "warns")
    )


def _catches_asserts(handler: ast.ExceptHandler) -> bool:
    """`except`, `except Exception` and `except AssertionError`: a failed assert ends there."""
    caught = [handler.type] if not isinstance(handler.type, ast.Tuple) else handler.type.elts
    return any(kind is None or last_name(kind) in ("AssertionError", "BaseException", "Exception") for kind in caught)


def _expressions(statement: ast.stmt) -> Iterator[ast.expr]:
    yield from (node for node in ast.iter_child_nodes(statement) if isinstance(node, ast.expr))
