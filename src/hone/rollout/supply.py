"""The supply of rollouts: it renders prompts, samples and scores, on demand or while the learner updates."""

import copy
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate, islice
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from hone.algo.table import Algorithm
from hone.data.feed.source import Feed
from hone.data.text.chat import render_prompts
from hone.data.text.tokenizer import Tokenizer
from hone.dist import collect
from hone.engine.params import SampleParams
from hone.errors import HoneError
from hone.log.stats import StageTimer
from hone.rollout import overlap
from hone.rollout.local import Sampler
from hone.rollout.overlap import BackgroundTask, OnSampled
from hone.rollout.rollout_file import pack_rollouts, unpack_rollouts
from hone.storage import names
from hone.types import Group, Rollout, Stop, Task

Roll = Callable[[list[Task], slice], list[Group]]  # sample a group for each task of this rank's part
Score = Callable[[list[Group]], list[Group]]  # give each rollout its outcome
Rounds = list[list[Group]]  # this rank's scored groups; a refill adds a round
MakeRounds = Callable[[StageTimer], Rounds]

LOST = (
    "the sampler gave a log-prob that is not finite: go on from the last checkpoint, and where it comes again from an "
    "earlier one with a lower optim.lr"
)


class Supply:
    """What the online loop asks for rollouts. It also times each stage and publishes weights.

    queue: gives the tasks, and holds rollouts that were sampled ahead of the learner.
    on_sampled: is called with the sampled groups, before they are scored.
    publish: tells the sampler the version of the weights that it samples from next.
    """

    def __init__(
        self,
        queue: "RolloutQueue",
        roll: Roll,
        score: Score,
        algo: Algorithm,
        *,
        prompts: int,
        refill_rounds: int,
        on_sampled: OnSampled,
        publish: Callable[[int], None],
    ) -> None:
        self.queue = queue
        self._roll, self._score, self._algo = roll, score, algo
        self._on_sampled, self._publish = on_sampled, publish
        self._prompts, self._refill_rounds = prompts, refill_rounds
        self.timer = StageTimer()  # is called at the end of each stage, with its name

    def next(self, version: int) -> Rounds:
        """One iteration's scored rollouts, by round. version: of the learner's weights."""
        self.timer = StageTimer()
        return self.queue.next(self._sample_rounds, self.timer, partial(self._publish, version))

    def wait(self) -> float:
        """Wait for rollouts that are sampled during the update. Returns the seconds of the iteration so far."""
        self.timer("update")
        self.queue.wait(self.timer)
        return self.timer.total()

    def publish(self, version: int) -> dict[str, float]:
        """Give the sampler the learner's weights. Returns the seconds of every stage.

        If the next rollouts could not be sampled during this iteration, the old weights still have to sample them.
        """
        self.timer("update")
        if not self.queue.must_sample_first:
            self._publish(version)
        self.timer("publish")
        return self.timer.metrics()

    def _sample_rounds(self, timer: StageTimer) -> Rounds:
        """This rank's scored groups, by round. A refill asks for as many prompts as all ranks together still miss.

        Every rank's source gives the same tasks.
        """
        found: Rounds = []
        missing, algo = self._prompts, self._algo
        while missing > 0 and len(found) < (self._refill_rounds if algo.refill else 1):
            make = partial(self._round, missing, timer, [g for groups in found for g in groups])
            # a rank that fails must not leave the others waiting; with a lag they agree when they wait for the thread
            found.append(make() if self.queue.lag else collect.together(make))
            if algo.refill:  # ranks talk here only then: with a lag this is another thread
                missing -= collect.count(len(algo.select(found[-1])))
        return found

    def _round(self, prompts: int, timer: StageTimer, earlier: list[Group]) -> list[Group]:
        """Rollouts of this rank's part of the next tasks, with their outcomes. earlier: those of the rounds before."""
        tasks, score = self.queue.feed.take(prompts), self._score
        if earlier and isinstance(score, overlap.Scoring):
            score = score.after(earlier)
        return sample_and_score(self._roll, score, tasks, timer, stop=self.queue.stop, on_sampled=self._on_sampled)


def sample_and_score(
    roll: Roll, score: Score, tasks: list[Task], timer: StageTimer, *, stop: threading.Event, on_sampled: OnSampled
) -> list[Group]:
    """Scored rollouts of this rank's part of the tasks. Scoring runs beside sampling where both can."""
    mine = collect.share(len(tasks))
    if isinstance(roll, overlap.Streaming) and isinstance(score, overlap.Scoring) and score.one_by_one:
        return overlap.score_while_sampling(
            roll, score, timer, tasks=tasks, mine=mine, stop=stop, on_sampled=on_sampled
        )
    streams = isinstance(roll, overlap.Streaming)
    groups = roll.sample(tasks, mine) if streams else roll(tasks, mine)
    timer("sample")
    on_sampled(groups, timer)
    groups = roll.add_texts(groups, tasks[mine]) if streams else groups
    start = time.perf_counter()
    groups = score(groups)
    timer("score")
    timer.add("scoring", time.perf_counter() - start)
    return groups


class Roller:
    """Samples `group` completions of each task. Sampled tokens are kept as they are, never re-tokenised."""

    def __init__(self, sampler: Sampler, tokenizer: Tokenizer, params: SampleParams, *, group: int) -> None:
        self.sampler, self.tokenizer, self.params, self.group = sampler, tokenizer, params, group
        self.requests = 0  # each request draws its own random numbers

    def __call__(self, tasks: list[Task], mine: slice = slice(None)) -> list[Group]:
        """Groups for this rank's part of the tasks; requests are numbered over all, so ranks change no sample."""
        return self.add_texts(self.sample(tasks, mine), tasks[mine])

    def sample(self, tasks: list[Task], mine: slice = slice(None)) -> list[Group]:
        """The same groups, before `add_texts`."""
        first, prompts = self._next(tasks, mine)
        return self.sampler.sample(prompts, n=self.group, params=self.params, first_request=first)

    def stream(self, tasks: list[Task], mine: slice = slice(None)) -> Iterator[list[tuple[int, Rollout]]]:
        """As `sample`, step by step: the rollouts that ended in the step, numbered within this rank's part."""
        first, prompts = self._next(tasks, mine)
        yield from self.sampler.stream(prompts, n=self.group, params=self.params, first_request=first)

    def add_texts(self, groups: Sequence[Group], tasks: Sequence[Task]) -> list[Group]:
        """The same groups; each rollout has its task, and its text without stop token or stop string."""
        rollouts = [r for g in groups for r in g]
        of = [task for g, task in zip(groups, tasks, strict=True) for _ in g]
        if rollouts and not np.isfinite(np.concatenate([r.gen_logp for r in rollouts])).all():
            raise HoneError(LOST)
        texts = self.tokenizer.decode_all([self._written(r) for r in rollouts])
        told = iter(
            r.copy_with(task=task, text=r.text if r.stop is Stop.STRING else text)
            for r, task, text in zip(rollouts, of, texts, strict=True)
        )
        return [list(islice(told, len(g))) for g in groups]

    def _next(self, tasks: list[Task], mine: slice) -> tuple[int, list[list[int]]]:
        """The number of this rank's first request, and its prompts; the next call's come after all ranks' requests."""
        first = self.requests + mine.indices(len(tasks))[0] * self.group
        self.requests += len(tasks) * self.group
        return first, render_prompts(self.tokenizer, [(task.prompt, task.extra.get("tools")) for task in tasks[mine]])

    def _written(self, rollout: Rollout) -> Sequence[int]:
        """The tokens of the completion that are text. None after a stop string: the text is known then."""
        written = rollout.completion()
        if rollout.stop is Stop.STRING:
            return written[:0]
        return written[:-1] if len(written) and written[-1] in self.params.stop_ids else written

    def state(self) -> dict[str, int]:
        """What a checkpoint holds."""
        return {"requests": self.requests}

    def load(self, state: dict[str, int]) -> None:
        """Go on where `state` was taken."""
        requests = state.get("requests") if isinstance(state, Mapping) else None
        if type(requests) is not int or not 0 <= requests < 2**63:
            raise HoneError(f"cannot resume: {requests!r} is no number of requests: resume from another checkpoint")
        self.requests = requests


def check_lag(algo: Algorithm, *, name: str, corrected: bool) -> None:
    """Whether the algorithm can learn from samples of the weights before, or HoneError."""
    if algo.on_policy or algo.trust_region:
        raise HoneError(f"{name} learns from the policy's own samples only: set train.lag=0")
    if algo.credit is not None and not corrected:
        raise HoneError(f"with train.lag=1 {name} learns from older weights' samples: set train.mismatch=truncate")
    if algo.refill and collect.world()[1] > 1:  # they would talk to each other in two threads
        raise HoneError(f"{name} asks for prompts until all ranks have enough: set train.lag=0, or use one rank")


# --- rollouts that are sampled ahead of the learner ---


class Counter(Protocol):
    """What counts up while rollouts are made, such as a roller's requests."""

    def state(self) -> Any: ...

    def load(self, state: Any) -> None: ...


class RolloutQueue:
    """The queue between sampler and learner: at most one iteration's rollouts.

    lag 0: `next` makes the rollouts. lag 1: while the learner updates on one iteration's rollouts, a thread makes the
    next iteration's with the weights that were published last. So the first two iterations share a version.
    Nothing runs between `wait` and `next`: weights are published and checkpoints taken there.
    If the thread fails, the present iteration still ends as any other. The tasks go back to the feed, the sampler
    keeps its weights to make these rollouts later, and `next` raises `failure`.
    counter: is put back together with the feed.
    """

    def __init__(self, feed: Feed[Task], *, lag: int = 0, counter: Counter | None = None) -> None:
        self.feed, self.lag, self.stop = feed, lag, threading.Event()
        self.counter, self.failure = counter, cast(Exception | None, None)
        self._rounds: Rounds | None = None  # sampled, and not yet learned from
        self._used_rounds: Rounds | None = None  # what is being learned from
        self._feed_state: Mapping[str, Any] = {}  # of the feed, before it gave the tasks of `_rounds`
        self._used_feed_state: Mapping[str, Any] = {}  # and before those of `_used_rounds`
        self._counter_state: Any = None  # of the counter, before `_rounds`
        self._timer = StageTimer()  # of the thread
        self._work: BackgroundTask[Rounds] | None = None
        self._stream: torch.cuda.Stream | None = None

    @property
    def must_sample_first(self) -> bool:
        """Whether the sampler's present weights still have to make the next iteration's rollouts."""
        return self.lag > 0 and self._rounds is None

    def next(self, fill: MakeRounds, timer: StageTimer, publish: Callable[[], None] = lambda: None) -> Rounds:
        """One iteration's rollouts. With a lag, a thread starts to make the next iteration's.

        publish: gives the sampler the learner's weights after it has made rollouts that were due from before.
        """
        if not self.lag:
            return fill(timer)
        if self.failure is not None:
            raise self.failure
        if self._rounds is None:
            self._remember_position()
            self._rounds = collect.together(partial(fill, timer))
            publish()
        rounds, self._rounds = self._rounds, None
        self._used_rounds, self._used_feed_state, self._timer = rounds, self._feed_state, StageTimer()
        self._remember_position()
        if torch.cuda.is_initialized():
            # a stream of its own: in the learner's it would wait for each update
            self._stream = self._stream or torch.cuda.Stream()
            self._stream.wait_stream(torch.cuda.current_stream())
        self._work = BackgroundTask(lambda: fill(self._timer), stream=self._stream)
        return rounds

    def wait(self, timer: StageTimer) -> None:
        """Wait for the thread that makes the next iteration's rollouts. If it failed, take its tasks back."""
        if self._work is None:
            return
        self._work.join()
        work, self._work, self._used_rounds = self._work, None, None
        if work.error is not None and not isinstance(work.error, Exception):
            raise work.error
        try:
            collect.agree(work.error)
            self._rounds = work.result()
        except Exception as error:
            self.failure = error
            self._rewind()
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
        timer("wait")
        for name, seconds in self._timer.seconds.items():
            timer.add(name, seconds)

    def _remember_position(self) -> None:
        """Note where feed and counter stand before rollouts are made."""
        self._feed_state = copy.deepcopy(self.feed.state())
        self._counter_state = None if self.counter is None else copy.deepcopy(self.counter.state())

    def _rewind(self) -> None:
        """Put feed and counter back: the rollouts were not made."""
        self.feed.load(self._feed_state)
        if self.counter is not None:
            self.counter.load(self._counter_state)

    def undo(self) -> None:
        """Go back to before the last `next`: nobody learned from its rollouts. Stops the thread."""
        self.close()
        if self._used_rounds is not None and self.failure is None:
            self._rounds, self._feed_state, self._used_rounds = self._used_rounds, self._used_feed_state, None

    def close(self) -> None:
        """Stop the thread, and drop what it makes."""
        self.stop.set()
        if self._work is not None:
            self._work.join()
            self._work = None

    # --- checkpoints: whole, on the first rank ---

    def saved(self) -> bytes:
        """What a checkpoint's file holds: every rank's rollouts and the feed's state. Every rank takes part."""
        if self._work is not None:
            raise ValueError("rollouts are saved between two iterations")
        by_rank = cast(list[Rounds], collect.gather(self._rounds or []))
        rounds = [[g for part in parts for g in part] for parts in zip(*by_rank, strict=True)]
        tensors, about = pack_rollouts([g for groups in rounds for g in groups])
        about |= {
            "feed": self._feed_state,
            "rounds": None if self.must_sample_first else [len(groups) for groups in rounds],
        }
        return save(tensors, metadata={"hone": json.dumps(about)})

    def load(self, folder: Path, *, changed: bool = False) -> None:
        """Go on with the rollouts of a checkpoint, whatever number of ranks saved it. Tasks are read from the feed.

        changed: the settings have changed. Rollouts that do not fit them are made again.
        """
        path = folder / names.AHEAD
        if path.is_file() != bool(self.lag) and not changed:
            raise HoneError(f"{folder} was saved with train.lag={1 - self.lag}: resume with the same")
        if not path.is_file():
            return
        try:
            with safe_open(path, framework="pt") as file:
                about = json.loads((file.metadata() or {})["hone"])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError, KeyError, ValueError, RecursionError) as error:
            raise HoneError(f"{path} cannot be read ({error}): use an earlier checkpoint") from error
        try:
            self._take(tensors, about, changed=changed)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError) as error:
            said = f"{type(error).__name__}: {error}"
            raise HoneError(f"{path} is damaged ({said}): use an earlier checkpoint") from error

    def _take(self, tensors: Mapping[str, Tensor], about: Any, *, changed: bool) -> None:
        try:
            self.feed.load(about["feed"])
        except HoneError:
            if not changed:
                raise
            return  # of other data
        sizes: list[int] | None = about["rounds"]
        self._feed_state = about["feed"]
        if not self.lag or sizes is None:
            return
        if any(type(n) is not int or n < 0 for n in (*sizes, *about["groups"])) or sum(sizes) != len(about["groups"]):
            raise ValueError("rounds and groups do not agree")
        groups = unpack_rollouts(tensors, about, self.feed.take(sum(sizes)))
        ends = list(accumulate(sizes))
        rounds = [groups[end - size : end] for size, end in zip(sizes, ends, strict=True)]
        self._rounds = [part[collect.share(len(part))] for part in rounds]


def as_queue(tasks: "Feed[Task] | RolloutQueue") -> RolloutQueue:
    """A feed alone is a queue without a lag."""
    return tasks if isinstance(tasks, RolloutQueue) else RolloutQueue(tasks)
