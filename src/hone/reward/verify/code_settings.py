"""How programs are judged, by name: `code:fraction`, or `code:FILE.yaml` for another language, time or share."""

import math
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from hone.errors import HoneError, not_utf8
from hone.reward.sandbox import Language, Limits
from hone.reward.sandbox_limits import MIB

MODES = ("all", "fraction")
_KINDS: dict[str, tuple[type, ...]] = {"mode": (str,), "seconds": (int, float), "memory": (int,), "fence": (str, list)}
_KINDS |= {"file": (str,), "build": (str, list), "run": (str,)}


def read_settings(setting: str) -> dict[str, Any]:
    """What `code_reward` is to be called with, from a mode or the path of a YAML file."""
    if setting in MODES:
        return {"mode": setting}
    if not setting.endswith((".yaml", ".yml")):
        raise HoneError(f"code:{setting} is not understood: write code:fraction, code:all or code:FILE.yaml")
    found = _read(setting)
    mode, seconds = found.get("mode", "all"), found.get("seconds", 5.0)
    if mode not in MODES:
        raise HoneError(f"code:{setting}: mode is {mode!r}: use {' or '.join(MODES)}")
    if not (math.isfinite(seconds) and seconds > 0):
        raise HoneError(f"code:{setting}: seconds is {seconds!r}: give a number above 0")
    if ("file" in found) != ("run" in found) or ("build" in found and "run" not in found):
        raise HoneError(f"code:{setting}: another language needs both file and run, as in file: main.c, run: ./main")
    about: dict[str, Any] = {"mode": mode, "seconds": float(seconds)}
    if "memory" in found:
        about["memory"] = Limits(memory=found["memory"] * MIB).memory
    if "run" in found:
        build = [shlex.split(command) for command in _texts(found.get("build", []))]
        about["language"] = Language(file=found["file"], run=shlex.split(found["run"]), build=build)
    if "run" in found or "fence" in found:
        about["fences"] = frozenset(["", *(text.lower() for text in _texts(found.get("fence", [])))])
    return about


def _texts(value: str | list[str]) -> list[str]:
    return [value] if isinstance(value, str) else value


def _read(path: str) -> Mapping[str, Any]:
    try:
        found = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise not_utf8(path, error) from error
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise HoneError(f"code:{path} cannot be read ({' '.join(str(error).split())}): give a YAML file") from error
    if not isinstance(found, Mapping) or set(found) - set(_KINDS):
        raise HoneError(f"code:{path}: write settings as name: value, of {', '.join(_KINDS)}")
    for name, value in found.items():
        whole = isinstance(value, _KINDS[name]) and not isinstance(value, bool)
        if not whole or (isinstance(value, list) and not all(isinstance(text, str) for text in value)):
            wanted = " or ".join("a list of texts" if kind is list else kind.__name__ for kind in _KINDS[name])
            raise HoneError(f"code:{path}: {name} is {value!r}: it must be {wanted}")
    return found
