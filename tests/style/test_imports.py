"""The rooms import in one order, at the top of a module, and every module can be imported."""

import ast
import importlib
import os
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
