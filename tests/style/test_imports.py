"""The rooms import in one order, at the top of a module, and every module can be imported."""

import ast
import importlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import tree
from importlinter.api import use_cases  # configures the linter
from tree import MODULES, ROOT, SOURCE, Function, broken, name_of, parsed

CONTRACTS = str(ROOT / "pyproject.toml")
# Commands import what they run when they run it: `hone --help` does not wait for torch.
LATE = ("hone.cli", "hone.__main__", "hone.commands")


def test_the_rooms_keep_their_contracts(capsys: pytest.CaptureFixture[str]):
    kept = use_cases.lint_imports(config_filename=CONTRACTS, cache_dir=None, no_logo=True)
    assert kept, capsys.readouterr().out


WRONG = {  # a contract of pyproject.toml -> the module, and the line that breaks the contract there
    "A room imports only from the rooms below it": ("data/collate.py", "from hone.train import update"),
    "Settings stop at the edge": ("reward/score.py", "from hone.config import recipe"),
    "Algorithms need torch and nothing else": ("algo/terms.py", "import numpy"),
    "No two modules or folders of a room import each other": ("algo/terms.py", "from hone.algo import credit"),
    "Nothing knows a backend or a runner by its name": ("model/decoder.py", "from hone.model.backends import fused"),
}


def test_each_contract_finds_what_breaks_it(tmp_path: Path):
    shutil.copytree(SOURCE / "hone", tmp_path / "hone", ignore=shutil.ignore_patterns("__pycache__"))
    for module, line in WRONG.values():
        path = tmp_path / "hone" / module
        path.write_text(f"{path.read_text(encoding='utf-8')}\n{line}\n", encoding="utf-8")
    command = f"from importlinter.cli import lint_imports; lint_imports({CONTRACTS!r}, no_cache=True, no_logo=True)"
    done = subprocess.run(
        [sys.executable, "-c", command],
        env={**os.environ, "PYTHONPATH": str(tmp_path), "COLUMNS": "200"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    lines = done.stdout.partition("\nContracts:")[0].splitlines()
    for contract in WRONG:
        assert any(line.startswith(contract) and "BROKEN" in line for line in lines), contract + done.stdout


def inner_imports(path: Path) -> Iterator[str]:
    """Imports of hone inside functions; they hide cycles."""
    for function in (node for node in ast.walk(parsed(path)) if isinstance(node, Function)):
        for node in ast.walk(function):
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if any(module.split(".")[0] == "hone" for module in modules):
                yield f" line {node.lineno}: {ast.unparse(node)}"


def test_modules_import_at_their_top():
    early = [path for path in MODULES if not name_of(path).startswith(LATE)]
    assert broken(inner_imports, early) == []


def test_an_import_inside_a_function_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tree, "SOURCE", tmp_path)
    path = tmp_path / "late.py"
    path.write_text("def f():\n    import hone.types\n    import torch\n    from hone import algo\n")
    assert len(broken(inner_imports, [path])) == 2


def test_imports_are_written_in_full():
    relative = [
        f"{name_of(path)} line {node.lineno}"
        for path in MODULES
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.ImportFrom) and node.level
    ]
    assert relative == []


def test_every_module_imports():
    for path in MODULES:
        importlib.import_module(name_of(path))


ALLOWED = re.compile(r"\bMay import: (.+?)\.(?:\s|$)")
BELOW, PUBLIC = "every room below it", "the public names of `hone`"  # test_the_rooms_keep_their_contracts holds these


def named(path: Path) -> set[str] | None:
    """The rooms and modules, below hone, that a room's docstring allows; None without a line that says so."""
    found = ALLOWED.search(" ".join((ast.get_docstring(parsed(path)) or "").split()))
    return set(re.sub(r" \([^)]*\)", "", found[1]).split(", ")) if found else None


def imported(room: str) -> set[str]:
    """The modules, below hone, that modules of the room import from outside of it."""
    every = {name_of(path) for path in MODULES}
    found = set[str]()
    for path in MODULES:
        if f"{name_of(path)}.".startswith(f"{room}."):
            for node in ast.walk(parsed(path)):
                if isinstance(node, ast.ImportFrom):
                    module = node.module or ""
                    found |= {x if (x := f"{module}.{alias.name}") in every else module for alias in node.names}
                elif isinstance(node, ast.Import):
                    found |= {alias.name for alias in node.names}
    outside = {name for name in found if not f"{name}.".startswith(f"{room}.")}
    return {name.removeprefix("hone.") for name in outside if name.startswith("hone.")}


def lies(path: Path) -> Iterator[str]:
    """What a room's docstring says of its imports and is not so."""
    allowed, found = named(path), imported(name_of(path))
    if allowed is None:
        yield " has no sentence 'May import: ROOM, ROOM.'"
    elif BELOW not in allowed:
        covers = {name: {x for x in found if f"{x}.".startswith(f"{name}.")} for name in allowed - {PUBLIC}}
        yield from (f" may import {name} and does not" for name, used in covers.items() if not used)
        yield from (f" imports {name} and may not" for name in found - set[str]().union(*covers.values()))


def test_a_room_imports_what_its_docstring_says():
    rooms = [path for path in MODULES if path.name == "__init__.py" and path.parent != SOURCE / "hone"]
    assert broken(lies, rooms) == []


def test_a_docstring_that_lies_about_imports_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    texts = {f"{name}.py": "" for name in ("types", "errors", "log/__init__", "log/limits", "log/stats")}
    said = ("May import: types, log (here), errors.", "It may import types.", "May import: log.limits. No more.", "")
    for room, line in zip("abcd", said, strict=True):
        texts[f"{room}/__init__.py"] = f'"""A room.\n\n{line}\n"""\n'
        texts[f"{room}/inside.py"] = f"from hone import types\nfrom hone.log.limits import x\nimport hone.{room}\n"
    for name, text in texts.items():
        (path := tmp_path / "hone" / name).parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    modules = sorted(tmp_path.rglob("*.py"))
    monkeypatch.setattr(tree, "SOURCE", tmp_path)
    monkeypatch.setitem(globals(), "MODULES", modules)
    rooms = [path for path in modules if path.parent.name in "abcd"]
    assert broken(lies, [path for path in rooms if path.name == "__init__.py"]) == [
        "hone.a may import errors and does not",
        "hone.b has no sentence 'May import: ROOM, ROOM.'",
        "hone.c imports types and may not",
        "hone.d has no sentence 'May import: ROOM, ROOM.'",
    ]
