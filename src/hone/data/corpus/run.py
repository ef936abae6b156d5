"""A cleaning run's folder: its manifest, and where each shard's results lie. Settings that changed are refused."""

import hashlib
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

from hone.data.corpus import documents
from hone.data.corpus.documents import Shard
from hone.data.corpus.overlap import named_set
from hone.data.corpus.settings import Settings
from hone.data.corpus.store import read_json, write_json
from hone.errors import HoneError

FORMAT = 1
OURS = ("work", "data", "tokenizer", "report.json", "report.txt", "manifest.json")  # the manifest goes last
LIBRARIES = {"languages": "py3langid", "toxicity": "alt-profanity-check", "near": "rensa"}


@dataclass(frozen=True)
class Run:
    """What the manifest says."""

    folder: Path
    settings: Settings
    shards: tuple[Shard, ...]
    sources: tuple[str, ...]
    hash: str

    @property
    def work(self) -> Path:
        return self.folder / "work"

    @property
    def data(self) -> Path:
        return self.folder / "data"

    def file(self, shard: int, ending: str) -> Path:
        """A result of one shard."""
        return self.work / f"{shard:06d}{ending}"

    def part(self, shard: int) -> Path:
        """What is kept of one shard."""
        return self.data / f"part-{shard:06d}.jsonl"

    @cached_property
    def counts(self) -> list[int]:
        """Documents of each shard that passed the filters."""
        return [read_json(self.file(i, ".json"))["passed"] for i in range(len(self.shards))]


def _manifest(sources: Sequence[str], settings: Settings) -> dict[str, Any]:
    shards = documents.plan(sources, shard_bytes=settings.shard_bytes, split=settings.split)
    paths = [*dict.fromkeys(shard.path for shard in shards), *(e for e in settings.evals if Path(e).is_file())]
    stats = [(path, Path(path).stat()) for path in paths]
    sets = {name: shelf.place.fingerprint for name in settings.evals if (shelf := named_set(name)) is not None}
    promise = {
        "format": FORMAT,
        "sources": list(sources),
        "inputs": [[path, stat.st_size, stat.st_mtime_ns] for path, stat in stats],
        "evals": sets,
        "settings": settings.plain(),
        "versions": {name: _version(name) for key, name in LIBRARIES.items() if getattr(settings, key)},
    }
    text = json.dumps(promise, sort_keys=True)
    digest = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    return {**json.loads(text), "hash": digest, "shards": [asdict(shard) for shard in shards]}


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""  # the step itself says how to install it


def begin(
    folder: Path,
    sources: Sequence[str],
    settings: Settings,
    *,
    restart: bool = False,
    say: Callable[[str], None] = print,
) -> Run:
    """The run of a folder: a new one, or the one that was begun there with the same settings and inputs."""
    manifest = _manifest(sources, settings)
    path = folder / "manifest.json"
    if path.exists():
        old = read_json(path)
        if old["hash"] != manifest["hash"]:
            if not restart:
                raise HoneError(
                    f"{folder} was begun with other {_difference(old, manifest)}: "
                    "choose another folder, or start it anew with --restart"
                )
            say(f"{folder}: other {_difference(old, manifest)}; starting anew")
            _wipe(folder)
        elif restart:
            say(f"{folder}: starting anew")
            _wipe(folder)
    elif sorted(p.name for p in folder.iterdir() if p.name != ".lock"):
        raise HoneError(f"{folder} holds other files: choose an empty folder")
    for name in ("work", "data"):
        (folder / name).mkdir(exist_ok=True)
    if not path.exists():
        write_json(path, manifest)
    return load(folder, manifest["hash"])


@lru_cache(4)
def load(folder: Path, digest: str) -> Run:
    """Read once in a process; the hash tells a folder that was begun anew."""
    manifest = read_json(folder / "manifest.json")
    return Run(
        folder=folder,
        settings=Settings.read(manifest["settings"]),
        shards=tuple(Shard(**shard) for shard in manifest["shards"]),
        sources=tuple(manifest["sources"]),
        hash=digest,
    )


def _wipe(folder: Path) -> None:
    load.cache_clear()
    for name in OURS:
        path = folder / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def _difference(old: dict[str, Any], new: dict[str, Any]) -> str:
    for key in ("format", "sources", "inputs", "evals", "versions"):
        if old[key] != new[key]:
            words = {"inputs": "input files (size or time changed)", "evals": "evaluation sets"}
            return {**words, "versions": "library versions"}.get(key, key)
    changed = [key for key, value in new["settings"].items() if old["settings"].get(key) != value]
    rules = (new["settings"]["rules"], old["settings"].get("rules", {}))
    changed += [f"rules.{name}" for name, value in rules[0].items() if rules[1].get(name) != value]
    return "settings (" + ", ".join(name for name in changed if name != "rules") + ")"
