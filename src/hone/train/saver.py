"""Checkpoints written while the loop goes on: a thread writes what was copied aside, one checkpoint at a time."""

import threading
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from hone.rollout.overlap import Aside, Stopped

ROOM = 2**31  # bytes of a GPU's memory that copies leave free


class Copies:
    """Copies of what training changes in place, each made once; other tensors are handed through."""

    def __init__(self, moving: Iterable[Tensor]) -> None:
        self._moving = {x.untyped_storage().data_ptr() for x in moving}
        self._made = dict[tuple[object, ...], Tensor]()

    def __call__(self, x: Tensor) -> Tensor:
        """The tensor as it is now."""
        x = x.detach()
        if x.is_meta or x.untyped_storage().data_ptr() not in self._moving:
            return x
        place = (x.device, x.data_ptr(), x.dtype, x.shape, x.stride())
        if place not in self._made:
            self._made[place] = _copy(x)
        return self._made[place]


def _copy(x: Tensor) -> Tensor:
    """On the same device, where a copy takes the least time, unless the device is nearly full."""
    full = x.is_cuda and torch.cuda.mem_get_info(x.device)[0] < x.nbytes + ROOM
    return x.cpu() if full else x.clone(memory_format=torch.contiguous_format)


class Saver:
    """Runs one writing at a time beside the loop. One that failed is told by `failed`; the next is then waited for."""

    def __init__(self) -> None:
        self._work: Aside[None] | None = None
        self._stop = threading.Event()
        self.events: list[str] = []  # what went wrong and was made good, for whoever prints it

    @property
    def failed(self) -> bool:
        """Whether the latest writing has come to an end without having written."""
        return self._work is not None and self._work.ended() and self._work.error is not None

    def go_on(self) -> None:
        """For the writing to call between two files: ends one that was given up."""
        if self._stop.is_set():
            raise Stopped

    def start(self, write: Callable[[], object]) -> None:
        """Write beside the loop, when the writing before has ended; where that one failed, wait for this one."""
        before = self._settle()
        if before is not None:
            self.events.append(f"{before}; the run is saved anew")
        box = [write]  # emptied, so that the copies go when they are written
        self._work = Aside(lambda: _discard(box.pop()()), stream=_queue())
        if before is not None:
            self.wait()

    def wait(self) -> None:
        """Until all is written; what went wrong is raised here."""
        error = self._settle()
        try:
            if error is not None:
                raise error
        finally:
            del error  # whose traceback holds this frame, and with it the run's tensors

    def close(self, *, patience: float | None = None) -> BaseException | None:
        """Wait for the writing; where it takes longer than the patience give it up, without harm. What went wrong."""
        if self._work is not None and patience is not None and not self._work.ended(patience):
            self._stop.set()
            if not self._work.ended(patience):  # in the middle of a large file: what is aside is swept away later
                return None
        return self._settle()

    def drain(self) -> list[str]:
        """What happened since it was last asked."""
        said, self.events = self.events, []
        return said

    def _settle(self) -> BaseException | None:
        """Wait for the writing in progress; the error it ended with."""
        if self._work is None:
            return None
        self._work.join()  # a signal may end the waiting, and the work is then still known
        work, self._work = self._work, None
        return work.error


def _discard(result: object) -> None:
    """A writing gives nothing back."""


def _queue() -> "torch.cuda.Stream | None":
    """A GPU's queue of its own, behind what was copied, so that the learner's kernels do not wait for the transfer."""
    if not torch.cuda.is_initialized():
        return None
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    return stream
