"""An iteration that fails before it has moved anything costs no step: those before it are saved, then it is told."""

import copy
from collections.abc import Callable, Iterator
from pathlib import Path

from hone.dist import collect
from hone.errors import HoneError
from hone.job import CHECKPOINTS, Run, parts, save
from hone.loop import Iteration
from hone.train import checkpoint


def rescued(
    iterations: Iterator[Iteration], job: Run, folder: Path, *, note: Callable[[str], None]
) -> Iterator[Iteration]:
    """The same; where a sampler, a reward or the data raises, the run is saved as it was before that iteration."""
    while True:
        before = {name: copy.deepcopy(part.state()) for name, part in parts(job).items()}
        try:
            iteration = next(iterations)
        except Exception:
            if _can_go_back(job):
                for name, part in parts(job).items():
                    part.load(before[name])
                _keep(job, folder, note=note)
            raise
        yield iteration


def _can_go_back(job: Run) -> bool:
    """Whether weights and rollouts are those of the last step's end, and no other rank would have to save too."""
    ahead = job.ahead is not None and job.ahead.lag > 0  # what was made ahead is used by now
    return job.step > 0 and not job.learner.moved and not ahead and collect.world()[1] == 1


def _keep(job: Run, folder: Path, *, note: Callable[[str], None]) -> None:
    """Save, unless that was done already; what goes wrong is said, for it must not hide what went wrong first."""
    try:
        if job.step not in checkpoint.checkpoints(folder / CHECKPOINTS):
            save(job, folder)
    except (HoneError, OSError) as error:
        note(f"step {job.step + 1} failed, and step {job.step} could not be saved: {error}")
    else:
        note(f"step {job.step + 1} failed; step {job.step} is saved: mend what is said below, then go on from there")
