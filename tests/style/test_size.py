"""Ceilings of modules and functions."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import tree
from tree import ROOT, Function, broken, functions, is_kernel, name_of

MODULE_LINES = 400
FUNCTION_LINES = 60
PARAMETERS = 8
NESTING = 3

# A factory's parameters are the method's settings; there is no config class to put them into.
FACTORIES = {"hone.algo.online", "hone.algo.offline"}
MORE_PARAMETERS = {
    "hone.loop.online": 12,  # the stages of an iteration, each as it is
    "hone.inference.model.sample": 10,  # what a user may say of a sample, by its name
}
MORE_NESTING = {"hone.loop.online": 4}  # iterations, kept anything, epochs, minibatches: each is a stage


def length(function: Function) -> int:
    return (function.end_lineno or 0) - function.lineno + 1


def parameters(function: Function) -> int:
    a = function.args
    names = [x.arg for x in (*a.posonlyargs, *a.args, *a.kwonlyargs)]
    return len([n for n in names if n not in ("self", "cls")])


def depth(node: ast.AST) -> int:
    """How deep for, while, if, with and try are nested; an elif is no deeper than its if."""
    deep = isinstance(node, ast.For | ast.While | ast.If | ast.With | ast.Try)
    below = [depth(child) for child in ast.iter_child_nodes(node) if not isinstance(child, Function | ast.Lambda)]
    if isinstance(node, ast.If) and len(node.orelse) == 1 and isinstance(node.orelse[0], ast.If):
        others = [depth(child) for child in ast.iter_child_nodes(node) if child is not node.orelse[0]]
        return max(1 + max(others, default=0), depth(node.orelse[0]))
    return deep + max(below, default=0)


def too_long(path: Path) -> Iterator[str]:
    lines = len(path.read_text(encoding="utf-8").splitlines())
    if lines > MODULE_LINES:
        yield f" has {lines} lines"
    for function in functions(path):
        if length(function) > FUNCTION_LINES:
            yield f".{function.name} has {length(function)} lines"


def too_many_arguments(path: Path) -> Iterator[str]:
    for function in functions(path):
        most = MORE_PARAMETERS.get(f"{name_of(path)}.{function.name}", PARAMETERS)
        if name_of(path) not in FACTORIES and not is_kernel(function) and parameters(function) > most:
            yield f".{function.name} has {parameters(function)} parameters"


def too_deep(path: Path) -> Iterator[str]:
    for function in functions(path):
        most = MORE_NESTING.get(f"{name_of(path)}.{function.name}", NESTING)
        if (deepest := max((depth(node) for node in function.body), default=0)) > most:
            yield f".{function.name} nests {deepest} deep"


def test_modules_and_functions_are_short():
    assert broken(too_long) == []


def test_functions_take_few_arguments():
    assert broken(too_many_arguments) == []


def test_functions_are_not_deeply_nested():
    assert broken(too_deep) == []


def test_each_ceiling_finds_what_is_above_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tree, "SOURCE", tmp_path)
    path = tmp_path / "long.py"
    nested = "".join(" " * n + "if a:\n" for n in range(1, NESTING + 2)) + " " * (NESTING + 2) + "return\n"
    long = "def long():\n" + " pass\n" * FUNCTION_LINES
    path.write_text("def deep(a, b, c, d, e, f, g, h, i):\n" + nested + long + "\n" * MODULE_LINES)
    assert [len(broken(rule, [path])) for rule in (too_long, too_many_arguments, too_deep)] == [2, 1, 1]


def test_the_minimal_example_stays_minimal():
    path = ROOT / "examples" / "minimal_grpo.py"
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 160
