"""The objects of a run: how they are built before the first step, restored and saved."""

import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from hone.algo import Algorithm
from hone.checkpoint import run_folder
from hone.checkpoint.record import settings_are_written, write_settings
from hone.checkpoint.saver import Saver, Timer, process_age
from hone.checkpoint.state import read_state, restore, score_of, take_snapshot, write_checkpoint
from hone.config.changes import Change, describe_changes
from hone.config.recipe import Recipe
from hone.data.feed.assemble import Loaded
from hone.data.feed.source import Feed
from hone.data.text.stop_token import wrong_stop
from hone.data.text.tokenizer import Tokenizer
from hone.dist import collect
from hone.errors import HoneError
from hone.launch import build, feeds, rewards
from hone.log.monitor import Monitor
from hone.log.progress import say
from hone.model.decoder import Decoder
from hone.model.formats.folder import load_decoder
from hone.model.formats.save import save_model
from hone.model.lora import adapter_off
from hone.model.policy import Policy
from hone.model.scorer import Scorer
from hone.reward.group_scorer import GroupScorer
from hone.reward.learned.process_model import Dense
from hone.reward.score import Reward, RewardScorer, as_scorer
from hone.rollout.local import LocalSampler
from hone.rollout.supply import Roller, RolloutQueue
from hone.storage import files, names
from hone.storage.files import load_tensors, save_tensors
from hone.train.guard import SpikeDetector, count_nonfinite_weights
from hone.train.learner import Learner
from hone.train.threads import threads
from hone.types import Group, Task


@dataclass(slots=True, kw_only=True)
class Run:
    """The objects of a run; what changes from step to step is in learner, source, roller and monitor."""

    recipe: Recipe
    algo: Algorithm
    tokenizer: Tokenizer
    policy: Policy | Scorer
    learner: Learner
    source: Feed[Any]
    monitor: Monitor
    roller: Roller | None = None  # online only, as is the queue
    queue: RolloutQueue | None = None
    reward: RewardScorer | None = None
    group_scorer: GroupScorer | None = None  # the reward as the loop calls it
    process: Dense | None = None  # gives step rewards
    held_out: Sequence[Task] = ()  # an online run is evaluated on these
    held_rows: Sequence[Group] = ()  # and an offline run on these
    notes: Sequence[str] = ()  # how the data was read
    news: Callable[[], Sequence[str]] = tuple  # and what was noticed in it since
    saver: Saver = field(default_factory=Saver)
    timer: Timer = field(default_factory=lambda: Timer(0.0))  # says when to save by the clock
    spikes: SpikeDetector | None = None  # with train.rollback

    @property
    def step(self) -> int:
        """Steps done."""
        return self.learner.version


@contextmanager
def torch_settings(recipe: Recipe) -> Iterator[None]:
    """Threads and determinism as the recipe says. Afterwards the process has its own again: a notebook goes on."""
    switch = torch.utils.deterministic
    before = torch.get_num_threads(), torch.get_deterministic_debug_mode(), switch.fill_uninitialized_memory  # pyright: ignore
    device, _ = build.device_and_dtype(recipe.train.device)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it cuBLAS refuses to be deterministic
    try:
        torch.set_num_threads(threads(device, asked=recipe.train.threads, offloaded=recipe.optim.offload))
        # as use_deterministic_algorithms does, without the import of torch's compiler, which takes a second
        torch.set_deterministic_debug_mode("error" if recipe.train.deterministic else "default")
        switch.fill_uninitialized_memory = False  # pyright: ignore  # costly, and no help
        yield
    finally:
        torch.set_num_threads(before[0])
        torch.set_deterministic_debug_mode(before[1])
        switch.fill_uninitialized_memory = before[2]  # pyright: ignore


def prepare(recipe: Recipe, *, resume_from: Path | None = None, changed: bool = False) -> Run:
    """Build every part before the first step, so that errors come before anything is written.

    changed: the run goes on with other settings. Parts that do not fit them begin anew.
    """
    algo, separate = build.algorithm(recipe), rewards.start_reward_processes(recipe)
    vocabulary, decoder = load_start(recipe, resumed=resume_from is not None)
    build.check_teacher(recipe, vocabulary)
    learner = make_learner(recipe, algo, decoder, saved=resume_from)
    policy = cast(Policy | Scorer, learner.policy)
    context = decoder.config.max_position_embeddings
    if algo.online and recipe.sample.max_tokens >= context:
        raise HoneError(f"sample.max_tokens is {recipe.sample.max_tokens}, the model's context is {context}: lower it")
    loaded = _load_feed(recipe, algo, vocabulary, context=context)
    if isinstance(policy, Scorer) and policy.kind == "step":
        policy.separator = loaded.separator
    _, ranks = collect.world()
    shared = [f"{ranks} ranks" + (", each with a part of the weights" if learner.shards else "")] if ranks > 1 else []
    job = Run(
        recipe=recipe,
        algo=algo,
        tokenizer=vocabulary,
        policy=policy,
        learner=learner,
        source=loaded.feed,
        notes=[*shared, *loaded.notes],
        news=loaded.news,
        # distillation learns whether rewards differ or not
        monitor=Monitor(replace(recipe.limits, varied_warn=None) if algo.teacher else recipe.limits),
        saver=Saver(shares_cores=learner.device.type == "cpu" or recipe.optim.offload),
        timer=Timer(60 * recipe.save.minutes, age=process_age()),
    )
    if recipe.train.rollback:
        job.spikes = SpikeDetector(recipe.train.rollback)
    if algo.online:
        _add_sampler(job, decoder)
        _add_rewards(job, separate=separate)
    if recipe.eval_data:
        how = feeds.reading(recipe, algo, vocabulary)
        if algo.online:
            job.held_out = feeds.tasks(recipe.eval_data, vocabulary, max_tokens=context - 1, how=how)
        else:
            job.held_rows = feeds.groups(recipe.eval_data, vocabulary, context=context, how=how)
    if resume_from is not None:
        _restore_run(job, resume_from, changed=changed)
    learner.guard.known_nonfinite = count_nonfinite_weights(learner.trained().values())
    return job


def _load_feed(recipe: Recipe, algo: Algorithm, vocabulary: Tokenizer, *, context: int) -> Loaded:
    """The data. If it refuses rows because the stop token is text, the error names the tokenizer instead."""
    try:
        return feeds.feed(recipe, algo, vocabulary, context=context)
    except HoneError as error:
        if (wrong := wrong_stop(vocabulary)) is not None:
            raise HoneError(f"{wrong.seen}: {wrong.remedy}") from error
        raise


def _add_sampler(job: Run, decoder: Decoder) -> None:
    """Make the sampler that an online run writes its completions with."""
    recipe, shards = job.recipe, job.learner.shards
    context = decoder.config.max_position_embeddings
    params = build.sample_params(recipe.sample, job.tokenizer, seed=recipe.seed, context=context, training=True)
    whole = decoder if shards is None else shards.publish()
    copied = recipe.train.lag > 0 and shards is None  # shards publish a copy anyway
    sampler = LocalSampler(whole, max_rows=recipe.sample.max_rows, copy=copied)
    job.roller = Roller(sampler, job.tokenizer, params, group=recipe.sample.group)
    job.queue = RolloutQueue(job.source, lag=recipe.train.lag, counter=job.roller)


def _add_rewards(job: Run, *, separate: Mapping[str, Reward]) -> None:
    """Make the rewards that an online run scores its completions with."""
    recipe, device = job.recipe, job.learner.device
    job.reward = as_scorer(zero_reward)
    job.group_scorer = GroupScorer(reward=job.reward)
    if recipe.reward:
        how = partial(rewards.scorer, vocabulary=job.tokenizer, device=device, separate=separate)
        job.reward = how(recipe.reward, parts=recipe.parts)
        held_out = how(recipe.parts.held_out) if recipe.parts.held_out else None
        job.group_scorer = GroupScorer(reward=job.reward, held_out=held_out, max_invalid=recipe.train.max_invalid)
    job.process = build.process(recipe, job.algo, job.tokenizer, device=device)


def _restore_run(job: Run, saved: Path, *, changed: bool) -> None:
    """Put the run back to where its checkpoint was saved."""
    told = restore(saved, job.policy, job.learner, parts=parts(job), changed=changed)
    job.notes = [*job.notes, *told]
    if changed:  # updates skipped before say nothing about these settings
        job.learner.guard.skipped_in_a_row = 0
    if job.queue:
        job.queue.load(saved, changed=changed)
        publish(job, job.step)
        _restore_sampler_weights(job, saved / names.SAMPLER)


def make_learner(recipe: Recipe, algo: Algorithm, decoder: Decoder, *, saved: Path | None = None) -> Learner:
    """The learner of this decoder. saved: the checkpoint whose weights are loaded afterwards."""
    # on resume the adapter is the run's own copy; its exact weights are loaded with the rest of the state
    adapter = saved / names.ADAPTER if saved is not None else None
    policy = build.trainable(recipe, build.add_adapter(decoder, recipe.lora, seed=recipe.seed, saved=adapter), algo)
    precision = recipe.train.dtype
    if saved is not None and precision == "auto":  # as the run started, whatever the device is now
        precision = read_state(saved)["dtype"]
    device, dtype = build.device_and_dtype(recipe.train.device, precision)
    if algo.trust_region and dtype is torch.bfloat16:  # its curvature is a difference of small numbers
        raise HoneError(f"{recipe.algo_name} needs float32: set train.dtype=float32")
    if build.is_sharded(recipe):  # from the CPU, a layer at a time: no device ever holds the whole
        reference = build.reference(recipe, policy, algo)
        shards = build.shards(recipe, policy, reference, device=device, dtype=dtype)
        return build.learner(recipe, policy, reference, shards=shards)
    policy.to(device, dtype)
    return build.learner(recipe, policy, build.reference(recipe, policy, algo))


def load_start(recipe: Recipe, *, resumed: bool) -> tuple[Tokenizer, Decoder]:
    """Tokenizer and starting model. On resume from the run's own copy: the recipe's folders may have changed."""
    if not resumed:
        vocabulary = build.tokenizer(recipe.model)
        return vocabulary, build.decoder(recipe.model, vocabulary, seed=recipe.seed)
    folder = recipe.run_dir / names.START
    try:
        files.verify(folder)
    except HoneError as error:
        raise HoneError(
            f"{folder} is damaged, and the run goes on from it: start a new run, with model.path set to a checkpoint"
        ) from error
    return Tokenizer.load(folder), load_decoder(folder, trust_remote_code=recipe.model.trust_remote_code)


def zero_reward(completion: str) -> float:
    """The reward of an algorithm that learns from a teacher alone."""
    return 0.0


def parts(job: Run) -> dict[str, Any]:
    """The parts of the run that have a state to save."""
    found: dict[str, Any] = {"source": job.source, "monitor": job.monitor, "guard": job.learner.guard}
    found |= {"spikes": job.spikes} if job.spikes else {}
    return found | ({"roller": job.roller} if job.roller else {})


def publish(job: Run, version: int) -> None:
    """Give the sampler the learner's weights. If ranks hold parts, put the weights together first."""
    assert job.roller is not None
    if job.learner.shards is not None:
        job.learner.shards.publish()
    job.roller.sampler.publish(version)


def _sampler_weights(job: Run) -> dict[str, Tensor] | None:
    """The sampler's weights, if a resumed run has to sample with them; else None."""
    assert job.roller is not None
    if job.queue is None or not job.queue.must_sample_first:
        return None
    return cast(LocalSampler, job.roller.sampler).weights()


def _restore_sampler_weights(job: Run, path: Path) -> None:
    """Give a resumed sampler the saved weights, if it still has to make rollouts with them."""
    if job.queue is not None and job.queue.must_sample_first and job.roller is not None and path.is_file():
        cast(LocalSampler, job.roller.sampler).load_weights(load_tensors(path), version=job.step - 1)


def whole_decoder(job: Run) -> Decoder:
    """The policy's decoder with all of its weights. If ranks hold parts, only the first rank gets it."""
    model = job.policy if job.learner.shards is None else job.learner.shards.saved()
    return model if isinstance(model, Decoder) else model.decoder


def save(job: Run, folder: Path, *, wait: bool = True, score: float | None = None) -> Path:
    """Save a checkpoint of the run as it is now. The first rank writes it in a thread. wait: until it is written.

    score: the metric save.best, if this step has it.
    """
    root, step, recipe, begin = folder / names.CHECKPOINTS, job.step, job.recipe, time.monotonic()
    snapshot = take_snapshot(job.policy, job.learner, recipe=recipe, parts=parts(job), score=score)
    ahead, sampled = None, None
    if job.queue is not None and job.queue.lag:
        ahead, sampled = job.queue.saved(), _sampler_weights(job)

    def write(aside: Path) -> None:
        for tensors in snapshot.tensors.values():
            job.learner.guard.check(tensors, step=step)
        write_checkpoint(aside, snapshot, job.tokenizer, recipe=recipe)
        if ahead is not None:
            (aside / names.AHEAD).write_bytes(ahead)
        if sampled is not None:
            save_tensors(aside / names.SAMPLER, sampled)
        for log in folder.glob(names.LOGS):  # so that the logs have every step of the checkpoint
            if log.is_file():  # else something else was put in its place
                files.sync(log)

    spare, go_on = partial(_steps_to_keep, root, recipe), job.saver.go_on
    once = partial(files.save, root, step, write, keep=recipe.save.keep, spare=spare, between=go_on)
    collect.once(partial(job.saver.start, once))
    job.saver.held_seconds = time.monotonic() - begin
    job.timer.saved()
    if wait:
        collect.once(job.saver.wait)
    return root / files.name_of(step)


def _steps_to_keep(root: Path, recipe: Recipe, steps: Collection[int]) -> set[int]:
    """The steps whose checkpoints are kept for good. Writes the best one into the file `best`."""
    how = recipe.save
    spared = files.milestones(steps, how.milestones)
    if recipe.train.rollback:  # uses those of save.every alone: other saves must not displace them
        spared |= set(sorted(files.milestones(steps, how.every))[-how.keep :])
    folders = files.checkpoints(root)
    scores = {n: score for n in steps if how.best and (score := score_of(folders[n], how.best)) is not None}
    if (top := files.best(scores, lowest=how.best_is == "lowest")) is not None:
        files.point(root, names.BEST, folders[top])
        spared.add(top)
    return spared


def begin(job: Run, folder: Path, found: Path | None, changed: Mapping[str, Change]) -> run_folder.FolderGuard | None:
    """Write the settings, if they are new and steps are left, and a new run's starting model. Returns the first rank's
    guard of the folder."""
    job.learner.guard.folder, fresh = folder / names.BAD, found is None
    goes_on = job.step < job.recipe.train.steps
    job.learner.guard.load_divisor()
    decoder = whole_decoder(job) if fresh else None  # every rank takes part

    def write() -> None:
        if found is not None:  # `latest` may name a damaged one
            files.point(folder / names.CHECKPOINTS, names.LATEST, found)
        for place in (folder, folder / names.BAD):
            files.sweep(place)
        if goes_on and (fresh or not settings_are_written(job.recipe, folder)):
            write_settings(job.recipe, folder, step=job.step, changed=changed)
        if goes_on and changed:
            say(f"{job.recipe.name}: goes on from step {job.step} with other settings: {describe_changes(changed)}")
        if decoder is not None:
            begin = time.thread_time()
            with adapter_off(decoder):  # resume loads the base model and then the adapters
                files.save_folder(folder / names.START, partial(save_model, decoder, job.tokenizer))
            job.saver.guess((time.thread_time() - begin) * _checkpoint_ratio(job, folder / names.START))

    collect.once(write)
    return run_folder.FolderGuard(folder) if run_folder.is_first() else None


def _checkpoint_ratio(job: Run, start: Path) -> float:
    """The size of a checkpoint as a multiple of the starting model: with two moments and a copy in float32."""
    trained = sum(p.numel() for p in job.learner.trained().values())
    return 1 + 12 * trained / max(1, sum(path.stat().st_size for path in start.rglob("*")))
