"""The one way to transformers' from_pretrained: it gets files that hold data, never code, and no network.

Every call in Hone goes through here (`tests/model/test_foreign_code.py` looks for others). Code that comes with a model
runs only where the caller was told so by `trust_remote_code`.
"""

import json
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from hone.data.text.json_object import read_object
from hone.errors import HoneError

DATA = (".json", ".safetensors", ".gguf", ".model", ".txt", ".tiktoken", ".jinja", ".vocab", ".spm")
ELSEWHERE = ("adapter_config.json",)  # it names another model, which would be loaded instead
# What a config can say to have code run or kernels downloaded.
CODE = frozenset({
    "auto_map", "custom_pipelines", "custom_generate", "_attn_implementation", "attn_implementation",
    "_attn_implementation_internal", "_experts_implementation", "experts_implementation", "use_kernels",
    "kernel_config", "trust_remote_code", "_name_or_path", "name_or_path",
})  # fmt: skip
_switch = threading.RLock()


def from_pretrained(kind: str, folder: str | Path, *, trust_remote_code: bool = False, **options: Any) -> Any:
    """What the class of transformers makes of a folder. It raises whatever transformers does."""
    import transformers

    with nullcontext(folder) if trust_remote_code else _closed(Path(folder)) as place:
        return getattr(transformers, kind).from_pretrained(
            str(place), local_files_only=True, trust_remote_code=trust_remote_code, **options
        )


def empty_model(kind: str, folder: str | Path) -> Any:
    """The model that the folder's config describes, on the meta device: shapes without values."""
    import torch
    import transformers
    from transformers.initialization import no_init_weights

    config = from_pretrained("AutoConfig", folder)
    with torch.device("meta"), no_init_weights(), offline():
        return getattr(transformers, kind).from_config(config, trust_remote_code=False)


@contextmanager
def _closed(folder: Path) -> Iterator[Path]:
    with data_only(folder) as place, offline():
        yield place


@contextmanager
def data_only(source: Path) -> Iterator[Path]:
    """A folder of links to one file, or to what is data in a folder, with configs that ask for no code."""
    with tempfile.TemporaryDirectory(prefix="hone-model-") as scratch:
        place = Path(scratch)
        for path in source.iterdir() if source.is_dir() else [source]:
            if path.suffix not in DATA or path.name in ELSEWHERE or not path.is_file():
                continue
            plain = _without_code(path)
            if plain is None:
                (place / path.name).symlink_to(path.resolve())
            else:
                (place / path.name).write_text(plain, encoding="utf-8")
        yield place


def _without_code(path: Path) -> str | None:
    """The config without what could make code run; None for any other file."""
    if path.suffix != ".json" or not path.stem.endswith("config"):
        return None
    try:
        return json.dumps(_clean(read_object(path)))
    except HoneError:  # transformers says what is wrong with it
        return None


def _clean(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _clean(item) for key, item in value.items() if key not in CODE}
    return [_clean(item) for item in value] if isinstance(value, list) else value


@contextmanager
def offline() -> Iterator[None]:
    """The Hub's client refuses every request, of any thread."""
    from huggingface_hub import constants

    with _switch:
        before = constants.HF_HUB_OFFLINE
        constants.HF_HUB_OFFLINE = True
        try:
            yield
        finally:
            constants.HF_HUB_OFFLINE = before
