"""The supply of rollouts: prompts are rendered, sampled and scored, when the loop asks or while the learner updates."""

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
from hone.log.stats import Laps
from hone.rollout import overlap
from hone.rollout.local import Sampler
from hone.rollout.overlap import Aside, Begin
from hone.rollout.rollout_file import packed, unpacked
from hone.storage import names
from hone.types import Group, Rollout, Stop, Task

Roll = Callable[[list[Task], slice], list[Group]]  # sample a group for each task of this rank's part
Score = Callable[[list[Group]], list[Group]]  # give each rollout its outcome
Rounds = list[list[Group]]  # this rank's groups, scored, by round of asking for prompts
Fill = Callable[[Laps], Rounds]

LOST = (
    "the sampler gave a log-prob that is not finite: go on from the last checkpoint, and where it comes again from an "
    "earlier one with a lower optim.lr"
)


class Supply:
    """What the online loop asks for rollouts. It also keeps the time of each stage, and publishes weights.

    ahead: where tasks come from, and rollouts that are sampled ahead of the learner wait.
    begin: is given what is sampled, before it is scored.
    publish: tells the sampler the version of the weights that it samples from next.
    """

    def __init__(
        self,
        ahead: "Ahead",
        roll: Roll,
        score: Score,
        algo: Algorithm,
        *,
        prompts: int,
        refill_rounds: int,
        begin: Begin,
        publish: Callable[[int], None],
    ) -> None:
        self.ahead = ahead
        self._roll, self._score, self._algo, self._begin, self._publish = roll, score, algo, begin, publish
        self._prompts, self._refill_rounds = prompts, refill_rounds
        self.lap = Laps()  # called at the end of each stage, with its name

    def next(self, version: int) -> Rounds:
        """One iteration's rollouts, scored, by round of asking; version: of the learner's weights."""
        self.lap = Laps()
        return self.ahead.next(self._fill, self.lap, partial(self._publish, version))

    def wait(self) -> float:
        """Until the rollouts that are sampled beside the update are there; the seconds of the iteration so far."""
        self.lap("update")
        self.ahead.wait(self.lap)
        return self.lap.total()

    def publish(self, version: int) -> dict[str, float]:
        """The sampler gets the learner's weights; the seconds of every stage.

        Where the next rollouts could not be sampled beside this iteration, the old weights still have to sample them.
        """
        self.lap("update")
        if not self.ahead.must_sample_first:
            self._publish(version)
        self.lap("publish")
        return self.lap.metrics()

    def _fill(self, laps: Laps) -> Rounds:
        """This rank's part of everything sampled, scored, by round of asking.

        With refill, ask for as many prompts as all ranks together still miss. Each rank's source hands out the same
        tasks.
        """
        found: Rounds = []
        missing, algo = self._prompts, self._algo
        while missing > 0 and len(found) < (self._refill_rounds if algo.refill else 1):
            make = partial(self._round, missing, laps)
            # a rank that fails must not leave the others waiting; with a lag they agree when they wait for the thread
            found.append(make() if self.ahead.lag else collect.together(make))
            if algo.refill:  # else ranks have nothing to tell each other here, where a lag has a thread of its own
                missing -= collect.count(len(algo.select(found[-1])))
        return found

    def _round(self, prompts: int, laps: Laps) -> list[Group]:
        """Rollouts of this rank's part of the next tasks, with their outcomes."""
        tasks = self.ahead.feed.take(prompts)
        return sample_and_score(self._roll, self._score, tasks, laps, stop=self.ahead.stop, begin=self._begin)


def sample_and_score(
    roll: Roll, score: Score, tasks: list[Task], laps: Laps, *, stop: threading.Event, begin: Begin
) -> list[Group]:
    """Rollouts of this rank's part of the tasks with their outcomes; where neither minds, both at the same time."""
    mine = collect.share(len(tasks))
    if isinstance(roll, overlap.Streaming) and isinstance(score, overlap.Scoring) and score.one_by_one:
        return overlap.scored(roll, score, laps, tasks=tasks, mine=mine, stop=stop, begin=begin)
    streams = isinstance(roll, overlap.Streaming)
    groups = roll.sampled(tasks, mine) if streams else roll(tasks, mine)
    laps("sample")
    begin(groups, laps)
    groups = roll.told(groups, tasks[mine]) if streams else groups
    start = time.perf_counter()
    groups = score(groups)
    laps("score")
    laps.beside("scoring", time.perf_counter() - start)
    return groups


class Roller:
    """Samples `group` completions of each task. Sampled tokens are kept as they are, never re-tokenised."""

    def __init__(self, sampler: Sampler, tokenizer: Tokenizer, params: SampleParams, *, group: int) -> None:
        self.sampler, self.tokenizer, self.params, self.group = sampler, tokenizer, params, group
        self.requests = 0  # each request draws its own random numbers

    def __call__(self, tasks: list[Task], mine: slice = slice(None)) -> list[Group]:
        """Groups for this rank's part of the tasks; requests are numbered over all, so ranks change no sample."""
        return self.told(self.sampled(tasks, mine), tasks[mine])

    def sampled(self, tasks: list[Task], mine: slice = slice(None)) -> list[Group]:
        """The same groups, before `told` gives them their tasks and texts."""
        first, prompts = self._next(tasks, mine)
        return self.sampler.sample(prompts, n=self.group, params=self.params, first_request=first)

    def stream(self, tasks: list[Task], mine: slice = slice(None)) -> Iterator[list[tuple[int, Rollout]]]:
        """As `sampled`, step by step: the rollouts that ended in it, numbered within this rank's part."""
        first, prompts = self._next(tasks, mine)
        yield from self.sampler.stream(prompts, n=self.group, params=self.params, first_request=first)

    def told(self, groups: Sequence[Group], tasks: Sequence[Task]) -> list[Group]:
        """The same groups, each rollout with its task and its text, without stop token or stop string."""
        rollouts = [r for g in groups for r in g]
        of = [task for g, task in zip(groups, tasks, strict=True) for _ in g]
        if rollouts and not np.isfinite(np.concatenate([r.gen_logp for r in rollouts])).all():
            raise HoneError(LOST)
        texts = self.tokenizer.decode_all([self._written(r) for r in rollouts])
        told = iter(
            r.having(task=task, text=r.text if r.stop is Stop.STRING else text)
            for r, task, text in zip(rollouts, of, texts, strict=True)
        )
        return [list(islice(told, len(g))) for g in groups]

    def _next(self, tasks: list[Task], mine: slice) -> tuple[int, list[list[int]]]:
        """The number of this rank's first request, and its prompts; the next call's come after all ranks' requests."""
        first = self.requests + mine.indices(len(tasks))[0] * self.group
        self.requests += len(tasks) * self.group
        return first, render_prompts(self.tokenizer, [(task.prompt, task.extra.get("tools")) for task in tasks[mine]])

    def _written(self, rollout: Rollout) -> Sequence[int]:
        """Its completion's tokens that are text; none where a stop string has ended the text that is known."""
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


class Ahead:
    """The queue between sampler and learner: at most one iteration's rollouts.

    lag 0: each iteration's are made when it asks for them. 1: while the learner updates on one iteration's, a thread
    makes the next one's with the weights that were published last, so the first two iterations share a version.
    Nothing runs between `wait` and `next`: weights are published and checkpoints taken there.
    Rollouts that could not be made ahead are owed: `failure` is raised by `next`, so that the iteration beside which
    they were made ends as any other; their tasks are taken back, and the sampler has to stay with its weights.
    counter: is put back with the feed.
    """

    def __init__(self, feed: Feed[Task], *, lag: int = 0, counter: Counter | None = None) -> None:
        self.feed, self.lag, self.stop = feed, lag, threading.Event()
        self.counter, self.failure = counter, cast(Exception | None, None)
        self._rounds: Rounds | None = None  # made and not yet learned from
        self._used: Rounds | None = None  # what is being learned from
        self._before: Mapping[str, Any] = {}  # where the feed stood before the tasks of the rounds
        self._earlier: Mapping[str, Any] = {}  # and before those of what is being learned from
        self._counted: Any = None  # where the counter stood before the rounds
        self._laps = Laps()  # of their making
        self._work: Aside[Rounds] | None = None
        self._stream: torch.cuda.Stream | None = None

    @property
    def must_sample_first(self) -> bool:
        """Whether the next iteration's rollouts are still to be made, by the weights that the sampler has."""
        return self.lag > 0 and self._rounds is None

    def next(self, fill: Fill, laps: Laps, publish: Callable[[], None] = lambda: None) -> Rounds:
        """One iteration's rollouts; with a lag the next one's are begun.

        publish: gives the sampler the learner's weights, when it has made what was owed.
        """
        if not self.lag:
            return fill(laps)
        if self.failure is not None:
            raise self.failure
        if self._rounds is None:
            self._mark()
            self._rounds = collect.together(partial(fill, laps))
            publish()
        rounds, self._rounds = self._rounds, None
        self._used, self._earlier, self._laps = rounds, self._before, Laps()
        self._mark()
        if torch.cuda.is_initialized():
            # a stream of its own: behind the learner's kernels it would wait for each update
            self._stream = self._stream or torch.cuda.Stream()
            self._stream.wait_stream(torch.cuda.current_stream())
        self._work = Aside(lambda: fill(self._laps), stream=self._stream)
        return rounds

    def wait(self, laps: Laps) -> None:
        """Until the next iteration's rollouts are there, or are owed."""
        if self._work is None:
            return
        self._work.join()
        work, self._work, self._used = self._work, None, None
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
        laps("wait")
        for name, seconds in self._laps.seconds.items():
            laps.beside(name, seconds)

    def _mark(self) -> None:
        """Here the making of rollouts begins."""
        self._before = copy.deepcopy(self.feed.state())
        self._counted = None if self.counter is None else copy.deepcopy(self.counter.state())

    def _rewind(self) -> None:
        """Take back the tasks of rollouts that were not made."""
        self.feed.load(self._before)
        if self.counter is not None:
            self.counter.load(self._counted)

    def undo(self) -> None:
        """Go back to before the last `next`: nobody learned from its rollouts. What is being sampled is given up."""
        self.close()
        if self._used is not None and self.failure is None:
            self._rounds, self._before, self._used = self._used, self._earlier, None

    def close(self) -> None:
        """Give up what is being made."""
        self.stop.set()
        if self._work is not None:
            self._work.join()
            self._work = None

    # --- checkpoints: whole, on the first rank ---

    def saved(self) -> bytes:
        """What a checkpoint's file holds: every rank's rollouts, and where the feed stood; every rank takes part."""
        if self._work is not None:
            raise ValueError("rollouts are saved between two iterations")
        by_rank = cast(list[Rounds], collect.gather(self._rounds or []))
        rounds = [[g for part in parts for g in part] for parts in zip(*by_rank, strict=True)]
        tensors, about = packed([g for groups in rounds for g in groups])
        about |= {
            "feed": self._before,
            "rounds": None if self.must_sample_first else [len(groups) for groups in rounds],
        }
        return save(tensors, metadata={"hone": json.dumps(about)})

    def load(self, folder: Path, *, changed: bool = False) -> None:
        """Go on with the rollouts that a checkpoint holds, of whatever number of ranks; tasks are read anew.

        changed: the settings are others; rollouts that do not fit them are made anew.
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
        self._before = about["feed"]
        if not self.lag or sizes is None:
            return
        if any(type(n) is not int or n < 0 for n in (*sizes, *about["groups"])) or sum(sizes) != len(about["groups"]):
            raise ValueError("rounds and groups do not agree")
        groups = unpacked(tensors, about, self.feed.take(sum(sizes)))
        ends = list(accumulate(sizes))
        rounds = [groups[end - size : end] for size, end in zip(sizes, ends, strict=True)]
        self._rounds = [part[collect.share(len(part))] for part in rounds]


def as_ahead(tasks: "Feed[Task] | Ahead") -> Ahead:
    """A feed whose rollouts are made when they are asked for is a queue of length 0."""
    return tasks if isinstance(tasks, Ahead) else Ahead(tasks)
