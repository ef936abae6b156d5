"""A name imports only from names to its left, and every module can be imported."""

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

from tree import MODULES, broken, name_of, parsed

import hone

ORDER = [
    "types", "algo", "data", "reward", "rollout", "model", "dist", "train", "search", "eval",
    "loop", "signals", "measure", "state", "record", "build", "feeds", "judging", "rewards", "job", "rundir", "rescue",
    "replay", "check", "runner", "guided", "demo", "board", "serve", "commands", "cli", "__main__", "recipes",
]  # fmt: skip
LEAVES = {  # may be imported from anywhere, and import only these
    "errors": set[str](),
    "values": set[str](),
    "textfile": set[str](),
    "config": {"errors", "textfile", "values"},
    "log": {"errors", "types"},
    "recipe_parts": {"errors", "config"},
    "recipe": {"config", "log", "recipe_parts"},
    "recipe_rules": {"errors", "values", "config", "recipe", "recipe_parts"},
    "outline": {"errors", "recipe"},
    "changes": {"errors", "config", "recipe"},
    "load": {"errors", "config", "textfile"},
}
# settings stop at the edge: below it, functions take plain arguments
EDGE = {"config", "recipe", "recipe_parts", "recipe_rules", "outline", "changes", "load", "values"}
READS_SETTINGS = {
    "state", "record", "build", "feeds", "judging", "rewards", "job", "rundir", "rescue", "replay", "check", "runner",
    "demo", "commands", "cli", "recipes", *EDGE,
}  # fmt: skip


def part(module: str) -> str:
    """hone.algo.terms -> algo; hone itself -> "" """
    return module.split(".")[1] if "." in module else ""


def imported(path) -> set[str]:
    """The parts of hone that a module imports, wherever the import stands."""
    found: set[str] = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            found |= {part(alias.name) for alias in node.names if alias.name.split(".")[0] == "hone"}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: write the import in full"
            if node.module == "hone":
                found |= {alias.name for alias in node.names}
            elif (node.module or "").startswith("hone."):
                found.add(part(node.module or ""))
    return found


def allowed(name: str) -> set[str]:
    if name == "recipes":
        return {"load", *hone.__all__}  # as a user's own recipe: the public names, and other recipes by name
    if name in LEAVES:
        return LEAVES[name] | {name}
    return {*LEAVES, *ORDER[: ORDER.index(name) + 1]}


def wrong_imports(path: Path) -> Iterator[str]:
    name = part(name_of(path))
    if not name:
        return  # the package itself only re-exports, lazily
    if wrong := imported(path) - allowed(name):
        yield f" may not import {sorted(wrong)}"
    if name not in READS_SETTINGS and imported(path) & EDGE:
        yield " is below the edge: pass it plain arguments"


def test_imports_go_to_the_left():
    assert broken(wrong_imports) == []


def test_the_rule_itself_is_right():
    assert "train" not in allowed("algo")
    assert "algo" in allowed("train")
    assert {name for path in MODULES if (name := part(name_of(path)))} <= {*ORDER, *LEAVES}


def test_every_module_imports():
    for path in MODULES:
        importlib.import_module(name_of(path))


def test_algorithms_need_torch_and_nothing_else():
    for path in MODULES:
        if part(name_of(path)) in ("algo", "types"):
            names = [a.name for n in ast.walk(parsed(path)) if isinstance(n, ast.Import) for a in n.names]
            names += [n.module or "" for n in ast.walk(parsed(path)) if isinstance(n, ast.ImportFrom)]
            outside = {n.split(".")[0] for n in names} - {"torch", "hone"}
            assert not outside & {"numpy", "transformers", "tokenizers", "safetensors", "rich", "yaml"}, path
