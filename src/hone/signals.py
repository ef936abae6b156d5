"""Ctrl-C and SIGTERM end a run: at once before its first step, after the step it is in once it turns, and a second one
at once again."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, Self


class Stopper:
    """Within it a signal is a KeyboardInterrupt; within `gently`, the first one only sets `asked`.

    After `gently` nothing is left to do but to tidy up, which no signal ends. Handlers are put back on leaving.
    patience: seconds in which a second signal is the first one told again.
    """

    def __init__(self, *, patience: float = 0.0) -> None:
        self.asked, self._patience, self._since = False, patience, 0.0
        self._gentle = self._over = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # elsewhere Python allows no handlers
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: set outside Python

    @contextmanager
    def gently(self) -> Iterator[Self]:
        """While the run turns."""
        self._gentle = True
        try:
            yield self
        finally:
            self._over = True

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._over or (self._since and time.monotonic() - self._since < self._patience):
            return
        self._since = self._since or time.monotonic()
        if self.asked or not self._gentle:
            raise KeyboardInterrupt
        self.asked = True
