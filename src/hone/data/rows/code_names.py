"""The names that the tests of a coding row want of a program, found without running them."""

import ast
import builtins
import symtable
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# Code that nobody here wrote is read under this name; that it has a doubtful escape is no news to who trains.
UNREAD = "<unread>"
warnings.filterwarnings("ignore", module=UNREAD)
# what tests use without an import where they rely on the program's: modules by their usual names, and names of modules
ALIASES = {"np": "numpy", "pd": "pandas", "nx": "networkx", "sp": "sympy"}
OUTSIDE = ("numpy", "pandas", "pytest", "scipy", "sympy", "torch", "hypothesis")
MEMBERS = {
    **dict.fromkeys(("isclose", "isnan", "isinf"), "math"),
    **dict.fromkeys(("Counter", "OrderedDict", "defaultdict", "deque", "namedtuple"), "collections"),
    **{"Fraction": "fractions", "Decimal": "decimal", "islice": "itertools", "deepcopy": "copy"},
}
PLAIN = {name: getattr(builtins, name) for name in ("abs", "all", "any", "len", "max", "min", "sorted", "sum")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """What tests refer to and do not define."""

    called: Sequence[str]  # functions and classes of the program
    used: Sequence[str]  # of the program, and not called by name: passed to a function, or a constant
    raised: Sequence[str]  # exceptions of the program
    lacking: Mapping[str, str]  # a name to the import that the tests forgot


def setup_of(row: Mapping[str, Any]) -> list[str]:
    """What runs before the tests: test_imports (texts) and test_setup_code (text)."""
    imports, setup = row.get("test_imports"), row.get("test_setup_code")
    texts = [imports] if isinstance(imports, str) else imports or ()
    return [text for text in (*texts, setup) if isinstance(text, str) and text.strip()]


def names_of(source: str, *, prompt: str = "") -> Names:
    """The names of the source that it does not define; SyntaxError where it is not Python."""
    tree = ast.parse(source, UNREAD)
    free = free_names(source) - set(dir(builtins))
    called = {n.func.id for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}
    bases = [n.value for n in ast.walk(tree) if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name)]
    alone = {id(base) for base in bases}
    bare = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and id(n) not in alone}
    lacking = {name: line for name in free - bare if (line := _module(name))}
    others = free - lacking.keys()
    if others - MEMBERS.keys():  # else the one function that is wanted has such a name
        forgotten = {name for name in others & MEMBERS.keys() if name not in prompt}
        lacking |= {name: f"from {MEMBERS[name]} import {name}" for name in forgotten}
    mine = free - lacking.keys() or own_builtins(tree)
    raised = mine & _exceptions(tree)
    return Names(
        called=sorted(mine & called - raised),
        used=sorted(mine - called - raised),
        raised=sorted(raised),
        lacking=lacking,
    )


def _module(name: str) -> str:
    whole = ALIASES.get(name, name)
    known = whole in sys.stdlib_module_names or whole in OUTSIDE
    return (f"import {whole}" + (f" as {name}" if whole != name else "")) if known else ""


def free_names(source: str) -> set[str]:
    """Names that are read and that nothing in the source gives a value."""
    top = symtable.symtable(source, UNREAD, "exec")
    own = {s.get_name() for s in top.get_symbols() if s.is_assigned() or s.is_imported() or s.is_namespace()}
    found, tables = set[str](), [top]
    while tables:
        table = tables.pop()
        tables += table.get_children()
        symbols = table.get_symbols()
        found |= {s.get_name() for s in symbols if s.is_referenced() and (table is top or s.is_global())}
    return {name for name in found - own if not name.startswith("__")}


def own_builtins(tree: ast.Module) -> set[str]:
    """Functions of Python that a program is to write anew: tests that call no other name call these in every assert.

    An assert that is true of Python's own function is none about the program: `assert sum([1, 2]) == 3`.
    """
    tests = [n.test for n in ast.walk(tree) if isinstance(n, ast.Assert)]
    found = set[str]()
    for test in tests:
        call = test.left if isinstance(test, ast.Compare) else test
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and not _holds(test, call):
            found.add(call.func.id)
    found -= {"eval", "exec", "getattr", "globals"}  # they lead to names that cannot be seen here
    return found if len(found) == 1 else set()


def _holds(test: ast.expr, call: ast.Call) -> bool:
    """Whether `f(literals) == literal` is true of Python's own f."""
    assert isinstance(call.func, ast.Name)
    if call.func.id not in PLAIN:
        return False
    try:
        value = PLAIN[call.func.id](*(ast.literal_eval(argument) for argument in call.args))
        return bool(value == ast.literal_eval(test.comparators[0]) if isinstance(test, ast.Compare) else value)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return False


def _exceptions(tree: ast.Module) -> set[str]:
    """Names that are caught, or given to a function that checks what is raised or catches what it is given."""
    found = set[str]()
    own = {n.name: n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler) and node.type is not None:
            found |= _read(node.type)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in own:
            function = own[node.func.id]
            caught = [n.type for n in ast.walk(function) if isinstance(n, ast.ExceptHandler) and n.type]
            names = {name for kind in caught for name in _read(kind)}
            given = zip(function.args.args, node.args, strict=False)
            found |= {name for parameter, value in given if parameter.arg in names for name in _read(value)}
        elif isinstance(node, ast.Call) and node.args and last_name(node.func).lower().endswith("raises"):
            found |= _read(node.args[0])
    return found


def _read(expression: ast.expr) -> set[str]:
    return {n.id for n in ast.walk(expression) if isinstance(n, ast.Name)}


def last_name(function: ast.expr) -> str:
    """f of f, a.f and a.b.f."""
    return (
        function.attr if isinstance(function, ast.Attribute) else function.id if isinstance(function, ast.Name) else ""
    )


def root_name(expression: ast.expr) -> str:
    """a of a.b[c].d() and a itself."""
    while isinstance(expression, ast.Attribute | ast.Subscript | ast.Call):
        expression = expression.func if isinstance(expression, ast.Call) else expression.value
    return expression.id if isinstance(expression, ast.Name) else ""
