"""A run's folder: whose it is, what is found in it, what it begins with, and what goes when nothing came of it."""

import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from itertools import count
from pathlib import Path

from hone.checkpoint import files, lock
from hone.checkpoint.record import CONFIG, RECIPE, describe, is_described
from hone.checkpoint.state import write_model
from hone.config.changes import Change, in_words
from hone.dist import collect
from hone.errors import HoneError, Unsaved
from hone.launch.job import CHECKPOINTS, START, Run, whole_decoder
from hone.log import sinks
from hone.log.invalid import INVALID
from hone.log.progress import say
from hone.model.adapters import adapter_off
from hone.train.guard import BAD

METRICS, SAMPLES, BOARD = "metrics.jsonl", "samples.jsonl", "tensorboard"
FILES = (RECIPE, CONFIG, START, METRICS, SAMPLES, INVALID, BOARD, BAD)


def is_first() -> bool:
    """Whether this process prints and writes."""
    return collect.world()[0] == 0


def found(folder: Path, *, resume: bool) -> Path | None:
    """The checkpoint to go on from, None for a new run; or HoneError where the folder holds something else."""
    if files.checkpoints(folder / CHECKPOINTS):
        if not any((folder / name).is_file() for name in (RECIPE, CONFIG)):
            raise HoneError(f"{folder} holds checkpoints without {RECIPE} and {CONFIG}: choose another out=")
        if not resume:
            raise HoneError(
                f"{folder} already holds a run: continue it with `hone resume {folder}`, or choose another out="
            )
        note: Callable[[str], None] = say if is_first() else lambda text: None
        found = files.latest(folder / CHECKPOINTS, note=note)
        if found is None:
            raise HoneError(f"no checkpoint in {folder} is whole: copy one back, or start anew with another out=")
        return found
    strange = [name for name in FILES if (folder / name).exists()] if folder.is_dir() else []
    if strange and RECIPE not in strange:
        raise HoneError(f"{folder} has a {strange[0]} that is not of a run: choose another out=")
    return None


def logged(folder: Path) -> int:
    """The last step that the log tells of."""
    return max((int(row.get("step", 0)) for row in sinks.read(folder / METRICS)), default=0)


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """The folder is this run's alone, and goes again where nothing came to lie in it."""
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    with ExitStack() as stack:
        if is_first():
            stack.callback(_unmake, made)
        collect.once(partial(_take, folder, stack))
        yield


def _take(folder: Path, stack: ExitStack) -> None:
    """Lock it, and bring back a checkpoint that a killed process was about to replace."""
    stack.enter_context(lock.held(folder))
    if (folder / RECIPE).is_file():
        files.sweep(folder / CHECKPOINTS)


class Kept:
    """What a run needs in its folder to be of use later, as it was when it began.

    A folder that is removed, renamed or replaced meanwhile ends the run; a file of settings is written again. What
    came to lie in the place of a file, as a pipe or a folder, is put aside.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._told, self._place = folder, False, _place(folder)
        self._start = _sizes(folder / START)
        self._contents = {name: (folder / name).read_bytes() for name in (RECIPE, CONFIG) if (folder / name).is_file()}

    def check(self, *, done: str = "") -> list[str]:
        """What was put right; HoneError where that cannot be done. done: the name of the run's last checkpoint."""
        folder = self._folder
        lacking = [name for name in self._contents if not (folder / name).is_file()]
        start = _sizes(folder / START) == self._start
        if _place(folder) != self._place or (not start and len(lacking) == len(self._contents)):
            raise Unsaved(
                f"{folder} was removed, renamed or replaced while the run went on, and nothing more is written to it: "
                "continue it with `hone resume` where it is now, or start it again with `hone run`"
            )
        said = _cleared(folder)
        lock.hold_on(folder)
        for name in lacking:
            files.write_atomically(folder / name, self._contents[name])
        said += [f"{name} was removed, and is written again" for name in lacking]
        if not start:
            said += self._without_start(done)
        if done and not (folder / CHECKPOINTS / done / files.MANIFEST).is_file():
            raise Unsaved(f"{folder / CHECKPOINTS / done} was removed as soon as it was saved: start the run again")
        return said

    def _without_start(self, done: str) -> list[str]:
        """Nothing can go on without it, and nobody has it any more; what is trained can still be used."""
        lost = f"{self._folder / START} was removed or changed, without which the run cannot be resumed"
        if done:
            raise HoneError(f"the run is done, but {lost}: copy it back, or go on with model.path=.../{done}")
        news, self._told = [] if self._told else [f"warn: {lost}: copy it back"], True
        return news


def _cleared(folder: Path) -> list[str]:
    """Put aside what is no file where the run writes one, or no folder where it has its checkpoints; what was."""
    said = list[str]()
    for name in (RECIPE, CONFIG, METRICS, SAMPLES, INVALID, lock.LOCK, CHECKPOINTS):
        path = folder / name
        if not os.path.lexists(path) or (path.is_dir() if name == CHECKPOINTS else path.is_file()):
            continue
        aside = next(p for n in count(1) if not os.path.lexists(p := folder / f"{name}.aside-{n}"))
        os.replace(path, aside)
        kind = "folder" if name == CHECKPOINTS else "file"
        said.append(f"warn: {name} is no {kind} any more: what is there in its place is now {aside.name}")
    return said


def _sizes(folder: Path) -> dict[str, int]:
    """Of every file in it: as much as can be looked at in each step."""
    return {path.name: path.stat().st_size for path in folder.glob("*") if path.is_file()}


def _place(folder: Path) -> tuple[int, int] | None:
    """What tells a folder from another of its name."""
    try:
        return folder.stat().st_dev, folder.stat().st_ino
    except OSError:
        return None


def begin(job: Run, folder: Path, found: Path | None, changed: Mapping[str, Change]) -> Kept | None:
    """Write the settings where they are new and a step is to be done by them, and the starting model of a fresh run;
    gives the first rank what has to stay there."""
    job.learner.guard.folder, fresh = folder / BAD, found is None
    goes_on = job.step < job.recipe.train.steps
    job.learner.guard.find()
    decoder = whole_decoder(job) if fresh else None  # every rank takes part

    def write() -> None:
        if found is not None:  # the one that `latest` names may be damaged
            files.point(folder / CHECKPOINTS, files.LATEST, found)
        for place in (folder, folder / BAD):
            files.sweep(place)
        if goes_on and (fresh or not is_described(job.recipe, folder)):
            describe(job.recipe, folder, step=job.step, changed=changed)
        if goes_on and changed:
            say(f"{job.recipe.name}: goes on from step {job.step} with other settings: {in_words(changed)}")
        if decoder is not None:
            begin = time.thread_time()
            with adapter_off(decoder):  # resume goes on from the base under the adapters
                files.save_folder(folder / START, partial(write_model, model=decoder, tokenizer=job.tokenizer))
            job.saver.guess((time.thread_time() - begin) * _larger(job, folder / START))

    collect.once(write)
    return Kept(folder) if is_first() else None


def _larger(job: Run, start: Path) -> float:
    """How many times as large as the starting model a checkpoint may be: two moments and a copy in float32."""
    trained = sum(p.numel() for p in job.learner.trained().values())
    return 1 + 12 * trained / max(1, sum(path.stat().st_size for path in start.rglob("*")))


def forget(folder: Path) -> None:
    """A run that did not do its first step leaves nothing behind."""
    for path in (folder / name for name in reversed(FILES)):  # what marks the folder as a run's goes last
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        elif path.is_file():
            path.unlink()


def _unmake(made: Sequence[Path]) -> None:
    """Remove the folders that were made for a run and are empty, the innermost first."""
    for path in made:
        with suppress(OSError):  # not empty: a run has come of it, this one or another's
            path.rmdir()
