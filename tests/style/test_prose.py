"""Documentation, comments and what must never be committed."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import tree
from tree import ROOT, Function, broken, is_kernel, name_of, parsed, tracked

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

OWN_PARENT = {("hone.reward.workers.reward_worker", "pickle.loads")}  # reads what the process that forked it sent
RUNS_PROGRAMS = {"hone.reward.sandbox.job"}  # behind the sandbox's wall, where a program is what there is to run


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


def undocumented(path: Path) -> Iterator[str]:
    if path.read_text(encoding="utf-8").strip() and not ast.get_docstring(parsed(path)):
        yield " has no docstring"
    for node in parsed(path).body:
        public = isinstance(node, Function | ast.ClassDef) and not node.name.startswith("_")
        if public and not (ast.get_docstring(node) or is_obvious(node)):
            yield f".{node.name} has no docstring"


def unannotated(path: Path) -> Iterator[str]:
    for node in ast.walk(parsed(path)):
        if isinstance(node, Function) and not is_kernel(node):
            a = node.args
            named = [x for x in (*a.posonlyargs, *a.args, *a.kwonlyargs) if x.arg not in ("self", "cls")]
            if bare := [x.arg for x in named if x.annotation is None]:
                yield f".{node.name}: {bare} not annotated"
            if node.returns is None:
                yield f".{node.name}: no return annotation"


def swallowed(path: Path) -> Iterator[str]:
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.ExceptHandler) and (node.type is None or isinstance(node.body[0], ast.Pass)):
            yield f" line {node.lineno}: an exception without a type, or swallowed"


def unpickled_or_evaluated(path: Path) -> Iterator[str]:
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            risky = called in ("eval", "exec", "torch.load", "pickle.load", "pickle.loads")
            if risky and (name_of(path), called) not in OWN_PARENT and name_of(path) not in RUNS_PROGRAMS:
                yield f" line {node.lineno}: {called}"


def loose_ends(path: Path) -> Iterator[str]:
    if found := re.search(r"\b(TODO|FIXME|XXX|HACK)\b(?!\(#\d+\))", path.read_text(encoding="utf-8")):
        yield f": {found[0]}"
    if "utils" in path.stem:
        yield ": say what is in it"


def test_public_names_are_documented():
    assert broken(undocumented) == []


def test_functions_are_annotated():
    assert broken(unannotated) == []


def test_no_exception_is_swallowed():
    assert broken(swallowed) == []


def test_nothing_is_unpickled_or_evaluated():
    assert broken(unpickled_or_evaluated) == []


def test_no_loose_ends_in_the_source():
    assert broken(loose_ends) == []


BAD = """
def bare(x):
    try:
        return eval(x)  # TODO
    except:
        pass
"""


def test_each_rule_finds_what_breaks_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tree, "SOURCE", tmp_path)
    path = tmp_path / "utils.py"
    path.write_text(BAD)
    counts = {undocumented: 2, unannotated: 2, swallowed: 1, unpickled_or_evaluated: 1, loose_ends: 2}
    assert {rule: len(broken(rule, [path])) for rule in counts} == counts


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
