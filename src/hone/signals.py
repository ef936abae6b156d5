"""Ctrl-C and SIGTERM ask a run to stop after the step it is in; a second Ctrl-C stops it at once."""

import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any, Self


class Stopper:
    """Within it, `asked` tells whether somebody wants the run to end. Handlers are put back on leaving.

    patience: seconds in which a second signal is the first one told again.
    """

    def __init__(self, *, patience: float = 0.0) -> None:
        self.asked, self._patience, self._since = False, patience, 0.0
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

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.asked and now - self._since >= self._patience:
            raise KeyboardInterrupt
        if not self.asked:
            self.asked, self._since = True, now
