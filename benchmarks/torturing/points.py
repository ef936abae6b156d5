"""The moments of a run at which it can be ended: told from inside, by what it calls, and counted by their kind."""

import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from hone.engine.engine import Engine
from hone.launch import job, train
from hone.reward.group_scorer import GroupScorer
from hone.storage import files
from hone.train import trust_region

OPENED, CALLS = "open", {"os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.truncate", "shutil.rmtree"}
KINDS = ("sampling", "scoring", "updating", "logging", "starting", "resuming", "writing", "torn", "syncing", "renaming")
SAVES = frozenset({"writing", "torn", "syncing", "renaming"})  # the kinds that lie inside a save


class Points:
    """Counts what happens; at the n-th of a kind, this process is killed, or waits until the file `go` is there.

    tell: is given a line for each save that is complete, and the kind just before the kill.
    """

    def __init__(self, run: Path, tell: Callable[[str], None], kill: tuple[str, int] | None = None) -> None:
        self.run, self.tell, self.kill = str(run), tell, kill
        self.counts, self._lock = Counter[str](), threading.RLock()  # what is half done is told of, too
        self.saving = 0  # how many saves are under way
        self.pause: tuple[str, int] | None = None
        self.go = Path(f"{run}.go")

    def __call__(self, kind: str, half: Callable[[], None] | None = None) -> None:
        """Such a moment has come; `half` does half of what is about to be done."""
        with self._lock:
            self.counts[kind] += 1
            if self.pause == (kind, self.counts[kind]):
                self.tell("paused")
                while not self.go.exists():
                    time.sleep(0.01)
            if self.kill != (kind, self.counts[kind]):
                return
            if half is not None:
                half()
            self.tell(f"killed {kind}")
            os.kill(os.getpid(), signal.SIGKILL)

    def install(self) -> None:
        """For the rest of this process's life."""
        sys.addaudithook(self._audit)
        self._wrap(Engine, "run_step", "sampling")
        self._wrap(GroupScorer, "fill", "scoring")
        self._wrap(torch.Tensor, "backward", "updating")
        self._wrap(trust_region, "_assign", "updating")
        for register in (register_optimizer_step_pre_hook, register_optimizer_step_post_hook):
            register(lambda *_: self("updating"))
        self._wrap(os, "fsync", lambda: "syncing" if self.saving else "starting")
        self._wrap(train, "prepare", "resuming")
        self._wrap(job, "restore", "resuming")
        self._tear(Path, "write_text", lambda path, content, **_: content.encode())
        self._tear(Path, "write_bytes", lambda path, content: content)
        self._tear_tensors()
        self._watch_saves()

    def _saves(self, path: object) -> bool:
        return self.saving > 0 or "/checkpoints/" in str(path)

    def _wrap(self, owner: Any, name: str, kind: str | Callable[..., str]) -> None:
        """A moment before and one after."""
        function = getattr(owner, name)

        def called(*arguments: Any, **named: Any) -> Any:
            which = kind if isinstance(kind, str) else kind()
            self(which)
            found = function(*arguments, **named)
            self(which)
            return found

        setattr(owner, name, called)

    def _tear(self, owner: Any, name: str, content: Callable[..., bytes]) -> None:
        """A moment in the middle of a file."""
        function = getattr(owner, name)

        def called(path: Path, *arguments: Any, **named: Any) -> Any:
            if str(path).startswith(self.run):
                whole = content(path, *arguments, **named)
                self("torn" if self._saves(path) else "starting", lambda: _write(path, whole[: len(whole) // 2]))
            return function(path, *arguments, **named)

        setattr(owner, name, called)

    def _tear_tensors(self) -> None:
        """The same of safetensors, which writes where Python sees nothing."""
        function = safetensors.torch.save_file

        def called(tensors: dict[str, torch.Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
            whole = safetensors.torch.save(tensors, metadata)
            self("torn", lambda: _write(Path(path), whole[: len(whole) // 2]))
            function(tensors, path, metadata)

        for module in [m for name, m in sys.modules.items() if name.startswith("hone.")]:
            for name, value in list(vars(module).items()):
                if value is function:
                    setattr(module, name, called)

    def _watch_saves(self) -> None:
        """A save that has returned is told: no step up to it may be lost."""
        function = files.save

        def called(root: Path, step: int, *arguments: Any, **named: Any) -> Path:
            found = function(root, step, *arguments, **named)
            self.tell(f"saved {step}")
            return found

        files.save = called
        inner = files.save_folder

        def folder(*arguments: Any, **named: Any) -> Path:
            self.saving += 1
            try:
                return inner(*arguments, **named)
            finally:
                self.saving -= 1

        files.save_folder = folder

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Python tells of files that are opened, renamed and removed."""
        if event != OPENED and event not in CALLS:
            return
        paths = [p for p in arguments[:2] if isinstance(p, str | os.PathLike) and str(p).startswith(self.run)]
        if not paths or (event == OPENED and not _writes(arguments)):
            return
        if str(paths[0]).endswith(".jsonl"):
            self("logging")
        elif self._saves(paths[0]):
            self("renaming" if event == "os.rename" else "writing")
        else:
            self("starting")


def _writes(arguments: tuple[Any, ...]) -> bool:
    mode, flags = arguments[1], arguments[2]
    return bool(flags & (os.O_WRONLY | os.O_RDWR)) if isinstance(flags, int) else "r" not in str(mode)


def _write(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)


def likely(counts: Mapping[str, int], kinds: frozenset[str]) -> list[tuple[str, int]]:
    """Every moment of these kinds that a run has."""
    return [(kind, n) for kind in KINDS if kind in kinds for n in range(1, counts.get(kind, 0) + 1)]
