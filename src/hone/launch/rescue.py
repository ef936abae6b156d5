"""Steps that go wrong: one that fails before it has moved anything costs none of those before it, and from one whose
loss leaps a run can go back."""

import copy
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from hone.checkpoint.record import describe
from hone.checkpoint.state import read_state, restore_learned
from hone.dist import collect
from hone.errors import HoneError, Unsaved
from hone.launch.job import Run, parts, publish, save
from hone.loop import Iteration
from hone.storage import files, names
from hone.train.guard import local, not_finite

T = TypeVar("T")


def save_on_error(
    iterations: Iterator[Iteration], job: Run, folder: Path, *, note: Callable[[str], None]
) -> Iterator[Iteration]:
    """The same; where a sampler, a reward or the data raises, the run is saved as it was before that iteration."""
    while True:
        before = {name: copy.deepcopy(part.state()) for name, part in parts(job).items()}
        try:
            iteration = next(iterations)
        except collect.Together as failure:  # all ranks are here
            if _can_go_back(job):
                _keep(job, folder, before, note=note)
            raise failure.error from None
        except Exception:
            if _can_go_back(job) and collect.world()[1] == 1:
                _keep(job, folder, before, note=note)
            raise
        yield iteration


def _can_go_back(job: Run) -> bool:
    """Whether the weights are those of the last step's end."""
    return job.step > 0 and not job.learner.moved


def _keep(job: Run, folder: Path, before: Mapping[str, Any], *, note: Callable[[str], None]) -> None:
    """Save with the parts' states of before, unless that was done already; what goes wrong is said, not raised: it
    must not hide what went wrong first."""
    try:
        if job.ahead is not None:
            job.ahead.undo()
        for name, part in parts(job).items():
            part.load(before[name])
        # the first rank writes, and knows what it has written
        if not collect.count(collect.world()[0] == 0 and job.step in files.checkpoints(folder / names.CHECKPOINTS)):
            save(job, folder)
    except Exception as error:
        note(f"step {job.step + 1} failed, and step {job.step} could not be saved: {error}")
    else:
        note(f"step {job.step + 1} failed; step {job.step} is saved: mend what is said below, then go on from there")


@contextmanager
def saved_elsewhere(job: Run, folder: Path) -> Iterator[None]:
    """A folder that is gone, or takes no more, costs no step: they are saved beside it, or among temporary files."""
    try:
        yield
    except Unsaved as error:
        if not job.step or not error.elsewhere:
            raise
        place = collect.once(partial(_another, folder)) or folder  # which the first rank alone writes to
        saved = save(job, place)
        collect.once(partial(describe, job.recipe, place))
        raise HoneError(
            f"{error}; step {job.step} is saved elsewhere, go on from it with model.path={saved}"
        ) from error


def _another(folder: Path) -> Path:
    """A new folder of nearly that name."""
    for parent in (folder.parent, Path(tempfile.gettempdir())):
        with suppress(OSError):
            return Path(tempfile.mkdtemp(prefix=f"{folder.name}-rescued-", dir=parent))
    raise HoneError(f"neither {folder.parent} nor {tempfile.gettempdir()} can be written to: set TMPDIR to a folder")


def try_stage(do: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """What it gives, or the error that it raises. For a part of a step that no other part depends on."""
    try:
        return do(), None
    except Exception as error:
        return None, error


def report_error(
    step: int, *, unmeasured: Exception | None, unlogged: Exception | None, note: Callable[[str], None]
) -> Exception:
    """The error that ends a run whose held-out evaluation or log failed, here or on another rank. The step is saved."""
    if unlogged is not None:
        note(f"step {step} could not be logged; it is saved")
    else:
        note(f"the evaluation after step {step} failed; the step is saved, and logged without it")
    return unlogged or unmeasured or HoneError("another rank could not evaluate or log: see what it said")


def pending_error(error: Exception) -> str:
    """The message of a run whose sampling ahead failed, and that ends before it needs those rollouts."""
    said = error.error if isinstance(error, collect.Together) else error
    return f"what is sampled ahead failed ({collect.described(said)}) and is made again when the run goes on"


def nearest(folder: Path, updates: int) -> tuple[Path | None, int]:
    """The last whole checkpoint with no more than so many updates, None for the start; and how many it lacks.

    A skipped update moves nothing, so one that was saved later may hold the very weights.
    """
    for saved in reversed(files.checkpoints(folder / names.CHECKPOINTS).values()):
        done = read_state(saved)["updates"]
        if done <= updates:
            return saved, updates - done
    return None, updates


def restart_point(job: Run, folder: Path) -> str:
    """Where a run can go on from if its updates are not finite. With its last weights no rate helps."""
    mend, guard = f"mend what `hone replay` finds in {folder / names.BAD}", job.learner.guard
    if not job.learner.updates or guard.row < guard.in_a_row:  # those it began with, or they gave finite ones too
        return f"lower optim.lr, or {mend}; the run is saved in {folder}"
    before = nearest(folder, job.learner.updates - 1)[0] or folder / names.START
    again = f"`hone run RECIPE --config {folder / names.RECIPE} model.path={before} out=ANOTHER optim.lr=LOWER`"
    return (
        f"the weights of {files.name_of(job.step)} gave no finite one, and a lower optim.lr alone does not mend "
        f"them: begin anew from those before, {again}, or {mend}"
    )


def gone_back(job: Run, folder: Path, metrics: Mapping[str, float]) -> str:
    """Where the loss leaps or the weights are lost, and the recipe asks for it, put back those of the last regular
    checkpoint: what happened, "" for nothing. Steps, the rate's schedule and the data go on from where they are."""
    if job.spikes is None:
        return ""
    bad = sum(not_finite(local(x)) for x in job.learner.trained().values())
    lost, leaps = collect.count(bad) > job.learner.guard.known, "loss" in metrics and job.spikes.saw(metrics["loss"])
    if not (lost or leaps):
        return ""
    why = "the weights are not finite" if lost else f"the loss is {metrics['loss']:.4g}"
    collect.once(job.saver.wait)
    # those of save.every: whether others are there depends on when the run was interrupted
    good = files.latest(folder / names.CHECKPOINTS, every=job.recipe.save.every, but=job.spikes.tried)
    if good is None:
        remedy = "lower optim.lr, or look at the data of these steps"
        raise HoneError(f"stopped at step {job.step}: {why}, and no checkpoint is left to go back to: {remedy}")
    job.spikes.tried.append(good.name)
    restore_learned(good, job.policy, job.learner)
    if job.roller is not None and not (job.ahead and job.ahead.must_sample_first):
        publish(job, job.step)
    return f"{why}: went back to the weights of {good.name} (train.rollback)"
