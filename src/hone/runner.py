"""Runs a recipe: builds its parts, turns the loop, logs, watches, saves, resumes."""

import json
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from hone import build, loop
from hone.algo import Algorithm
from hone.config import from_yaml, to_json
from hone.data.source import Source
from hone.data.tokenizer import Tokenizer
from hone.errors import HoneError, Interrupted
from hone.log import samples
from hone.log.monitor import Monitor
from hone.log.progress import Progress
from hone.log.sinks import JsonlSink, truncate_after
from hone.measure import measure
from hone.model.decoder import Decoder
from hone.model.folder import load_decoder
from hone.model.policy import Policy, Scorer, frozen_copy
from hone.recipe import Recipe, plan, validate
from hone.reward.score import Scorer as RewardScorer
from hone.reward.score import check_valid, score
from hone.rollout.local import LocalSampler
from hone.rollout.roller import Roller
from hone.signals import Stopper
from hone.state import restore, write_model, write_state
from hone.train import checkpoint
from hone.train.step import Learner
from hone.types import Group, Task

START = "start"  # the model as the run found it: the reference, and the base under adapters
CHECKPOINTS = "checkpoints"


@dataclass(slots=True, kw_only=True)
class Run:
    """The objects of a run; what changes from step to step is in learner, source, roller and monitor."""

    recipe: Recipe
    algo: Algorithm
    tokenizer: Tokenizer
    policy: Policy | Scorer
    learner: Learner
    source: Source[Any]
    monitor: Monitor
    roller: Roller | None = None  # online only
    reward: RewardScorer | None = None
    held_out: Sequence[Task] = ()

    @property
    def step(self) -> int:
        """Steps done."""
        return self.learner.version


def run(recipe: Recipe, *, resume: bool = False) -> Path:
    """Train what the recipe says; returns the folder of the finished model, ready to load."""
    validate(recipe)
    if recipe.train.threads:
        torch.set_num_threads(recipe.train.threads)
    folder = recipe.run_dir
    found = checkpoint.latest(folder / CHECKPOINTS)
    if found and not resume:
        raise HoneError(
            f"{folder} already holds a run: continue it with `hone resume {folder}`, or choose another out="
        )
    job = prepare(recipe, resume_from=found)
    if found is None:
        _begin(job, folder)
    return _train(job, folder)


def resume(run_dir: str | Path) -> Path:
    """Continue a run from its last whole checkpoint, with the settings it was started with."""
    config = Path(run_dir) / "config.json"
    if not config.is_file():
        raise HoneError(f"{run_dir} is not a run: there is no config.json in it")
    settings = json.loads(config.read_text())["recipe"]
    if settings["data"].endswith("rows in memory") or not isinstance(settings["reward"], dict | str):
        raise HoneError(f"{run_dir} was started from Python: continue it with hone.run(recipe, resume=True)")
    aside = Path(run_dir) / "recipe.json"
    recipe = from_yaml(aside, Recipe())
    if checkpoint.latest(Path(run_dir) / CHECKPOINTS) is None:
        raise HoneError(f"{run_dir} has no whole checkpoint to continue from: start it again with `hone run`")
    return run(recipe, resume=True)


def prepare(recipe: Recipe, *, resume_from: Path | None = None) -> Run:
    """Build every part before the first step, so that what is wrong is said before anything is written."""
    algo = build.algorithm(recipe)
    vocabulary = build.tokenizer(recipe.model)
    decoder = _decoder(recipe, vocabulary, resumed=resume_from is not None)
    policy = build.trainable(recipe, build.adapted(decoder, recipe.lora, seed=recipe.seed), algo)
    learner = build.learner(recipe, policy, build.reference(recipe, policy, algo))
    context = decoder.config.max_position_embeddings
    job = Run(
        recipe=recipe,
        algo=algo,
        tokenizer=vocabulary,
        policy=policy,
        learner=learner,
        source=build.source(_items(recipe, vocabulary, algo, context=context), seed=recipe.seed),
        monitor=Monitor(recipe.limits),
    )
    if algo.online:
        params = build.sample_params(recipe.sample, vocabulary, seed=recipe.seed)
        sampler = LocalSampler(decoder, max_rows=recipe.sample.max_rows, pad_id=vocabulary.pad_id)
        job.roller = Roller(sampler, vocabulary, params, group=recipe.sample.group)
        job.reward = build.reward(recipe.reward, vocabulary)
        if recipe.eval_data:
            job.held_out = build.tasks(recipe.eval_data, vocabulary, room=context - 1)
    if resume_from is not None:
        restore(resume_from, policy, learner, recipe=recipe, parts=_parts(job))
    return job


def _decoder(recipe: Recipe, vocabulary: Tokenizer, *, resumed: bool) -> Decoder:
    """On resume the model starts from the run's own copy: the recipe's folder may have changed since."""
    start = recipe.run_dir / START
    if not resumed:
        return build.decoder(recipe.model, vocabulary, seed=recipe.seed)
    checkpoint.verify(start)
    return load_decoder(start)


def _items(recipe: Recipe, vocabulary: Tokenizer, algo: Algorithm, *, context: int) -> Sequence[Any]:
    if not algo.online:
        return build.groups(recipe, vocabulary, algo, context=context)
    return build.tasks(recipe.data, vocabulary, room=context - 1)


def _parts(job: Run) -> dict[str, Any]:
    """What has a state of its own to save."""
    parts: dict[str, Any] = {"source": job.source, "monitor": job.monitor}
    return parts | ({"roller": job.roller} if job.roller else {})


# --- files ---


def _begin(job: Run, folder: Path) -> None:
    """Write the settings and the starting model."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = to_json(job.recipe)
    about = {"recipe": settings, "plan": plan(job.recipe), "versions": versions(), "commit": _commit()}
    checkpoint.write_atomically(folder / "config.json", json.dumps(about, indent=1))
    checkpoint.write_atomically(folder / "recipe.json", json.dumps(settings, indent=1))
    decoder = job.policy.decoder
    checkpoint.save_folder(folder / START, lambda aside: write_model(aside, decoder, job.tokenizer))


def versions() -> dict[str, str]:
    """The packages whose numbers may differ from version to version."""
    return {name: _version(name) for name in ("hone", "torch", "tokenizers", "numpy")}


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"  # run from the source tree


def _commit() -> str:
    try:
        found = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True, timeout=5
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return found.stdout.strip() if found.returncode == 0 else ""


def save(job: Run, folder: Path) -> Path:
    """A checkpoint of the run as it is now."""

    def write(aside: Path) -> None:
        write_model(aside, job.policy, job.tokenizer)
        write_state(aside, job.policy, job.learner, recipe=job.recipe, parts=_parts(job))

    return checkpoint.save(folder / CHECKPOINTS, job.step, write, keep=job.recipe.save.keep)


# --- the run itself ---


def _train(job: Run, folder: Path) -> Path:
    """Turn the loop until the steps are done; an interrupt saves first."""
    recipe, steps = job.recipe, job.recipe.train.steps
    sink = JsonlSink(folder / "metrics.jsonl")
    sink.truncate_after(job.step)
    if (folder / "samples.jsonl").exists():
        truncate_after(folder / "samples.jsonl", job.step)
    progress = Progress(steps, title=recipe.name, start=job.step)
    progress.note(f"{recipe.name}: {plan(recipe)}")
    iterations = _iterations(job) if job.step < steps else iter(())
    with Stopper() as stopper:
        for iteration in iterations:
            metrics = dict(iteration.metrics) | _evaluation(job)
            sink.write(job.step, metrics)
            progress.step(metrics)
            if job.algo.online:
                samples.write(folder / "samples.jsonl", job.step, samples.pick(iteration.groups, seed=job.step))
            _watch(job, folder, metrics, note=progress.note)
            _refresh(job)
            last = job.step >= steps
            if last or stopper.asked or (recipe.save.every and job.step % recipe.save.every == 0):
                save(job, folder)
            if stopper.asked and not last:
                progress.close()
                raise Interrupted(folder)
            if last:
                break
    progress.close()
    sink.close()
    return folder / CHECKPOINTS / checkpoint.name_of(job.step)


def _iterations(job: Run) -> Iterator[loop.Iteration]:
    recipe, train = job.recipe, job.recipe.train
    if not job.algo.online:
        context = job.policy.decoder.config.max_position_embeddings
        return loop.offline(job.source, job.learner, job.algo, size=train.prompts, context=context)
    assert job.roller is not None
    assert job.reward is not None
    roller, reward = job.roller, job.reward

    def scored(groups: list[Group]) -> list[Group]:
        groups = score(groups, reward)
        check_valid(groups, max_invalid=train.max_invalid)
        return groups

    def publish(version: int) -> None:
        roller.sampler.version = version

    return loop.online(
        job.source,
        roller,
        scored,
        job.learner,
        job.algo,
        prompts=train.prompts,
        epochs=train.epochs,
        minibatches=train.minibatches,
        refill_rounds=train.refill_rounds,
        correct=build.correction(recipe),
        publish=publish,
        seed=recipe.seed,
    )


def _watch(job: Run, folder: Path, metrics: Mapping[str, float], *, note: Callable[[str], None]) -> None:
    """Say what is going wrong; past a stop limit, save what there is and end."""
    for warning in job.monitor.check(job.step, metrics):
        note(f"step {job.step}: {warning.severity}: {warning.message}")
        if warning.severity == "stop":
            save(job, folder)
            raise HoneError(f"stopped at step {job.step}: {warning.message}; the run is saved in {folder}")


def _refresh(job: Run) -> None:
    every = job.recipe.train.reference_refresh
    if every and job.step % every == 0 and isinstance(job.policy, Policy) and job.learner.reference is not None:
        job.learner.reference = job.policy.reference = frozen_copy(job.policy)


def _evaluation(job: Run) -> dict[str, float]:
    """Held-out reward, every so many steps and after the last one."""
    train = job.recipe.train
    due = job.step >= train.steps or (train.eval_every and job.step % train.eval_every == 0)
    if not due or not job.held_out or job.roller is None or job.reward is None:
        return {}
    params, reward = job.roller.params, job.reward
    found = measure(job.policy.decoder, job.tokenizer, job.held_out, reward, params=params, samples=train.eval_samples)
    return {f"eval/{name}": value for name, value in found.items()}


def evaluate(
    model: str | Path,
    data: str | Sequence[Any],
    *,
    reward: Any = "math",
    samples: int = 1,
    temperature: float = 1.0,
    max_tokens: int = 64,
    seed: int = 0,
) -> dict[str, float]:
    """Score a model folder on problems: mean reward with its standard error, pass@k, format, length."""
    vocabulary = Tokenizer.load(model)
    decoder = load_decoder(model)
    tasks = build.tasks(data, vocabulary, room=decoder.config.max_position_embeddings - 1)
    spec = build.SampleSpec(max_tokens=max_tokens, temperature=temperature)
    params = build.sample_params(spec, vocabulary, seed=seed)
    return measure(decoder, vocabulary, tasks, build.reward(reward, vocabulary), params=params, samples=samples)
