"""Work in threads: rewards are computed while the sampler goes on writing, and both while the learner updates."""

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Generic, Protocol, Self, TypeVar, runtime_checkable

import torch

from hone.log.stats import StageTimer
from hone.types import Group, Outcome, Rollout, Task

MOST_WAITING = 1024  # items that nobody has taken yet; with more the steps wait too
T = TypeVar("T")
Steps = Iterator[Sequence[tuple[int, Rollout]]]  # for each step of the sampler, the numbered rollouts that ended in it
OnSampled = Callable[[list[Group], StageTimer], None]  # is called with the sampled groups, before they are scored


@runtime_checkable
class Streaming(Protocol):
    """Yields rollouts as they end, `group` of each task. They get their tasks and texts afterwards."""

    group: int

    def __call__(self, tasks: list[Task], mine: slice) -> list[Group]: ...

    def sample(self, tasks: list[Task], mine: slice) -> list[Group]: ...

    def stream(self, tasks: list[Task], mine: slice) -> Steps: ...

    def add_texts(self, groups: Sequence[Group], tasks: Sequence[Task]) -> list[Group]: ...


@runtime_checkable
class Scoring(Protocol):
    """Gives rollouts their outcomes. one_by_one: no outcome depends on the rollouts that are scored with it."""

    @property
    def one_by_one(self) -> bool: ...

    def __call__(self, groups: list[Group]) -> list[Group]: ...

    def fill(self, groups: Sequence[Group], *, bad: Sequence[Outcome] = (), count: int = 0) -> list[Group]: ...

    def check(self, groups: Sequence[Group]) -> None: ...

    def after(self, groups: Sequence[Group]) -> Self: ...


class Cancelled(Exception):
    """The caller cancelled this work."""


class BackgroundTask(Generic[T]):
    """A function in a thread of its own, on the caller's GPU. `result` raises what it raised.

    stream: the CUDA stream that it works in; None: the caller's.
    """

    def __init__(self, work: Callable[[], T], *, stream: "torch.cuda.Stream | None" = None) -> None:
        self._work, self._stream = work, stream
        if stream is None and torch.cuda.is_initialized():  # a thread starts on the first GPU and its default stream
            self._stream = torch.cuda.current_stream()
        self._found: list[T] = []
        self.error: BaseException | None = None  # what the function raised
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def result(self) -> T:
        """Wait for the function, and return what it returned."""
        self.join()
        if self.error is not None:
            raise self.error
        return self._found[0]

    def ended(self, seconds: float = 0.0) -> bool:
        """Whether it has ended, or ends within so many seconds."""
        return self._done.wait(seconds)

    def join(self) -> None:
        """Wait until it has ended or failed."""
        self._done.wait()  # a Thread.join that a signal has interrupted takes the thread for ended
        self._thread.join()

    def _run(self) -> None:
        try:
            if self._stream is not None:
                torch.cuda.set_device(self._stream.device)  # kernels need a context in this thread before torch does
            with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
                self._found.append(self._work())
        except BaseException as error:
            self.error = error
        finally:
            self._done.set()


class Prefetch(Generic[T]):
    """What steps yield, in order, while a thread computes the next ones. Leaving the context ends the thread."""

    def __init__(self, steps: Iterator[Sequence[T]], stop: threading.Event) -> None:
        self._steps, self._stop, self._left = steps, stop, False
        self._most: float = MOST_WAITING
        self._waiting, self._taken = 0, threading.Condition()
        self._ready = SimpleQueue[Sequence[T] | None]()
        self.ended = 0.0  # when the last step was done, by time.perf_counter

    def __enter__(self) -> Self:
        self._thread = BackgroundTask(self._pump)
        return self

    def take(self) -> list[T]:
        """All items that are there, at least one. Empty when the steps have ended."""
        given = self._ready.get()
        found = list(given or ())
        while given is not None and not self._ready.empty():  # nobody else takes from it
            given = self._ready.get()
            found += given or ()
        if given is None:
            self._ready.put(None)  # so that later calls see the end too
        if not found:
            self._thread.result()
        with self._taken:
            self._waiting -= len(found)
            self._taken.notify()
        return found

    def wait_for_end(self) -> None:
        """Wait until the steps have ended. Their items stay here."""
        self._let(math.inf)
        self._thread.join()

    def _let(self, most: float) -> None:
        with self._taken:
            self._most = most
            self._taken.notify()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._left = True
        self._let(math.inf)
        self._thread.join()

    def _pump(self) -> None:
        try:
            for given in self._steps:
                if self._left or self._stop.is_set():
                    raise Cancelled
                if given:
                    self._give(given)
        finally:
            close: Any = getattr(self._steps, "close", None)
            if close is not None:
                close()
            self.ended = time.perf_counter()
            self._ready.put(None)

    def _give(self, given: Sequence[T]) -> None:
        with self._taken:
            self._taken.wait_for(lambda: self._waiting < self._most)
            self._waiting += len(given)
        self._ready.put(given)


WORTH = 0.03  # seconds of scoring: with less, two threads that share the interpreter cost more than they save


def score_while_sampling(
    roll: Streaming,
    score: Scoring,
    timer: StageTimer,
    *,
    tasks: list[Task],
    mine: slice,
    stop: threading.Event,
    on_sampled: OnSampled,
) -> list[Group]:
    """The groups in order of their tasks, each rollout scored in this thread while others are still being written.

    The reward runs in the caller's thread: signals, event loops and database connections may be bound to it. Each call
    gets all rollouts that have ended since the last call, in the order in which they ended.
    on_sampled: is called with all groups when the last rollout has ended, before the rest of them is scored.
    """
    done, invalid = dict[int, Rollout](), list[Outcome]()
    of, group, spent = tasks[mine], roll.group, 0.0
    count = len(of) * group
    with Prefetch(roll.stream(tasks, mine), stop) as prefetch:
        while ended := prefetch.take():
            if done and spent * count < WORTH * len(done):
                prefetch.wait_for_end()
                ended += prefetch.take()
            if len(done) + len(ended) == count:
                prefetch.wait_for_end()  # the sampler is done with the model
                timer("sample", at=prefetch.ended)
                timer("score")
                on_sampled(_in_order(done | dict(ended), group), timer)
            with_texts = roll.add_texts([[r] for _, r in ended], [of[number // group] for number, _ in ended])
            start = time.perf_counter()
            scored = [r for (r,) in score.fill(with_texts, bad=invalid, count=count)]
            spent += time.perf_counter() - start
            done |= {number: r for (number, _), r in zip(ended, scored, strict=True)}
            invalid += [r.outcome for r in scored if r.outcome is not None and not r.outcome.valid]
    timer("sample", at=prefetch.ended)
    groups = _in_order(done, group)
    score.check(groups)
    timer("score")
    timer.add("scoring", spent)
    return groups


def _in_order(done: dict[int, Rollout], group: int) -> list[Group]:
    rollouts = [done[number] for number in sorted(done)]
    return [rollouts[i : i + group] for i in range(0, len(rollouts), group)]
