"""Small faults in a module's syntax tree, each of which a test should notice. An operator maps a node to the nodes that
could stand in its place; annotations, docstrings, messages of errors and lists of public names are left alone."""

import ast
import copy
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

Operator = Callable[[ast.AST], Iterator[ast.AST]]

SENTENCE = 2  # blanks from which on a text is for a reader, and no setting
COMPARISONS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.Gt), ast.LtE: (ast.Lt, ast.Gt), ast.Gt: (ast.GtE, ast.Lt), ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,), ast.NotEq: (ast.Eq,), ast.In: (ast.NotIn,), ast.NotIn: (ast.In,),
    ast.Is: (ast.IsNot,), ast.IsNot: (ast.Is,),
}  # fmt: skip
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult, ast.Pow: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
}  # fmt: skip
NAMES = {  # functions and methods with a twin that is easily taken for them
    "minimum": "maximum", "maximum": "minimum", "min": "max", "max": "min", "amax": "amin", "sum": "mean",
    "mean": "sum", "any": "all", "all": "any", "sqrt": "square", "square": "abs", "exp": "expm1", "expm1": "exp",
    "log": "log1p", "sigmoid": "tanh", "softplus": "relu", "isfinite": "isinf", "repeat_interleave": "repeat",
    "cumsum": "cumprod", "double": "float", "sequence_sum": "sequence_mean", "sequence_mean": "sequence_sum",
    "zeros_like": "ones_like", "ones_like": "zeros_like", "new_zeros": "new_ones", "sorted": "list",
    "reversed": "list", "k3": "k1", "token_ratio": "row_ratio", "old_logp": "gen_logp", "ref_logp": "old_logp",
    "gen_logp": "old_logp", "mask": "real", "real": "mask",
}  # fmt: skip
DROPPED = {  # methods without which the expression still makes sense
    "detach", "clamp", "double", "flip", "square", "exp", "expm1", "sqrt", "nan_to_num", "float", "to", "sigmoid",
    "cumsum", "sum", "unbind", "repeat_interleave", "isfinite", "any", "values", "expand_as", "view", "where",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One change of one module."""

    module: str  # path below src
    place: str  # the function or class it is in, "" for the module's own level
    before: str
    after: str
    nth: int  # among equal ones in the same place
    line: int
    source: str  # the whole mutated module

    @property
    def name(self) -> str:
        """Tells it from all others and does not move with the line numbers."""
        stem = self.module.rsplit("/", 1)[-1].removesuffix(".py")
        again = f" (#{self.nth})" if self.nth > 1 else ""
        return f"{stem}.{self.place or '-'}: {self.before}  ->  {self.after}{again}"


# --- operators: a node -> what could stand in its place ---


def compare(node: ast.AST) -> Iterator[ast.AST]:
    """< for <= or >, == for !=, in for not in"""
    if isinstance(node, ast.Compare):
        for i, op in enumerate(node.ops):
            for other in COMPARISONS[type(op)]:
                changed = copy.deepcopy(node)
                changed.ops[i] = other()
                yield changed


def arithmetic(node: ast.AST) -> Iterator[ast.AST]:
    """+ for -, * for /, & for |, or one side alone"""
    if isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC:
        changed = copy.deepcopy(node)
        changed.op = ARITHMETIC[type(node.op)]()
        yield changed
        yield copy.deepcopy(node.left)
        if isinstance(node.op, ast.BitAnd | ast.BitOr | ast.Mult | ast.Add):
            yield copy.deepcopy(node.right)


def sign(node: ast.AST) -> Iterator[ast.AST]:
    """-x, not x and ~x lose their sign"""
    if isinstance(node, ast.UnaryOp):
        yield copy.deepcopy(node.operand)


def constant(node: ast.AST) -> Iterator[ast.AST]:
    """Another constant: one more, one less for 1, twice a fraction, the other truth, another word; no other sentence"""
    if not isinstance(node, ast.Constant):
        return
    value = node.value
    if isinstance(value, bool):
        yield ast.Constant(not value)
    elif isinstance(value, int):
        yield from map(ast.Constant, (0, 2) if value == 1 else (value + 1,))
    elif isinstance(value, float):
        yield ast.Constant(value * 2 if value not in (0.0, 1.0) else 1.0 - value)
    elif value is None:
        yield ast.Constant(1)
    elif isinstance(value, str) and value.count(" ") < SENTENCE:
        yield ast.Constant(value + "_" if value else "k1")


def boolean(node: ast.AST) -> Iterator[ast.AST]:
    """and for or, and one condition left out"""
    if isinstance(node, ast.BoolOp):
        changed = copy.deepcopy(node)
        changed.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield changed
        for i in range(len(node.values)):
            rest = [copy.deepcopy(v) for j, v in enumerate(node.values) if j != i]
            yield rest[0] if len(rest) == 1 else ast.BoolOp(copy.deepcopy(node.op), rest)


def condition(node: ast.AST) -> Iterator[ast.AST]:
    """A condition negated, or an else that is always or never taken"""
    if isinstance(node, ast.IfExp):
        yield copy.deepcopy(node.body)
        yield copy.deepcopy(node.orelse)
    elif isinstance(node, ast.If):
        changed = copy.deepcopy(node)
        changed.test = ast.UnaryOp(ast.Not(), changed.test)
        yield changed
    elif isinstance(node, ast.comprehension):
        for i in range(len(node.ifs)):
            changed = copy.deepcopy(node)
            del changed.ifs[i]
            yield changed


def name(node: ast.AST) -> Iterator[ast.AST]:
    """A function, method or column taken for its twin"""
    if isinstance(node, ast.Attribute) and node.attr in NAMES:
        changed = copy.deepcopy(node)
        changed.attr = NAMES[node.attr]
        yield changed
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in NAMES:
        yield ast.Name(NAMES[node.id], ast.Load())


def call(node: ast.AST) -> Iterator[ast.AST]:
    """A method not called, a keyword forgotten or under another name, arguments swapped, one side of torch.where"""
    if not isinstance(node, ast.Call):
        return
    if isinstance(node.func, ast.Attribute) and node.func.attr in DROPPED and ast.unparse(node.func.value) != "torch":
        yield copy.deepcopy(node.func.value)
    for i in range(len(node.keywords)):
        changed = copy.deepcopy(node)
        del changed.keywords[i]
        yield changed
    yield from _clamps(node)
    where = ast.unparse(node.func) == "torch.where"
    if (
        len(node.args) >= 2
        and not _is_set(node)
        and (where or type(node.args[-1]) is type(node.args[-2]) is not ast.Starred)
    ):
        changed = copy.deepcopy(node)
        changed.args[-2:] = changed.args[:-3:-1]
        yield changed
    if where:
        yield from map(copy.deepcopy, node.args[1:])
    elif _is_set(node):
        for i in range(len(node.args)):
            changed = copy.deepcopy(node)
            del changed.args[i]
            yield changed


def _is_set(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func) == "_set"


def _clamps(node: ast.Call) -> Iterator[ast.AST]:
    for i, keyword in enumerate(node.keywords):
        if keyword.arg in ("min", "max"):
            changed = copy.deepcopy(node)
            changed.keywords[i].arg = "max" if keyword.arg == "min" else "min"
            yield changed


def container(node: ast.AST) -> Iterator[ast.AST]:
    """An entry left out"""
    if isinstance(node, ast.Dict):
        for i in range(len(node.keys)):
            changed = copy.deepcopy(node)
            del changed.keys[i], changed.values[i]
            yield changed
    elif isinstance(node, ast.Tuple | ast.Set | ast.List) and not isinstance(getattr(node, "ctx", None), ast.Store):
        kinds = {isinstance(e, ast.Constant) for e in node.elts}
        for i in range(len(node.elts) if len(node.elts) > 1 and len(kinds) == 1 else 0):  # a record is no list
            changed = copy.deepcopy(node)
            del changed.elts[i]
            yield changed


def part(node: ast.AST) -> Iterator[ast.AST]:
    """A slice not taken"""
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Slice):
        yield copy.deepcopy(node.value)


def statement(node: ast.AST) -> Iterator[ast.AST]:
    """A statement left out; an argument returned as it came; a decorator forgotten"""
    if _can_go(node):
        yield ast.Pass()
    elif isinstance(node, ast.FunctionDef):
        yield from _functions(node)


def _can_go(node: ast.AST) -> bool:
    if isinstance(node, ast.Expr):
        return not isinstance(node.value, ast.Constant)
    return isinstance(node, ast.Assign | ast.AugAssign | ast.Raise) or (isinstance(node, ast.If) and not node.orelse)


def _functions(node: ast.FunctionDef) -> Iterator[ast.AST]:
    for i in range(len(node.decorator_list)):
        changed = copy.deepcopy(node)
        del changed.decorator_list[i]
        yield changed
    last, kind = node.body[-1], ast.unparse(node.returns) if node.returns else ""
    same = [a.arg for a in node.args.args if a.annotation and ast.unparse(a.annotation) == kind]
    if same and isinstance(last, ast.Return) and ast.unparse(last) != f"return {same[0]}":
        changed = copy.deepcopy(node)
        changed.body[-1] = ast.Return(ast.Name(same[0], ast.Load()))
        yield changed


OPERATORS: tuple[Operator, ...] = (
    compare, arithmetic, sign, constant, boolean, condition, name, call, container, part, statement,
)  # fmt: skip


# --- walking ---


@dataclass(frozen=True, slots=True)
class _Spot:
    """A node, where it hangs, and what is shown of it."""

    node: ast.AST
    parent: ast.AST
    field: str
    index: int | None
    place: str
    again: bool = False  # an assignment to a name that has a value already


def mutants(module: str, source: str) -> list[Mutant]:
    """Every mutant of a module, in the order of its lines; those that change nothing in the text are left out."""
    tree = ast.parse(source)
    parts = [ast.unparse(statement) for statement in tree.body]  # one of them is written anew for a mutant
    part_of = {id(node): i for i, statement in enumerate(tree.body) for node in ast.walk(statement)}
    seen, found = Counter[tuple[str, str, str]](), list[Mutant]()
    for spot in _spots(tree, ""):
        at = part_of[id(spot.node)]
        for operator in OPERATORS:
            for other in operator(spot.node) if not _is_plain_crash(operator, spot) else ():
                shown, text = _changed(tree, at, spot, other)
                if text == parts[at] or not _compiles(text):
                    continue
                key = (spot.place, *shown)
                seen[key] += 1
                line = getattr(spot.node, "lineno", getattr(spot.parent, "lineno", 0))
                found.append(
                    Mutant(
                        module=module, place=spot.place, before=shown[0], after=shown[1],
                        nth=seen[key], line=line, source="\n".join([*parts[:at], text, *parts[at + 1 :]]),
                    )
                )  # fmt: skip
    return found


def _is_plain_crash(operator: Operator, spot: _Spot) -> bool:
    """A name that is nowhere set, or a tuple too short to be taken apart: such mutants only flatter the count."""
    if operator is container:
        return isinstance(spot.node, ast.Tuple) and isinstance(spot.parent, ast.Assign | ast.Return)
    return operator is statement and isinstance(spot.node, ast.Assign) and not spot.again


def _changed(tree: ast.Module, at: int, spot: _Spot, other: ast.AST) -> tuple[tuple[str, str], str]:
    """(what is shown before and after, the text of that statement of the module), with the tree left as it was."""
    shown = spot.node if isinstance(spot.node, ast.stmt) else spot.parent
    before = _line(shown)
    _put(spot, other)
    try:
        after = _line(shown if shown is not spot.node else other)
        return _around(before, after), ast.unparse(ast.fix_missing_locations(tree.body[at]))
    finally:
        _put(spot, spot.node)


def _put(spot: _Spot, node: ast.AST) -> None:
    if spot.index is None:
        setattr(spot.parent, spot.field, node)
    else:
        getattr(spot.parent, spot.field)[spot.index] = node


def _line(node: ast.AST) -> str:
    """One line; of what has a body only the head, of a function its decorators and end."""
    if isinstance(node, ast.FunctionDef):
        marks = "".join(f"@{ast.unparse(d)} " for d in node.decorator_list)
        return f"{marks}def {node.name} ... {ast.unparse(node.body[-1]).splitlines()[0]}"
    text = ast.unparse(node)
    return text.splitlines()[0] if isinstance(node, ast.If) else " ".join(text.split())


def _around(before: str, after: str, *, most: int = 100, near: int = 36) -> tuple[str, str]:
    """Both texts, cut to the surroundings of their difference where they are long."""
    if max(len(before), len(after)) <= most:
        return before, after
    same = _shared(before, after)
    tail = _shared(before[same:][::-1], after[same:][::-1])
    start = max(0, same - near)
    cut = max(0, tail - near)
    mark = "... " if start else "", " ..." if cut else ""
    return (
        f"{mark[0]}{before[start : len(before) - cut]}{mark[1]}",
        f"{mark[0]}{after[start : len(after) - cut]}{mark[1]}",
    )


def _shared(a: str, b: str) -> int:
    """How many characters both begin with."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _compiles(text: str) -> bool:
    with warnings.catch_warnings(action="ignore"):
        try:
            compile(text, "mutant", "exec")
        except SyntaxError:
            return False
    return True


def _spots(node: ast.AST, place: str) -> Iterator[_Spot]:
    """Every node that may be changed, outermost first."""
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "format_spec", "type_params", "ctx"):
            continue
        for index, child in enumerate(value) if isinstance(value, list) else ((None, value),):
            if _is_word_of_set(child, node, field):  # another word is the entry left out
                continue
            if not isinstance(child, ast.AST) or _is_left_alone(child, node, index if field == "body" else None):
                continue
            yield _Spot(child, node, field, index, place, _is_set_again(child, node))
            named = isinstance(child, ast.FunctionDef | ast.ClassDef)
            inside = f"{place}.{child.name}".lstrip(".") if named else place
            yield from _spots(child, inside)


def _is_set_again(child: ast.AST, parent: ast.AST) -> bool:
    """In the same body or loop, or by an argument; looked for in the value, too: x = f(x)."""
    if not isinstance(child, ast.Assign):
        return False
    targets = {n.id for t in child.targets for n in ast.walk(t) if isinstance(n, ast.Name)}
    nested = not isinstance(parent, ast.FunctionDef | ast.Module)
    return nested or bool(targets & {n.id for n in ast.walk(child.value) if isinstance(n, ast.Name)}) or not targets


def _is_word_of_set(child: object, parent: ast.AST, field: str) -> bool:
    if not isinstance(child, ast.Constant) or not isinstance(child.value, str):
        return False
    return field == "keys" or _is_set(parent) or isinstance(parent, ast.Set | ast.Tuple | ast.List)


def _is_left_alone(child: ast.AST, parent: ast.AST, in_body: int | None) -> bool:
    if isinstance(child, ast.Import | ast.ImportFrom | ast.JoinedStr | ast.expr_context | ast.operator | ast.cmpop):
        return True
    if isinstance(parent, ast.Raise):  # what an error says
        return True
    if isinstance(child, ast.Assign):
        target = ast.unparse(child.targets[0])
        return target == "__all__" or (target[0].isupper() and not target.isupper())  # public names, aliases of types
    axis = isinstance(parent, ast.keyword) and parent.arg == "dim"
    if axis or (isinstance(parent, ast.Call) and ast.unparse(child) == "-1" and parent.args[:1] == [child]):
        return True
    if isinstance(parent, ast.Call) and ast.unparse(parent.func) in ("cast", "ParamSpec") and child in parent.args[:1]:
        return True  # a type
    if isinstance(parent, ast.ClassDef) and ast.unparse(child).startswith("dataclass"):
        return True
    docstring = isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant)
    return docstring and in_body == 0
