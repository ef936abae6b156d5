"""Steps that go wrong. If a step fails before it has moved the weights, the steps before it are saved. If the loss
spikes, the run can go back to a checkpoint."""

import copy
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from hone.checkpoint.record import write_settings
from hone.checkpoint.state import read_state, restore_learned
from hone.dist import collect
from hone.errors import HoneError, Unsaved
from hone.launch.job import Run, parts, publish, save
from hone.loop import Iteration
from hone.storage import files, names
from hone.train.guard import count_nonfinite_weights

T = TypeVar("T")


def save_on_error(
    iterations: Iterator[Iteration], job: Run, folder: Path, *, note: Callable[[str], None]
) -> Iterator[Iteration]:
    """The same iterations. If sampler, reward or data raise, save the run as it was before that iteration."""
    while True:
        before = {name: copy.deepcopy(part.state()) for name, part in parts(job).items()}
        try:
            iteration = next(iterations)
        except collect.RankFailure as failure:  # every rank gets it, so that all can save together
            if _weights_unmoved(job):
                _save_before_step(job, folder, before, note=note)
            raise failure.error from None
        except Exception:
            if _weights_unmoved(job) and collect.world()[1] == 1:
                _save_before_step(job, folder, before, note=note)
            raise
        yield iteration


def _weights_unmoved(job: Run) -> bool:
    """Whether the weights are still those of the last step."""
    return job.step > 0 and not job.learner.moved


def _save_before_step(job: Run, folder: Path, before: Mapping[str, Any], *, note: Callable[[str], None]) -> None:
    """Save the run with the states before the step, unless that step is saved already. An error here is printed and not
    raised: it must not hide the first one."""
    try:
        if job.queue is not None:
            job.queue.undo()
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
def save_elsewhere(job: Run, folder: Path) -> Iterator[None]:
    """If the run's folder is gone or full, save the run beside it, or in the folder for temporary files."""
    try:
        yield
    except Unsaved as error:
        if not job.step or not error.elsewhere:
            raise
        place = collect.once(partial(_make_rescue_folder, folder)) or folder  # which the first rank alone writes to
        saved = save(job, place)
        collect.once(partial(write_settings, job.recipe, place))
        raise HoneError(
            f"{error}; step {job.step} is saved elsewhere, go on from it with model.path={saved}"
        ) from error


def _make_rescue_folder(folder: Path) -> Path:
    """A new folder with a similar name."""
    for parent in (folder.parent, Path(tempfile.gettempdir())):
        with suppress(OSError):
            return Path(tempfile.mkdtemp(prefix=f"{folder.name}-rescued-", dir=parent))
    raise HoneError(f"neither {folder.parent} nor {tempfile.gettempdir()} can be written to: set TMPDIR to a folder")


def try_stage(do: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """(result, None) or (None, error). For a part of a step that no other part depends on."""
    try:
        return do(), None
    except Exception as error:
        return None, error


def report_error(
    step: int, *, eval_error: Exception | None, log_error: Exception | None, note: Callable[[str], None]
) -> Exception:
    """The error that ends a run whose held-out evaluation or log failed, here or on another rank. The step is saved."""
    if log_error is not None:
        note(f"step {step} could not be logged; it is saved")
    else:
        note(f"the evaluation after step {step} failed; the step is saved, and logged without it")
    return log_error or eval_error or HoneError("another rank could not evaluate or log: see what it said")


def pending_error(error: Exception) -> str:
    """What to print when sampling ahead failed and the run ends before it needs those rollouts."""
    said = error.error if isinstance(error, collect.RankFailure) else error
    return f"what is sampled ahead failed ({collect.error_text(said)}) and is made again when the run goes on"


def nearest_checkpoint(folder: Path, updates: int) -> tuple[Path | None, int]:
    """The last whole checkpoint with at most so many updates (None: the start), and how many updates it lacks.

    A skipped update moves nothing, so a checkpoint that was saved later may hold the same weights.
    """
    for saved in reversed(files.checkpoints(folder / names.CHECKPOINTS).values()):
        done = read_state(saved)["updates"]
        if done <= updates:
            return saved, updates - done
    return None, updates


def restart_point(job: Run, folder: Path) -> str:
    """Where to go on from if updates are not finite. If the last weights give none, a lower rate does not help."""
    mend, guard = f"mend what `hone replay` finds in {folder / names.BAD}", job.learner.guard
    if (
        not job.learner.updates or guard.skipped_in_a_row < guard.in_a_row
    ):  # those it began with, or they gave finite ones too
        return f"lower optim.lr, or {mend}; the run is saved in {folder}"
    before = nearest_checkpoint(folder, job.learner.updates - 1)[0] or folder / names.START
    again = f"`hone run RECIPE --config {folder / names.RECIPE} model.path={before} out=ANOTHER optim.lr=LOWER`"
    return (
        f"the weights of {files.name_of(job.step)} gave no finite one, and a lower optim.lr alone does not mend "
        f"them: begin anew from those before, {again}, or {mend}"
    )


def roll_back(job: Run, folder: Path, metrics: Mapping[str, float]) -> str:
    """With train.rollback: if the loss spikes or the weights are not finite, restore weights and moments of the last
    regular checkpoint. Returns what happened, or "". Steps, schedule and data go on from where they are."""
    if job.spikes is None:
        return ""
    lost = count_nonfinite_weights(job.learner.trained().values()) > job.learner.guard.known_nonfinite
    leaps = "loss" in metrics and job.spikes.is_spike(metrics["loss"])
    if not (lost or leaps):
        return ""
    why = "the weights are not finite" if lost else f"the loss is {metrics['loss']:.4g}"
    collect.once(job.saver.wait)
    # only those of save.every: which others exist depends on when the run was interrupted
    good = files.latest(folder / names.CHECKPOINTS, every=job.recipe.save.every, but=job.spikes.tried)
    if good is None:
        remedy = "lower optim.lr, or look at the data of these steps"
        raise HoneError(f"stopped at step {job.step}: {why}, and no checkpoint is left to go back to: {remedy}")
    job.spikes.tried.append(good.name)
    restore_learned(good, job.policy, job.learner)
    if job.roller is not None and not (job.queue and job.queue.must_sample_first):
        publish(job, job.step)
    return f"{why}: went back to the weights of {good.name} (train.rollback)"
