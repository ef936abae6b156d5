"""The source tree as the style tests see it."""

import ast
import subprocess
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src"
MODULES = sorted(SOURCE.rglob("*.py"))
RECIPES = sorted(path for path in (SOURCE / "hone" / "recipes").glob("*.py") if not path.stem.startswith("_"))

Function = ast.FunctionDef | ast.AsyncFunctionDef


def name_of(path: Path) -> str:
    """src/hone/algo/terms.py -> hone.algo.terms"""
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def functions(path: Path) -> Iterator[Function]:
    return (node for node in ast.walk(parsed(path)) if isinstance(node, Function))


def broken(rule: Callable[[Path], Iterator[str]], paths: Sequence[Path] = MODULES) -> list[str]:
    """What the rule finds wrong with these modules, by the module's name."""
    return [f"{name_of(path)}{why}" for path in paths for why in rule(path)]


def is_kernel(function: Function) -> bool:
    """Compiled by Triton: its arguments are pointers and sizes, a struct cannot hold them."""
    return any(ast.unparse(decorator) == "triton.jit" for decorator in function.decorator_list)


def tracked() -> list[Path]:
    """What is, or would be, committed; outside a clone everything but caches."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True)
    names = done.stdout.decode().split("\0") if done.returncode == 0 else []
    return [ROOT / name for name in names if name and (ROOT / name).is_file()]
