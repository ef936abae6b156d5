"""Python files named by the user: recipes, rewards and algorithms, with errors that say what to put right."""

import ast
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable
from dataclasses import is_dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from hone.config.overrides import Choice, build_choice, unknown
from hone.errors import HoneError, not_utf8
from hone.storage.textfile import read_text


def recipe_folders() -> list[Path]:
    """Where a recipe's name is looked up: in ./recipes, the user's own, then in the installed package."""
    return [Path("recipes"), Path(__file__).parents[1] / "recipes"]


def list_recipes() -> dict[str, Path]:
    """The recipes by name: the built-in ones, and those of ./recipes, which come first where the names are equal."""
    files = [file for folder in reversed(recipe_folders()) for file in sorted(folder.glob("*.py"))]
    return {file.stem: file for file in files if not file.stem.startswith("_")}


def load_recipe(source: str) -> Callable[[], Any]:
    """The function of `name`, `path/file.py` or `path/file.py:function`; calling it gives the recipe.

    Without a function's name it is the one called `recipe`, the one called like the file, or the only one.
    """
    file, _, name = source.partition(":")
    path = Path(file) if file.endswith(".py") else recipe_file(file)
    functions = _functions(_load(path))
    name = name or next((n for n in ("recipe", path.stem) if n in functions), "")
    if not name and len(functions) == 1:
        (name,) = functions
    if not name:
        raise HoneError(f"{path} has several functions or none: choose one with {source}:NAME ({_listed(functions)})")
    if name not in functions:
        raise unknown("function", name, functions, owner=str(path))
    return _checked(functions[name], path, name)


def load_function(reference: str) -> Callable[..., Any]:
    """The function that `path/file.py:function` names, for rewards and algorithms."""
    file, _, name = reference.partition(":")
    if not file.endswith(".py") or not name:
        raise HoneError(f"{reference!r} is not a function: write path/file.py:function")
    module = _load(Path(file))
    if not callable(getattr(module, name, None)):
        raise unknown("function", name, _functions(module), owner=file)
    return getattr(module, name)


def load_algorithm(choice: Choice) -> Any:
    """The algorithm that the function `path/file.py:function` returns, called with the choice's settings."""
    path = Path(choice.name.partition(":")[0])
    changed = path.stat().st_mtime_ns if path.is_file() else 0
    made = build_choice(choice, {choice.name: _load_once(choice.name, path.resolve(), changed)})
    if not hasattr(made, "online"):
        raise HoneError(f"{choice.name} returned {type(made).__name__}: return a hone.algo.Algorithm")
    return made


@cache
def _load_once(reference: str, path: Path, changed: int) -> Callable[..., Any]:
    """A recipe asks often for its algorithm: its file runs once, and again only where it was written anew."""
    return load_function(reference)


def source(path: Path) -> str:
    """The text of a recipe's file."""
    try:
        return read_text(path)
    except UnicodeDecodeError as error:
        raise not_utf8(path, error) from error
    except OSError as error:
        raise HoneError(f"cannot read {path}: {error.strerror}: put a Python file there") from error


def summary(path: Path) -> str:
    """The first line of a file's docstring, without running the file."""
    try:
        text = ast.get_docstring(ast.parse(source(path)))
    except (SyntaxError, ValueError, RecursionError, MemoryError, HoneError) as error:
        return f"(cannot be read: {error})"
    return (text or "").partition("\n")[0]


def recipe_file(name: str) -> Path:
    """The file of a recipe's name; hyphens are underscores."""
    known = list_recipes()
    plain = name.replace("-", "_")
    if plain in known:
        return known[plain]
    raise HoneError(f"{unknown('recipe', name, known)}; or give the path of a .py file")


def _load(path: Path) -> ModuleType:
    if not path.is_file():
        raise HoneError(f"no file {path}: check the path")
    name = path.stem if path.stem not in sys.modules else f"recipe_{path.stem}"  # a file called math.py hides nothing
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    if spec is None or spec.loader is None:
        raise HoneError(f"{path} is not a Python file: give the path of one")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)  # last: a recipe may import its neighbours, but hide no library
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if isinstance(error, HoneError | KeyboardInterrupt):
            raise
        raise _failed(error, path, "cannot be loaded") from error
    return module


def _failed(error: BaseException, path: Path, what: str) -> HoneError:
    """The error for users of what their file raised, which need be no Exception."""
    if isinstance(error, SystemExit):  # a script that ends itself: `hone` would end with its code, 0 as a rule
        guard = 'put what it runs under `if __name__ == "__main__":`'
        return HoneError(f"{path}{_line(error, path)} {what}: it ends the program, as sys.exit() does: {guard}")
    return HoneError(f"{path}{_line(error, path)} {what}: {type(error).__name__}: {error}: correct it")


def _line(error: BaseException, path: Path) -> str:
    """Where in the file it was raised."""
    if isinstance(error, SyntaxError):
        return f" line {error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    numbers = [frame.lineno for frame in frames if frame.filename == str(path.resolve())]
    return f" line {numbers[-1]}" if numbers else ""


def _functions(module: ModuleType) -> dict[str, Callable[..., Any]]:
    """The public functions that the file itself defines."""
    code = module.__file__
    return {
        name: value
        for name, value in vars(module).items()
        if inspect.isfunction(value) and not name.startswith("_") and value.__code__.co_filename == code
    }


def _listed(functions: dict[str, Callable[..., Any]]) -> str:
    return ", ".join(functions) or "it has none"


def _checked(function: Callable[..., Any], path: Path, name: str) -> Callable[[], Any]:
    source, empty = f"{path}:{name}", inspect.Parameter.empty
    asked = [p.name for p in inspect.signature(function).parameters.values() if p.default is empty]
    if asked:
        raise HoneError(f"{source} wants {', '.join(asked)}: a recipe takes no arguments, or has defaults for them")

    def build() -> Any:
        try:
            recipe = function()
        except (Exception, KeyboardInterrupt):
            raise  # the command says what to do about these, and --debug shows where
        except BaseException as error:
            raise _failed(error, path, f"fails in {name}()") from error
        if not is_dataclass(recipe) or isinstance(recipe, type):
            raise HoneError(f"{source} returned {type(recipe).__name__}: a recipe returns a hone.Recipe")
        return recipe

    build.__doc__ = function.__doc__
    return build
