"""The settings, package versions and commit that a run's folder records."""

import hashlib
import json
import subprocess
from collections.abc import Collection, Mapping
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from types import MappingProxyType
from typing import Any

from hone.config.changes import Change
from hone.config.overrides import Choice, from_plain, to_json
from hone.config.recipe import Recipe, plan
from hone.errors import HoneError
from hone.storage import files, names

NONE: Mapping[str, Change] = MappingProxyType({})
NO_CONFIG = dict[str, Any]()  # stands for a config.json that is not there
ANEW = "copy it back, or start anew with model.path=CHECKPOINT"


def write_settings(recipe: Recipe, folder: Path, *, step: int = 0, changed: Mapping[str, Change] = NONE) -> None:
    """Write the settings; the first file marks the folder as a run's. changed: settings that change after `step`."""
    changes = _about(folder).get("changes", []) if step else []
    about = {
        "recipe": to_json(recipe),
        "digest": _digest(to_json(recipe)),
        "plan": plan(recipe),
        "python": in_python(recipe),
        "versions": versions(),
        "commit": _commit(),
        "changes": [*changes, *([{"after_step": step, "settings": changed}] if changed else [])],
    }
    for name, content in ((names.RECIPE, about["recipe"]), (names.CONFIG, about)):
        # unescaped: YAML reads this file, and does not join the two halves of an escaped emoji
        files.write_atomically(folder / name, json.dumps(content, indent=1, ensure_ascii=False))


def _digest(settings: Any) -> str:
    """A hash of the settings. Without it a flipped bit in the file would pass as another setting."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode("utf-8", "surrogatepass")).hexdigest()


def settings_in(folder: Path) -> dict[str, Any]:
    """The settings that the run in this folder was started with, as plain data; HoneError where they are damaged.

    Both files hold them. config.json is read, because its digest shows damage. Without it recipe.json is read.
    """
    if (above := _run_around(folder)) is not None:
        raise HoneError(f"{folder} is inside of a run: continue that one, with `hone resume {above}`")
    about, written = _about(folder), (folder / names.RECIPE).is_file()
    if about is NO_CONFIG or not (about or written):  # a model's config.json says nothing of a run
        if not written:
            saved = list(files.checkpoints(folder / names.CHECKPOINTS).values())
            anew = f"its settings are gone, so start anew with model.path={saved[-1]}" if saved else ""
            remedy = anew or "give the folder of one"
            raise HoneError(
                f"{folder} is not a run, there is neither {names.CONFIG} nor {names.RECIPE} of one in it: {remedy}"
            )
        settings = files.read_json(folder / names.RECIPE, remedy=ANEW)
        if not isinstance(settings, dict):
            raise HoneError(f"{folder / names.RECIPE} is damaged: {ANEW}")
        return settings
    settings = about.get("recipe")
    if not isinstance(settings, dict) or about.get("digest", "") != _digest(settings):
        whole = f"copy it back, or remove it, to go on by {names.RECIPE}" if written else ANEW
        raise HoneError(f"{folder / names.CONFIG} is damaged: {whole}")
    return settings


def _about(folder: Path) -> dict[str, Any]:
    """The fields of config.json that have the right type, or NO_CONFIG if the file is gone."""
    if not (folder / names.CONFIG).is_file():
        return NO_CONFIG
    whole = f"copy it back, or remove it, to go on by {names.RECIPE}" if (folder / names.RECIPE).is_file() else ANEW
    content = files.read_json(folder / names.CONFIG, remedy=whole)
    kinds = {"recipe": dict, "digest": str, "python": list, "versions": dict, "changes": list}
    plain = content if isinstance(content, dict) else {}
    return {name: plain[name] for name, kind in kinds.items() if isinstance(plain.get(name), kind)}


def _run_around(folder: Path) -> Path | None:
    """The run that this folder lies in, as a checkpoint does; None outside of a run."""
    return next(
        (path for path in folder.parents[:2] if (path / names.RECIPE).is_file() and (path / names.CONFIG).is_file()),
        None,
    )


def settings_are_written(recipe: Recipe, folder: Path) -> bool:
    """Whether the folder's files hold the recipe as it is now. A resumed run may have more steps than they say."""
    now = json.loads(json.dumps(to_json(recipe)))
    try:
        return settings_in(folder) == now == files.read_json(folder / names.RECIPE)
    except HoneError:
        return False


HOW_IN_PYTHON = "continue it with `hone run RECIPE --resume`, or hone.run(recipe, resume=True)"


def recorded_recipe(folder: Path, *, unread: Collection[str] = (), how: str = HOW_IN_PYTHON) -> Recipe:
    """The recipe that the run in this folder was started with.

    unread: settings that the caller does not need. No file holds a setting that was made in Python: if one of the
    others was, `how` is the remedy that the error names.
    """
    settings = settings_in(folder)
    if made := [str(name) for name in _about(folder).get("python", ()) if name not in unread]:
        raise HoneError(f"{folder} was started with {' and '.join(made)} made in Python: {how}")
    recipe = _known(settings, folder)
    if isinstance(recipe.reward, Mapping):  # in the order it was written: samples list the parts in that order
        recipe = replace(recipe, reward=settings["reward"])
    if recipe.run_dir.resolve() != folder.resolve():  # moved, or called from another folder
        recipe = replace(recipe, out=str(folder))
    return recipe


def _known(settings: dict[str, Any], folder: Path) -> Recipe:
    """The recipe that these settings make, or HoneError with the version that knows them."""
    try:
        return from_plain(settings, Recipe(), where=folder / names.CONFIG)
    except HoneError as error:
        by, here = _about(folder).get("versions", {}).get("hone", "another"), _version("hone")
        raise HoneError(
            f"{error}; it was written by Hone {by}, this is {here}: resume with the one it is of"
        ) from error


def in_python(recipe: Recipe) -> list[str]:
    """The settings that a file cannot hold, so that only the recipe itself can continue the run."""
    plain = {"data": str, "eval_data": str, "reward": str | Mapping, "algo": Choice}
    return [name for name, kind in plain.items() if not isinstance(getattr(recipe, name), kind)]


def versions() -> dict[str, str]:
    """The packages whose numbers may differ from version to version."""
    return {name: _version(name) for name in ("hone", "torch", "tokenizers", "numpy")}


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"  # run from the source tree


def _commit() -> str:
    try:
        process = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True, timeout=5
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return process.stdout.strip() if process.returncode == 0 else ""
