"""A cleaning run's folder: its manifest and the files of each shard. Changed settings are refused."""

import hashlib
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hone.data.corpus import documents
from hone.data.corpus.atomic import LOCK, read_json, write_json
from hone.data.corpus.documents import Shard
from hone.data.corpus.overlap import named_set
from hone.data.corpus.settings import CorpusSettings
from hone.errors import HoneError

FORMAT = 1
OURS = ("work", "data", "tokenizer", "report.json", "report.txt", "manifest.json")  # the manifest goes last
LIBRARIES = {"languages": "py3langid", "toxicity": "alt-profanity-check", "near": "rensa"}
MODULES = {"py3langid": "py3langid", "alt-profanity-check": "profanity_check", "rensa": "rensa"}


@dataclass(frozen=True)
class CorpusRun:
    """A run as its manifest describes it."""

    folder: Path
    settings: CorpusSettings
    shards: tuple[Shard, ...]
    sources: tuple[str, ...]
    hash: str

    @property
    def work(self) -> Path:
        return self.folder / "work"

    @property
    def data(self) -> Path:
        """The kept documents, once they are complete."""
        return self.folder / "data"

    @property
    def written(self) -> Path:
        """Where they are written before that: a killed run leaves no half of a corpus in `data`."""
        return self.work / "data"

    def file(self, shard: int, ending: str) -> Path:
        """A result of one shard."""
        return self.work / f"{shard:06d}{ending}"

    def part(self, shard: int) -> Path:
        """The kept documents of one shard."""
        return (self.data if self.data.exists() else self.written) / f"part-{shard:06d}.jsonl"

    def publish(self) -> None:
        """Move all parts to `data` at once, when every part is written."""
        if not self.data.exists():
            self.written.rename(self.data)

    @cached_property
    def counts(self) -> list[int]:
        """Documents of each shard that passed the filters."""
        return [read_json(self.file(i, ".json"))["passed"] for i in range(len(self.shards))]


def _manifest(sources: Sequence[str], settings: CorpusSettings) -> dict[str, Any]:
    shards = documents.plan(sources, shard_bytes=settings.shard_bytes, split=settings.split)
    paths = [*dict.fromkeys(shard.path for shard in shards), *(e for e in settings.evals if Path(e).is_file())]
    stats = [(path, Path(path).stat()) for path in paths]
    sets = {name: store.place.fingerprint for name in settings.evals if (store := named_set(name)) is not None}
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


def check_packages(settings: CorpusSettings) -> None:
    """HoneError before anything is written, where a step's package is not installed."""
    steps = [step for step in LIBRARIES if getattr(settings, step)]
    missing = [step for step in steps if find_spec(MODULES[LIBRARIES[step]]) is None]
    if missing:
        names, off = ", ".join(LIBRARIES[step] for step in missing), " ".join(f"--{step} off" for step in missing)
        raise HoneError(f'cleaning needs {names}: pip install "hone[corpus]", or switch the steps off with {off}')


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def begin(
    folder: Path,
    sources: Sequence[str],
    settings: CorpusSettings,
    *,
    restart: bool = False,
    say: Callable[[str], None] = print,
) -> CorpusRun:
    """The run of a folder: a new one, or the one that was begun there with the same settings and inputs."""
    manifest = _manifest(sources, settings)
    path = folder / "manifest.json"
    if path.exists():
        try:
            old = read_json(path)
            _difference(old, manifest)
        except (HoneError, KeyError, TypeError, AttributeError, ValueError) as error:
            if not restart:
                raise HoneError(f"{path} is damaged ({error}): start it anew with --restart") from error
            _wipe(folder)
            old = manifest
        if old.get("hash") != manifest["hash"]:
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
    elif sorted(p.name for p in folder.iterdir() if p.name != LOCK):
        raise HoneError(f"{folder} holds other files: choose an empty folder")
    if not path.exists():
        write_json(path, manifest)
    run = load(folder, manifest["hash"])
    run.work.mkdir(exist_ok=True)
    if not run.data.exists():
        run.written.mkdir(exist_ok=True)
    return run


@lru_cache(4)
def load(folder: Path, digest: str) -> CorpusRun:
    """The run of a folder, read once in a process. The hash distinguishes a run that was started anew."""
    manifest = read_json(folder / "manifest.json")
    return CorpusRun(
        folder=folder,
        settings=CorpusSettings.read(manifest["settings"]),
        shards=tuple(Shard(**shard) for shard in manifest["shards"]),
        sources=tuple(manifest["sources"]),
        hash=digest,
    )


def discard(folder: Path) -> None:
    """Remove the files of a run that cannot go on unless its input or settings change."""
    if (folder / "manifest.json").exists():
        _wipe(folder)
    (folder / LOCK).unlink(missing_ok=True)


def _wipe(folder: Path) -> None:
    load.cache_clear()
    for name in OURS:
        path = folder / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def _difference(old: dict[str, Any], new: dict[str, Any]) -> str:
    for key in ("format", "sources", "inputs", "evals"):
        if old[key] != new[key]:
            return {"inputs": "input files (size or time changed)", "evals": "evaluation sets"}.get(key, key)
    if any(old["versions"].get(name, version) != version for name, version in new["versions"].items()):
        return "library versions"  # a step that is switched on or off brings its library: that is a setting
    changed = [key for key, value in new["settings"].items() if old["settings"].get(key) != value]
    rules = (new["settings"]["rules"], old["settings"].get("rules", {}))
    changed += [f"rules.{name}" for name, value in rules[0].items() if rules[1].get(name) != value]
    return "settings (" + ", ".join(name for name in changed if name != "rules") + ")"
