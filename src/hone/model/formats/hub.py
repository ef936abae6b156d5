"""Models from the Hugging Face Hub: config, safetensors and tokenizer files. None of them can run code when read."""

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hone.errors import HoneError, count_noun

WANTED = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "model.safetensors.index.json",
)
PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


class Unreachable(HoneError):
    """The download failed: no network, or nothing of this name."""


def download(name: str, folder: Path, *, note: Callable[[str], None]) -> str:
    """Fill the folder from the Hub; returns the commit."""
    hub = _client()
    try:
        found = hub.HfApi().model_info(name)
        names = choose(name, [str(file.rfilename) for file in found.siblings or ()])
        note(f"downloading {name}, {count_noun(len(names), 'file')}")
        hub.snapshot_download(name, revision=found.sha, allow_patterns=names, local_dir=folder)
    except HoneError:
        raise
    except Exception as error:  # an error of the client, of its HTTP library or of the disk
        reason = " ".join(str(error).split()) or type(error).__name__
        raise Unreachable(f"the Hub did not give {name} ({reason[:300]}): check the name and the network") from error
    shutil.rmtree(folder / ".cache", ignore_errors=True)  # the client's notes
    if missing := [file for file in names if not (folder / file).is_file()]:
        raise Unreachable(f"the Hub did not give {missing[0]} of {name}: fetch it again")
    return str(found.sha)


def choose(name: str, files: Sequence[str]) -> list[str]:
    """The files to download from a repository; HoneError if it has not what Hone needs."""
    weights = [f for f in files if f.startswith("model") and f.endswith(".safetensors") and "/" not in f]
    if "model.safetensors" in weights:
        weights = ["model.safetensors"]
    if not weights:
        pickled = next((f for f in files if f.endswith(PICKLED)), None)
        why = f"only {pickled}, which can run code when it is read" if pickled else "no weights that Hone reads"
        raise HoneError(f"{name} has no safetensors ({why}): choose a model that has them")
    for needed in ("config.json", "tokenizer.json"):
        if needed not in files:
            raise HoneError(f"{name} has no {needed}: choose a model in Hugging Face's format that has one")
    return [f for f in WANTED if f in files] + sorted(weights)


def _client() -> Any:
    try:
        import huggingface_hub
    except ImportError as error:
        raise HoneError('models from the Hub need huggingface_hub: pip install "hone[hub]"') from error
    return huggingface_hub
