"""Rollouts of the next iteration, sampled and scored while the learner updates, and how a checkpoint holds them."""

import copy
import json
import threading
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from hone.algo.table import Algorithm
from hone.data.feed.source import Feed
from hone.dist import collect
from hone.errors import HoneError
from hone.log.laps import Laps
from hone.reward.outcome import finite
from hone.rollout.overlap import Aside
from hone.types import Group, Outcome, Rollout, Stop, Task

AHEAD = "ahead.safetensors"
KINDS = {
    "tokens": torch.int64,
    "mask": torch.bool,
    "gen_logp": torch.float64,
    "raw_logp": torch.float64,
    "support_size": torch.int32,
    "support": torch.int32,
}  # what a checkpoint holds of rollouts in tensors
Rounds = list[list[Group]]  # this rank's groups, scored, by round of asking for prompts
Fill = Callable[[Laps], Rounds]


def check_lag(algo: Algorithm, *, name: str, corrected: bool) -> None:
    """Whether the algorithm can learn from samples of the weights before, or HoneError."""
    if algo.on_policy or algo.trust_region:
        raise HoneError(f"{name} learns from the policy's own samples only: set train.lag=0")
    if algo.credit is not None and not corrected:
        raise HoneError(f"with train.lag=1 {name} learns from older weights' samples: set train.mismatch=truncate")
    if algo.refill and collect.world()[1] > 1:  # they would talk to each other in two threads
        raise HoneError(f"{name} asks for prompts until all ranks have enough: set train.lag=0, or use one rank")


class Counter(Protocol):
    """What counts up while rollouts are made, such as a roller's requests."""

    def state(self) -> Any: ...

    def load(self, state: Any) -> None: ...


class Ahead:
    """An endless supply of rollouts from a feed of tasks.

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
    def owes(self) -> bool:
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
        if (
            torch.cuda.is_initialized()
        ):  # a queue of its own: behind the learner's kernels it would wait for each update
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
        """As before the last `next`: what that gave has not been learned from, what is being made is given up."""
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
        about |= {"feed": self._before, "rounds": None if self.owes else [len(groups) for groups in rounds]}
        return save(tensors, metadata={"hone": json.dumps(about)})

    def load(self, folder: Path, *, changed: bool = False) -> None:
        """Go on with the rollouts that a checkpoint holds, of whatever number of ranks; tasks are read anew.

        changed: the settings are others; rollouts that do not fit them are made anew.
        """
        path = folder / AHEAD
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


def packed(groups: Sequence[Group]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Rollouts as a few long tensors, and the rest as JSON; tasks are left out, for the feed gives them again."""
    rows = [r for g in groups for r in g]
    tensors = {
        name: torch.tensor([x for r in rows for x in getattr(r, name)], dtype=kind) for name, kind in KINDS.items()
    }
    about = [
        {
            "length": len(r.tokens),
            "stop": r.stop.value,
            "limit": r.limit,
            "version": r.version,
            "text": r.text,
            "outcome": _plain(r.outcome),
            "support": len(r.support),
        }
        for r in rows
    ]
    return tensors, {"groups": [len(g) for g in groups], "rows": about}


def _plain(outcome: Outcome | None) -> dict[str, Any] | None:
    if outcome is None:
        return None
    parts, added = (
        {name: x if isinstance(x, int | float) else float(x) for name, x in numbers.items()}
        for numbers in (outcome.parts, outcome.added)
    )
    return {"value": outcome.value, "parts": parts, "added": added, "reason": outcome.reason}


def unpacked(tensors: Mapping[str, Tensor], about: Mapping[str, Any], tasks: Sequence[Task]) -> list[Group]:
    """What `packed` was given, each group with its task."""
    if len(about["rows"]) != sum(about["groups"]):
        raise ValueError("groups and rows do not agree")
    rows = _rows(tensors, about["rows"])
    return [[replace(next(rows), task=task) for _ in range(n)] for n, task in zip(about["groups"], tasks, strict=True)]


def _rows(tensors: Mapping[str, Tensor], rows: Sequence[Mapping[str, Any]]) -> Iterator[Rollout]:
    columns = {name: x.tolist() for name, x in tensors.items()}
    counts = ("length", "limit", "version", "support")
    start = sized = kept = 0
    for row in rows:
        if any(type(row[name]) is not int or not 0 <= row[name] < 2**63 for name in counts):
            raise ValueError("a count is none")
        part, ids = slice(start, start + row["length"]), slice(kept, kept + row["support"])
        sizes = slice(sized, sized + (row["length"] if row["support"] else 0))
        start, sized, kept = part.stop, sizes.stop, ids.stop
        yield Rollout(
            tokens=array("q", columns["tokens"][part]),
            mask=tuple(columns["mask"][part]),
            gen_logp=array("d", columns["gen_logp"][part]),
            raw_logp=array("d", columns["raw_logp"][part]),
            support_size=array("i", columns["support_size"][sizes]) if row["support"] else (),
            support=array("i", columns["support"][ids]) if row["support"] else (),
            stop=Stop(row["stop"]),
            limit=row["limit"],
            version=row["version"],
            text=_text(row["text"]),
            outcome=None if row["outcome"] is None else _outcome(row["outcome"]),
        )


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"a text is {type(value).__name__}")
    return value


def _outcome(plain: Mapping[str, Any]) -> Outcome:
    """What `_plain` was given."""
    numbers = [
        *plain["parts"].values(),
        *plain["added"].values(),
        *([] if plain["value"] is None else [plain["value"]]),
    ]
    if not all(isinstance(x, int | float) and not isinstance(x, bool) and finite(x) is not None for x in numbers):
        raise ValueError("a reward is no number")
    return Outcome(**{**plain, "reason": _text(plain["reason"])})
