"""Rewards in processes of their own: one that hangs is ended, and one that crashes harms no other process.

Each process has a limit of memory, and whatever it starts ends with it (see `supervisor`).

Workers are forked when the pool is made, so functions need not be importable. Make the pool before there are threads,
a GPU or large weights. Calls go out as pickles. Outcomes come back as JSON: nothing that a worker says may run here.
"""

import gc
import json
import math
import os
import pickle
import select
import signal
import socket
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn

import torch

from hone.errors import HoneError
from hone.reward.event_loop import MAX_CONCURRENT
from hone.reward.group_scorer import count_invalid
from hone.reward.outcome import crash_outcome, invalid, to_outcome
from hone.reward.score import Reward
from hone.reward.workers.process_tree import Bounds, usual_memory
from hone.reward.workers.supervisor import (
    ANSWERED,
    DIED,
    OUT_OF_MEMORY,
    TIMED_OUT,
    Closed,
    pair,
    receive,
    send,
    supervise,
)
from hone.types import Outcome, Rollout

MOST = 8  # workers, unless asked for more
STARTS, TRIES = 20.0, 3  # seconds that a new process may take to come to life, and how many are tried
ABANDONED = -1  # in place of a call's number: its answer is read and dropped
Answer = tuple[float, bytes]  # what became of a call (see supervisor), and what the worker said, or how it died
OnAnswer = Callable[[int, Answer], None]
Supervisor = tuple[socket.socket, int]  # the connection, and the process


def _cores() -> int:
    """The cores that this process may use, where the system tells (Linux)."""
    allowed = getattr(os, "sched_getaffinity", None)
    return len(allowed(0)) if allowed is not None else os.cpu_count() or 1


class WorkerPool:
    """Supervisors, each with a worker that calls one of these functions at a time; what they return must be JSON's.

    >>> pool = WorkerPool([len, sum], workers=1)
    >>> pool.map([pickle.dumps((0, "four")), pickle.dumps((1, [1, 2]))], seconds=5.0)
    [(0.0, b'4'), (0.0, b'3')]
    >>> pool.close()
    """

    def __init__(self, functions: Sequence[Callable[[Any], Any]], *, workers: int = 0, memory: int = 0) -> None:
        """memory: bytes that each worker may take with its children; 0: its share of half the machine's."""

        def work(call: bytes) -> bytes:
            number, argument = pickle.loads(call)
            return json.dumps(functions[number](argument)).encode()

        self.size = workers or min(MOST, _cores())
        self.memory = memory or usual_memory(self.size)
        bounds = [Bounds.make(self.memory) for _ in range(self.size)]
        self._supervisors = [_supervisor(partial(supervise, work, bounds=each)) for each in bounds]
        self._bounds = {end: each for (end, _), each in zip(self._supervisors, bounds, strict=True)}
        self._idle, self._lock = [end for end, _ in self._supervisors], threading.Lock()
        self._given_up = dict[socket.socket, int]()  # whose answers are still to come, and nobody wants
        self.close = weakref.finalize(self, _close, os.getpid(), self._supervisors, bounds)

    def map(
        self, calls: Sequence[bytes], *, seconds: float, on_answer: OnAnswer = lambda number, answer: None
    ) -> list[Answer]:
        """The answers in the calls' order, as many at a time as there are workers; each call has so many seconds.

        on_answer: called with each call's number and answer as it comes. If it raises, the other calls are abandoned.
        """
        answers, waiting = dict[int, Answer](), list(reversed(list(enumerate(calls))))
        with self._lock:
            busy, self._given_up = self._given_up, {}
            while len(answers) < len(calls):
                while waiting and self._idle:
                    self._begin(busy, *waiting.pop(), seconds=seconds)
                if not busy:
                    raise HoneError("the processes that compute rewards were ended from outside: resume the run")
                for end in select.select(list(busy), [], [])[0]:
                    number, answer = busy.pop(end), self._finish(end)
                    answers |= {number: answer} if number != ABANDONED else {}
                    self._report(number, answer, on_answer, busy)
            self._given_up = busy
        return [answers[number] for number in range(len(calls))]

    def _begin(self, busy: dict[socket.socket, int], number: int, call: bytes, *, seconds: float) -> None:
        # On an interrupt it is not returned to the idle list: its late answer would be taken for the next call's.
        end = self._idle.pop()
        busy[end] = number
        with suppress(Closed):  # which is found out when it is asked for its answer
            send(end, call, seconds)

    def _report(self, number: int, answer: Answer, on_answer: OnAnswer, busy: Iterable[socket.socket]) -> None:
        try:
            if number != ABANDONED:
                on_answer(number, answer)
        except Exception:
            self._given_up = dict.fromkeys(busy, ABANDONED)
            raise

    def _finish(self, end: socket.socket) -> Answer:
        try:
            content, about = receive(end)
        except Closed:
            self._bounds[end].close()
            return DIED, b"its supervisor was ended"
        self._idle.append(end)
        return about, content


def _supervisor(run: Callable[[socket.socket], NoReturn]) -> Supervisor:
    """A supervisor that has started. A child of a process with threads may hang instead: one of the threads may have
    held a lock of Python's at the fork, and no thread of the child can release it."""
    for _ in range(TRIES):
        end, number = _forked(run)
        if select.select([end], [], [], STARTS)[0] and end.recv(1):
            return end, number
        end.close()
        os.kill(number, signal.SIGKILL)
        os.waitpid(number, 0)
    raise HoneError("processes that compute rewards do not start: try again, or set train.reward_apart=never")


def _forked(run: Callable[[socket.socket], NoReturn]) -> Supervisor:
    ours, theirs = pair()
    number = os.fork()
    if number:
        theirs.close()
        return ours, number
    try:
        gc.disable()  # it would write to memory that is shared as long as nobody does
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.dup2(2, 1)  # what a function prints is no part of what the command writes
        sys.stdout = sys.stderr
        torch.set_num_threads(1)  # those that the parent had are not here, and would be waited for
        theirs.sendall(b"!")
        run(theirs)
    finally:
        os._exit(1)


def _close(owner: int, supervisors: Iterable[Supervisor], bounds: Iterable[Bounds]) -> None:
    """Their connections end, and with them they do; not in a child that has a copy of the pool."""
    if os.getpid() != owner:
        return
    for end, _ in supervisors:
        end.close()
    for _, number in supervisors:
        try:
            os.waitpid(number, 0)
        except ChildProcessError:  # somebody else waits for every child
            continue
    for each in bounds:
        each.close()  # of a supervisor that was killed


@dataclass(frozen=True)
class WorkerReward(Reward):
    """A reward whose function is called in a pool's worker, with so many seconds for each completion.

    An async function gets a worker's whole share of the completions in one call, and waits for all of them at once.
    """

    pool: WorkerPool = field(kw_only=True)
    number: int = field(kw_only=True)  # of the function, in the pool
    seconds: float = field(kw_only=True)

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Outcome]:
        if not rollouts:
            return []
        columns, n = self.columns(rollouts), len(rollouts)
        share = n if not self.one_by_one else math.ceil(n / self.pool.size) if self.is_async else 1
        calls = [{name: c[i : i + share] for name, c in columns.items()} for i in range(0, n, share)]
        found, watched = dict[int, list[Outcome]](), count_invalid()

        def on_answer(number: int, answer: Answer) -> None:
            found[number] = self._read(calls[number], answer)
            if watched is not None:
                watched(found[number], timed_out=answer[0] == TIMED_OUT)

        self.pool.map([self._call(call) for call in calls], seconds=self._limit(share), on_answer=on_answer)
        return [outcome for number in range(len(calls)) for outcome in found[number]]

    def _limit(self, number: int) -> float:
        """Seconds for a call of so many completions; where they wait together each is timed in the worker as well."""
        if not (self.is_async and self.one_by_one):
            return self.seconds * number
        return self.seconds * math.ceil(number / MAX_CONCURRENT) * 1.5 + 1.0

    def _call(self, columns: dict[str, list[Any]]) -> bytes:
        try:
            return pickle.dumps((self.number, columns), protocol=pickle.HIGHEST_PROTOCOL)
        except Exception as error:  # pickling runs what the task's own classes say
            raise HoneError(
                f"reward {self.name} runs in a process of its own, and its task cannot be sent there "
                f"({type(error).__name__}: {error}): set train.reward_apart=never"
            ) from error

    def _read(self, columns: dict[str, list[Any]], answer: Answer) -> list[Outcome]:
        number = len(columns[self.names[0]])
        about, content = answer
        if about == TIMED_OUT:
            return [self.timeout_outcome(self._limit(number))] * number
        if about == OUT_OF_MEMORY:
            return [self._out_of_memory()] * number
        if about != ANSWERED:
            how = content.decode(errors="replace")
            said = f"crashed: reward {self.name} took its process down ({how})"
            return [invalid(said, location=self.location)] * number
        try:
            said = json.loads(content)
            if "error" in said:
                raise HoneError(str(said["error"]))
            found = [to_outcome(Outcome(**row)) for row in said["outcomes"]]
            if len(found) != number:
                raise ValueError(f"{len(found)} outcomes of {number}")
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            return [invalid(f"reward {self.name} spoilt its answer: {error}", location=self.location)] * number
        return [self._out_of_memory() if _lacked_memory(outcome) else outcome for outcome in found]

    def _out_of_memory(self) -> Outcome:
        size = f"{self.pool.memory / 2**30:.3g} GiB"
        return invalid(
            f"out of memory: reward {self.name} took more than {size} (train.reward_memory)", location=self.location
        )


def _lacked_memory(outcome: Outcome) -> bool:
    """Without a control group the limit makes Python raise MemoryError, and torch a RuntimeError."""
    reason = "" if outcome.valid else outcome.reason
    return reason.startswith("MemoryError") or "DefaultCPUAllocator: can't allocate memory" in reason


def _judge(reward: Reward) -> Callable[[dict[str, list[Any]]], dict[str, Any]]:
    """What a worker does with a call."""

    def judge(columns: dict[str, list[Any]]) -> dict[str, Any]:
        try:
            outcomes = [_plain(outcome) for outcome in reward.score_columns(columns)]
        except HoneError as error:
            return {"error": str(error)}
        except BaseException as error:  # KeyboardInterrupt, too, is only the function's own here
            outcomes = [_plain(crash_outcome(error))] * len(columns[reward.names[0]])
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError, AttributeError):  # nobody reads it, or it was closed
                stream.flush()
        return {"outcomes": outcomes}

    return judge


def _plain(outcome: Outcome) -> dict[str, Any]:
    def numbers(named: Mapping[str, Any]) -> dict[str, int | float]:
        return {name: x if isinstance(x, int | float) else float(x) for name, x in named.items()}

    parts, added = numbers(outcome.parts), numbers(outcome.added)
    return {"value": outcome.value, "parts": parts, "added": added, "reason": outcome.reason}


def in_workers(
    functions: Sequence[Callable[..., Any]], *, seconds: float | Sequence[float], workers: int = 0, memory: float = 0.0
) -> list[Reward]:
    """The same rewards, called in the workers of one pool. The pool ends when the last of them is deleted.

    seconds: for each completion, of all of them or of each. memory: GiB that a worker may take with all it starts; 0:
    its share of half the machine's memory.
    """
    each = list(seconds) if isinstance(seconds, Sequence) else [seconds] * len(functions)
    for limit in each:
        if not (math.isfinite(limit) and limit > 0):
            raise HoneError(f"a reward may take {limit} s: give a number above 0")
    rewards = [Reward(function, seconds=limit) for function, limit in zip(functions, each, strict=True)]
    pool = WorkerPool([_judge(reward) for reward in rewards], workers=workers, memory=int(memory * 2**30))
    return [WorkerReward(r.function, pool=pool, number=i, seconds=r.seconds or 0.0) for i, r in enumerate(rewards)]
