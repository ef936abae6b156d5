"""Documentation, comments and what must never be committed."""

import ast
import re

import pytest
from tree import MODULES, ROOT, Function, is_kernel, name_of, parsed, tracked

# Put together here, so that this file does not contain what it forbids.
FORBIDDEN = {
    "a path of one machine": "|".join("/" + folder + "/" for folder in ("work", "root", "home", "opt", "Users")),
    "a package registry": "|".join(
        re.escape(".".join(parts))
        for parts in (
            ("pypi", "org"),
            ("pythonhosted", "org"),
            ("download", "pytorch", "org"),
            ("npmjs", "org"),
            ("anaconda", "org"),
            ("nodejs", "org"),
        )
    ),
}

RUNS_PROGRAMS = {"hone.reward.sandbox_job"}  # behind the sandbox's wall, where a program is what there is to run


def is_dataclass(node: ast.ClassDef) -> bool:
    return any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list)


def is_obvious(node: ast.AST) -> bool:
    """A torch module, record or exception whose name and fields say it, or a function of one line."""
    if isinstance(node, Function):
        return len(node.body) == 1 and node.body[0].lineno == node.body[0].end_lineno
    if not isinstance(node, ast.ClassDef):
        return False
    bases = " ".join(ast.unparse(base) for base in node.bases)
    return is_dataclass(node) or bool(re.search(r"nn\.Module|NamedTuple|Enum|Error", bases))


@pytest.mark.parametrize("path", [p for p in MODULES if p.read_text(encoding="utf-8").strip()], ids=name_of)
def test_public_names_are_documented(path):
    assert ast.get_docstring(parsed(path)), f"{name_of(path)} has no docstring"
    for node in parsed(path).body:
        if isinstance(node, Function | ast.ClassDef) and not node.name.startswith("_"):
            documented = ast.get_docstring(node) or is_obvious(node)
            assert documented, f"{name_of(path)}.{node.name} has no docstring"


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_functions_are_annotated(path):
    for node in ast.walk(parsed(path)):
        if isinstance(node, Function) and not is_kernel(node):
            a = node.args
            bare = [
                x.arg
                for x in (*a.posonlyargs, *a.args, *a.kwonlyargs)
                if x.annotation is None and x.arg not in ("self", "cls")
            ]
            assert not bare, f"{name_of(path)}.{node.name}: {bare} not annotated"
            assert node.returns is not None, f"{name_of(path)}.{node.name}: no return annotation"


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_no_exception_is_swallowed(path):
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.ExceptHandler):
            assert node.type is not None, f"{name_of(path)} line {node.lineno}: except without a type"
            assert not isinstance(node.body[0], ast.Pass), f"{name_of(path)} line {node.lineno}: swallowed"


OWN_PARENT = {("hone.reward.apart", "pickle.loads")}  # a worker reads what the process that forked it has sent


@pytest.mark.parametrize("path", [p for p in MODULES if name_of(p) not in RUNS_PROGRAMS], ids=name_of)
def test_nothing_is_unpickled_or_evaluated(path):
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            risky = called in ("eval", "exec", "torch.load", "pickle.load", "pickle.loads")
            assert not risky or (name_of(path), called) in OWN_PARENT, name_of(path)


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_no_loose_ends_in_the_source(path):
    text = path.read_text(encoding="utf-8")
    assert not re.search(r"\b(TODO|FIXME|XXX|HACK)\b(?!\(#\d+\))", text)
    assert "utils" not in path.stem


def test_no_machine_paths_or_registry_hosts_are_committed():
    files = tracked()
    found = []
    for path in files:
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # an image
        for kind, pattern in FORBIDDEN.items():
            # A path begins a word: docs/home/ is a path of the project.
            begins = r"(?<![\w.\-~])" if kind.startswith("a path") else ""
            if match := re.search(f"{begins}(?:{pattern})", text):
                found.append(f"{path.relative_to(ROOT)}: {kind} ({match.group()})")
    assert not found


def test_the_documents_a_newcomer_needs_are_there():
    for name in ("README.md", "LICENSE", "CHANGELOG.md", "CONTRIBUTING.md", "Makefile"):
        assert (ROOT / name).is_file(), f"{name} is missing"
    assert "Version 2.0, January 2004" in (ROOT / "LICENSE").read_text()
