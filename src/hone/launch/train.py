"""Runs a recipe: builds its parts, runs the steps, logs, watches, saves, resumes."""

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TextIO, cast

import torch

from hone import loop
from hone.checkpoint import run_folder
from hone.checkpoint.record import HOW_IN_PYTHON, in_python, settings_in
from hone.config.changes import changes, check_changes
from hone.config.overrides import unknown
from hone.config.recipe import Recipe, plan
from hone.config.rules import validate
from hone.dist import collect
from hone.dist.join import join_ranks
from hone.errors import HoneError, Interrupted
from hone.launch import build
from hone.launch.job import Run, begin, prepare, publish, save, torch_settings
from hone.launch.measure import evaluate_rows, evaluate_tasks
from hone.launch.rescue import (
    pending_error,
    report_error,
    restart_point,
    roll_back,
    save_elsewhere,
    save_on_error,
    try_stage,
)
from hone.launch.signals import Stopper, WatchedStream
from hone.log import invalid, samples
from hone.log.progress import NullStream, Progress
from hone.log.sinks import JsonlSink, Sink, TensorBoardSink, truncate_after
from hone.model.policy import Policy
from hone.reward.outcome import kinds
from hone.reward.score import Combined
from hone.storage import files, names
from hone.train.threads import freeze_objects
from hone.types import Group, Rollout

GRACE = 1.0  # seconds for a checkpoint to be completed after a second signal
PATIENCE = 5.0  # seconds: torchrun sends Ctrl-C again to ranks that have it from the terminal already


def run(recipe: Recipe, *, examine: Callable[[Run], None], resume: bool, allow_change: bool) -> Path:
    """`hone.run`. examine: checks a new run before anything is written, and raises if it cannot succeed."""
    validate(recipe)
    with join_ranks(recipe.train.device), _make_stopper() as stopper:
        return _run(recipe, stopper, examine=examine, resume=resume, allow_change=allow_change)


def _make_stopper() -> Stopper:
    return Stopper(patience=PATIENCE if collect.world()[1] > 1 else 0.0, says=run_folder.is_first())


def _run(recipe: Recipe, stopper: Stopper, *, examine: Callable[[Run], None], resume: bool, allow_change: bool) -> Path:
    folder = recipe.run_dir
    with torch_settings(recipe), run_folder.exclusive_use(folder):
        reading = time.thread_time()
        found = run_folder.checkpoint_to_resume(folder, resume=resume)
        reading = time.thread_time() - reading
        changed = changes(recipe, settings_in(folder)) if found else {}
        check_changes(changed, folder, allow=allow_change)
        job = prepare(recipe, resume_from=found, changed=bool(changed) or allow_change)
        if found is None:
            examine(job)
        job.saver.guess(2 * reading)  # a save writes and hashes as much as was read; a new run measures it better
        if len(set(collect.gather(str(found)))) > 1:  # and all have compared before the first one writes
            raise HoneError(f"ranks see different runs in {folder}: set out= to a folder that all of them share")
        try:
            folder_guard = begin(job, folder, found, changed)
            return _train(job, folder, folder_guard, stopper)
        except KeyboardInterrupt:  # the second one: no time to save
            if not files.checkpoints(folder / names.CHECKPOINTS):
                raise
            raise _interrupted(recipe) from None
        finally:
            if not job.step and run_folder.is_first():
                run_folder.remove_run_files(folder)


def _interrupted(recipe: Recipe) -> Interrupted:
    interruption = Interrupted(recipe.run_dir)
    if in_python(recipe):
        interruption.args = (f"interrupted; the run is saved in {recipe.run_dir}: {HOW_IN_PYTHON}",)
    return interruption


# --- the run itself ---


def _train(job: Run, folder: Path, folder_guard: run_folder.FolderGuard | None, stopper: Stopper) -> Path:
    """Run the steps until all are done. An interrupt saves first."""
    recipe, steps = job.recipe, job.recipe.train.steps
    stream = cast(TextIO, WatchedStream(sys.stderr, stopper.ask)) if run_folder.is_first() else NullStream()
    progress = Progress(steps, title=recipe.name, start=job.step, stream=stream)
    if job.step >= steps:
        more = f"hone resume {folder} train.steps={2 * steps}"
        progress.note(f"{recipe.name}: {job.step} of {steps} steps are done; for more: {more}")
    else:
        progress.note("; ".join([f"{recipe.name}: {plan(recipe)}", *job.notes]))
        if job.step and run_folder.is_first() and (known := run_folder.last_logged_step(folder)) < job.step:
            progress.note(f"{recipe.name}: {names.METRICS} ends at step {known}, those up to {job.step} are not in it")
        try:
            with freeze_objects():
                _run_steps(job, folder, folder_guard, progress, stopper)
        finally:
            for text in (*job.news(), *_invalid_so_far(folder)):
                progress.note(f"{recipe.name}: {text}")
    return folder / names.CHECKPOINTS / files.name_of(job.step)


def _run_steps(
    job: Run, folder: Path, folder_guard: run_folder.FolderGuard | None, progress: Progress, stopper: Stopper
) -> None:
    """Each step: log, watch, save."""
    recipe, steps, every = job.recipe, job.recipe.train.steps, job.recipe.save.every
    log, best = _Log(folder, recipe, start=job.step) if run_folder.is_first() else None, recipe.save.best
    with (
        stopper.gently(),
        _finish_writing(job, note=progress.note),
        closing(job.queue) if job.queue else nullcontext(),
        save_elsewhere(job, folder),
    ):
        for iteration in save_on_error(_iterations(job), job, folder, note=progress.note):
            metrics, eval_error, log_error = _log_step(job, iteration, log, folder_guard, progress)
            _refresh_reference(job)
            if back := roll_back(job, folder, metrics):
                progress.note(f"step {job.step}: {back}")
            _watch(job, folder, metrics, note=progress.note)
            # ranks agree: a signal may reach one first, and the first rank alone writes and reads the clock
            due = run_folder.is_first() and not job.saver.busy and job.timer.due(job.saver.cost)
            seen = torch.tensor(
                [stopper.asked, job.saver.failed, bool(eval_error or log_error), due], dtype=torch.int64
            )
            asked, failed, any_error, due = collect.total(seen).tolist()
            last = job.step >= steps
            now = bool(last or asked or failed or any_error)
            if now or due or (every and job.step % every == 0):
                job.saver.events += _check_folder(folder_guard)  # else another run's folder might get the checkpoint
                save(job, folder, wait=now, score=metrics.get(best))
            for text in job.saver.drain():
                progress.note(f"step {job.step}: {text}")
            if any_error:
                raise report_error(job.step, eval_error=eval_error, log_error=log_error, note=progress.note)
            if (last or asked) and job.queue and job.queue.failure:
                progress.note(f"step {job.step}: {pending_error(job.queue.failure)}")
            if last or asked:
                _check_folder(folder_guard, done=files.name_of(job.step))
            if last:
                return
            if asked:
                raise _interrupted(recipe)


def _log_step(
    job: Run,
    iteration: loop.Iteration,
    log: "_Log | None",
    folder_guard: run_folder.FolderGuard | None,
    progress: Progress,
) -> tuple[dict[str, float], Exception | None, Exception | None]:
    """Evaluate if due, log the step and print it. Returns its metrics, and the errors of evaluation and log, if any."""
    held_out = list[Group]()
    evaluated, eval_error = try_stage(partial(_evaluation, job, seen=held_out.extend))
    metrics = _metrics(job, iteration, evaluated or {})
    chosen = _samples(iteration, seed=job.step) if job.algo.online else None
    bad, news = _invalid(iteration, held_out, metrics), _check_folder(folder_guard)
    lines, log_error = try_stage(partial(log.write, job.step, metrics, chosen, bad)) if log is not None else ([], None)
    news += lines or []
    progress.step(metrics)
    news += [measured] if (measured := _held_out_line(metrics)) else []
    for text in news:
        progress.note(f"step {job.step}: {text}")
    return metrics, eval_error, log_error


def _check_folder(folder_guard: run_folder.FolderGuard | None, *, done: str = "") -> list[str]:
    """The first rank checks the folder. If it is gone, every rank ends."""
    return collect.once(partial(folder_guard.check, done=done) if folder_guard else list[str]) or []


@contextmanager
def _finish_writing(job: Run, *, note: Callable[[str], None]) -> Iterator[None]:
    """When the loop ends, wait for the checkpoint that is being written. A second signal cuts the wait short."""
    hurry = None
    try:
        yield
    except KeyboardInterrupt:
        hurry = GRACE
        raise
    finally:
        if (error := job.saver.close(patience=hurry)) is not None:
            note(f"the last checkpoint was not written: {error}")


class _Log:
    """What a run writes at each step. On resume, rows after the checkpoint are dropped."""

    def __init__(self, folder: Path, recipe: Recipe, *, start: int) -> None:
        self.metrics = JsonlSink(folder / names.METRICS)
        self.sinks: list[Sink] = [self.metrics]
        self.sinks += [TensorBoardSink(folder / names.BOARD)] if recipe.tensorboard else []
        self.samples = folder / names.SAMPLES
        self.invalid = invalid.InvalidLog(folder / names.INVALID, start=start)
        for sink in self.sinks:
            sink.truncate_after(start)
        truncate_after(self.samples, start)

    def write(
        self, step: int, metrics: Mapping[str, float], chosen: Sequence[Rollout] | None, bad: invalid.Kinds
    ) -> list[str]:
        """Returns lines to print. chosen: completions to show, None if offline. bad: why rewards are invalid."""
        lost = self.metrics.lost
        for sink in self.sinks:
            sink.write(step, metrics)
        if chosen is not None:
            samples.write(self.samples, step, chosen)
        said = [f"{names.METRICS} was removed, and begins anew with this step"] if lost else []
        return [*said, *self.invalid.write(step, bad)]


def _invalid(iteration: loop.Iteration, held_out: Sequence[Group], metrics: Mapping[str, float]) -> invalid.Kinds:
    """Why rewards are invalid: of this step on all ranks, and of its evaluation, which every rank has whole."""
    found = list[invalid.Kinds]()
    if metrics.get("invalid"):
        outcomes = [r.outcome for g in iteration.groups for r in g if r.outcome]
        found += cast(list[invalid.Kinds], collect.gather(kinds(outcomes)))
    evaluated = kinds(r.outcome for g in held_out for r in g if r.outcome)
    return invalid.merge_kinds([*found, {invalid.HELD_OUT + kind: about for kind, about in evaluated.items()}])


def _invalid_so_far(folder: Path) -> list[str]:
    """The summary of invalid rewards, which a run prints when it ends or fails."""
    try:
        said = invalid.summary(invalid.read_totals(folder / names.INVALID)) if run_folder.is_first() else ""
    except (HoneError, OSError) as error:  # which must not hide what ended the run
        said = str(error)
    return [said] if said else []


def _metrics(job: Run, iteration: loop.Iteration, evaluated: Mapping[str, float]) -> dict[str, float]:
    """The metrics of a step, as logged."""
    metrics, best = dict(iteration.metrics) | job.source.progress() | dict(evaluated), job.recipe.save.best
    metrics["bad_updates"] = float(job.learner.guard.skipped_in_all)
    for name in () if job.recipe.reward else ("reward", "varied"):  # distillation may have no reward
        metrics.pop(name, None)
    updated = "loss" in metrics and not metrics.get("skipped")  # a step without an update has fewer metrics
    if best and best not in metrics and not best.startswith("eval/") and updated:
        raise unknown("metric", best, metrics, owner="save.best: a step")
    return metrics


def _samples(iteration: loop.Iteration, *, seed: int) -> list[Rollout]:
    """A few completions of all ranks."""
    chosen = samples.pick(iteration.groups, seed=seed)
    if collect.world()[1] == 1:
        return chosen
    return samples.pick(cast(list[Group], collect.gather(chosen)), seed=seed)


def _iterations(job: Run) -> Iterator[loop.Iteration]:
    recipe, train = job.recipe, job.recipe.train
    if not job.algo.online:
        context = job.policy.decoder.config.max_position_embeddings
        return loop.offline(job.source, job.learner, job.algo, size=train.prompts, context=context)
    assert job.roller is not None
    assert job.group_scorer is not None
    assert job.queue is not None
    return loop.online(
        job.queue,
        job.roller,
        job.process.after(job.group_scorer) if job.process else job.group_scorer,
        job.learner,
        job.algo,
        prompts=train.prompts,
        epochs=train.epochs,
        minibatches=train.minibatches,
        refill_rounds=train.refill_rounds,
        correct=build.correction(recipe),
        publish=partial(publish, job) if job.learner.shards is not None else job.roller.sampler.publish,
        seed=recipe.seed,
    )


def _watch(job: Run, folder: Path, metrics: Mapping[str, float], *, note: Callable[[str], None]) -> None:
    """Print what is going wrong. Past a stop limit, save and end the run."""
    guard, score = job.learner.guard, metrics.get(job.recipe.save.best)
    for text in _gather_events(guard.drain()):
        note(f"step {job.step}: {text}")
    if guard.stop_reason:
        save(job, folder, score=score)
        raise HoneError(f"stopped at step {job.step}: {guard.stop_reason}: {restart_point(job, folder)}")
    for warning in job.monitor.check(metrics):
        note(f"step {job.step}: {warning.severity}: {warning.message}")
        if warning.severity == "stop":
            save(job, folder, score=score)
            raise HoneError(f"stopped at step {job.step}: {warning.message}; the run is saved in {folder}")


def _gather_events(events: list[str]) -> list[str]:
    """The events of all ranks, which skip the same updates."""
    if not events or collect.world()[1] == 1:
        return events
    each = cast(list[list[str]], collect.gather(events))
    return [f"rank {rank}: {text}" for rank, said in enumerate(each) for text in said]


def _refresh_reference(job: Run) -> None:
    every = job.recipe.train.reference_refresh
    if every and job.step % every == 0 and isinstance(job.policy, Policy) and job.learner.reference is not None:
        job.learner.reference = job.policy.reference = job.learner.frozen_copy()


def _evaluation(job: Run, *, seen: Callable[[list[Group]], None]) -> dict[str, float]:
    """Held-out reward, or loss offline, every eval_every steps and after the last. seen: gets the scored groups."""
    train = job.recipe.train
    due = job.step >= train.steps or (train.eval_every and job.step % train.eval_every == 0)
    if due and job.held_rows:
        context = job.policy.decoder.config.max_position_embeddings
        return _eval_metrics(
            evaluate_rows(job.learner, job.held_rows, job.algo, context=context), best=job.recipe.save.best
        )
    if not due or not job.held_out or job.roller is None or job.reward is None:
        return {}
    reward = job.reward.without_schedules() if isinstance(job.reward, Combined) else job.reward
    shards = job.learner.shards
    decoder = job.policy.decoder if shards is None else shards.sampled
    found = evaluate_tasks(
        decoder, job.tokenizer, job.held_out, reward, params=job.roller.params, samples=train.eval_samples, seen=seen
    )
    return _eval_metrics(found, best=job.recipe.save.best)


def _eval_metrics(found: Mapping[str, float], *, best: str) -> dict[str, float]:
    metrics = {f"eval/{name}": value for name, value in found.items()}
    if best.startswith("eval/") and best not in metrics:
        raise unknown("metric", best, metrics, owner="save.best: an evaluation")
    return metrics


HELD_OUT = ("reward", "pass@1", "loss", "nll", "accuracy", "length", "truncated", "invalid")


def _held_out_line(metrics: Mapping[str, float]) -> str:
    """held-out loss 0.8312, nll 0.8312; "" if nothing was evaluated this step."""
    found = [(name, metrics[f"eval/{name}"]) for name in HELD_OUT if f"eval/{name}" in metrics]
    return "held-out " + ", ".join(f"{name} {value:.4g}" for name, value in found) if found else ""
