"""JSON objects in the files that come with a model: small, whole, and nothing but a file."""

import json
import re
from pathlib import Path
from typing import Any

from hone.errors import HoneError

SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")  # half of a pair
LARGEST = 32 << 20  # bytes; in memory JSON takes up to 30 times as much


def read_object(path: Path, *, remedy: str = "copy it again") -> dict[str, Any]:
    """The JSON object in a file that must be there."""
    value = read_json(path, remedy=remedy)
    if not isinstance(value, dict):
        raise HoneError(f"{path} holds a {type(value).__name__}, not a JSON object: {remedy}")
    return value


def read_json(path: Path, *, remedy: str) -> Any:
    """The JSON value in a file; a pipe or a device is no file."""
    if not path.is_file():
        raise HoneError(f"there is no {path.name} in {path.parent}: {remedy}")
    if path.stat().st_size > LARGEST:
        raise HoneError(f"{path} has more than {LARGEST >> 20} MiB, which no such file needs: {remedy}")
    try:
        text = path.read_text(encoding="utf-8")
        value = json.loads(text)
        if SURROGATE.search(text):
            json.dumps(value, ensure_ascii=False).encode()  # raises where one is alone: no library takes such text
        return value
    except (ValueError, RecursionError) as error:  # covers bad JSON and bad UTF-8
        raise HoneError(f"{path} is not JSON ({error}): {remedy}") from error
    except OSError as error:
        raise HoneError(f"cannot read {path}: {error.strerror}: {remedy}") from error
