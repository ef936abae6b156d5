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

from hone.log.stats import Laps
from hone.types import Group, Outcome, Rollout, Task

MOST_WAITING = 1024  # of what steps gave and nobody has taken; then the steps wait too
T = TypeVar("T")
Steps = Iterator[Sequence[tuple[int, Rollout]]]  # after each of the sampler's, what has ended in it, numbered
Begin = Callable[[list[Group], Laps], None]  # is given what is sampled, before it is scored


@runtime_checkable
class Streaming(Protocol):
    """Hands on rollouts as they end, `group` of each task. They get their tasks and texts afterwards."""

    group: int

    def __call__(self, tasks: list[Task], mine: slice) -> list[Group]: ...

    def sampled(self, tasks: list[Task], mine: slice) -> list[Group]: ...

    def stream(self, tasks: list[Task], mine: slice) -> Steps: ...

    def told(self, groups: Sequence[Group], tasks: Sequence[Task]) -> list[Group]: ...


@runtime_checkable
class Scoring(Protocol):
    """Gives rollouts their outcomes; `one_by_one`: none depends on those that are scored with it."""

    @property
    def one_by_one(self) -> bool: ...

    def __call__(self, groups: list[Group]) -> list[Group]: ...

    def fill(self, groups: Sequence[Group], *, bad: Sequence[Outcome] = (), count: int = 0) -> list[Group]: ...

    def check(self, groups: Sequence[Group]) -> None: ...


class Stopped(Exception):
    """The caller cancelled this work."""


class Aside(Generic[T]):
    """A function in a thread of its own, on the caller's GPU; what it raises is raised where its result is asked for.

    stream: the GPU's queue it works in; None: the caller's.
    """

    def __init__(self, work: Callable[[], T], *, stream: "torch.cuda.Stream | None" = None) -> None:
        self._work, self._stream = work, stream
        if stream is None and torch.cuda.is_initialized():  # a thread begins with the first GPU and its default queue
            self._stream = torch.cuda.current_stream()
        self._found: list[T] = []
        self.error: BaseException | None = None  # what it ended with
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def result(self) -> T:
        """What the function returned, when it has."""
        self.join()
        if self.error is not None:
            raise self.error
        return self._found[0]

    def ended(self, seconds: float = 0.0) -> bool:
        """Whether it has come to an end, or does within so many seconds."""
        return self._done.wait(seconds)

    def join(self) -> None:
        """Wait for its end, whatever it is."""
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


class Beside(Generic[T]):
    """What steps give, in order, while a thread goes on with the next of them; to be left as a context."""

    def __init__(self, steps: Iterator[Sequence[T]], stop: threading.Event) -> None:
        self._steps, self._stop, self._left = steps, stop, False
        self._most: float = MOST_WAITING
        self._waiting, self._taken = 0, threading.Condition()
        self._ready = SimpleQueue[Sequence[T] | None]()
        self.ended = 0.0  # when the last step was done, by time.perf_counter

    def __enter__(self) -> Self:
        self._thread = Aside(self._pump)
        return self

    def some(self) -> list[T]:
        """All that is there, and at least one; nothing at the end."""
        given = self._ready.get()
        found = list(given or ())
        while given is not None and not self._ready.empty():  # nobody else takes from it
            given = self._ready.get()
            found += given or ()
        if given is None:
            self._ready.put(None)  # the end is told as often as it is asked for
        if not found:
            self._thread.result()
        with self._taken:
            self._waiting -= len(found)
            self._taken.notify()
        return found

    def through(self) -> None:
        """Wait until the steps are done; what they gave is there all the same."""
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
                    raise Stopped
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


WORTH = 0.03  # seconds of scoring: with less, two threads that want the interpreter cost more than is won


def scored(
    roll: Streaming, score: Scoring, laps: Laps, *, tasks: list[Task], mine: slice, stop: threading.Event, begin: Begin
) -> list[Group]:
    """The groups in order of their tasks, each rollout scored in this thread while others are still being written.

    A reward stays in the thread that calls: signals, event loops and database connections may be bound to it. It is
    called in the order in which rollouts end, on all that have ended since the last call, whether it is fast, and waits
    for the last of them, or not.
    begin: is given all of them when the last one has ended, before what is left of them is told its text and scored.
    """
    done, bad = dict[int, Rollout](), list[Outcome]()  # bad: those that are invalid
    of, group, spent = tasks[mine], roll.group, 0.0
    count = len(of) * group
    with Beside(roll.stream(tasks, mine), stop) as beside:
        while fresh := beside.some():
            if done and spent * count < WORTH * len(done):
                beside.through()
                fresh += beside.some()
            if len(done) + len(fresh) == count:
                beside.through()  # the sampler is done with the model
                laps("sample", at=beside.ended)
                laps("score")
                begin(_in_order(done | dict(fresh), group), laps)
            told = roll.told([[r] for _, r in fresh], [of[number // group] for number, _ in fresh])
            start = time.perf_counter()
            marked = [r for (r,) in score.fill(told, bad=bad, count=count)]
            spent += time.perf_counter() - start
            done |= {number: r for (number, _), r in zip(fresh, marked, strict=True)}
            bad += [r.outcome for r in marked if r.outcome is not None and not r.outcome.valid]
    laps("sample", at=beside.ended)
    groups = _in_order(done, group)
    score.check(groups)
    laps("score")
    laps.beside("scoring", spent)
    return groups


def _in_order(done: dict[int, Rollout], group: int) -> list[Group]:
    rollouts = [done[number] for number in sorted(done)]
    return [rollouts[i : i + group] for i in range(0, len(rollouts), group)]
