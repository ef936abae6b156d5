"""Ctrl-C, SIGTERM and a closed terminal end a run: before its first step at once, later after the step that it is in.

A second signal ends it at once.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from types import FrameType, TracebackType
from typing import Any, Self, TextIO

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
STOPPING = "stopping: saves after this step; {again} ends at once\n"
AGAIN = 0.05  # seconds after which a signal that came during an import is sent again
_received = list[int]()  # signals that came before the first step


class Stopper:
    """Inside it a signal raises KeyboardInterrupt. Inside `gently`, the first signal only sets `asked`.

    After `gently` the run tidies up, and signals are ignored. On exit the old handlers are restored.
    patience: a second signal within so many seconds counts as the first one. says: print a line on the first signal.
    """

    def __init__(self, *, patience: float = 0.0, says: bool = True) -> None:
        self.asked, self._patience, self._since, self._says = False, patience, 0.0, says
        self._gentle, self._over, self._owner = False, False, os.getpid()
        self._before: dict[signal.Signals, Any] = {}
        self._resending = ExitStack()

    def __enter__(self) -> Self:
        if _received:  # a library has swallowed it, and what it was making may be incomplete
            raise KeyboardInterrupt(_received[0])
        if threading.current_thread() is threading.main_thread():  # elsewhere Python allows no handlers
            for number in NUMBERS:
                if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # ignored under nohup
                    self._before[number] = signal.signal(number, self._handle)
            self._resending.enter_context(_resend_dropped())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._resending.close()
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: set outside Python

    @contextmanager
    def gently(self) -> Iterator[Self]:
        """The steps of the run: the first signal sets `asked`, a second one raises."""
        self._gentle = True
        try:
            yield self
        finally:
            self._over = True

    def ask(self) -> None:
        """Ask the run to end, as the first signal does."""
        self.asked = True

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._owner:  # a process that was forked meanwhile ends as others do
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        if self._over or (self._since and time.monotonic() - self._since < self._patience):
            return
        if not self._gentle and _importing(frame):
            return _send_later(number)
        self._since = self._since or time.monotonic()
        if self.asked or not self._gentle:
            raise KeyboardInterrupt(number)
        self.asked = True
        if self._says:
            _print_stopping(number)


def _importing(frame: FrameType | None) -> bool:
    """Whether a module is just being imported. Some modules swallow an exception there, others make it an error."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def _send_later(number: int) -> None:
    """Send the signal again after AGAIN seconds, when the import may have ended."""
    timer = threading.Timer(AGAIN, os.kill, (os.getpid(), number))
    timer.daemon = True
    timer.start()


@contextmanager
def _resend_dropped() -> Iterator[None]:
    """Send a signal again if Python dropped it, because it came in a destructor or while a process was forked."""
    before, owner = sys.unraisablehook, os.getpid()

    def hook(lost: "sys.UnraisableHookArgs", /) -> None:
        if issubclass(lost.exc_type, KeyboardInterrupt) and os.getpid() == owner:
            _send_later(number_of(lost.exc_value))
        else:
            before(lost)

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = before


def _print_stopping(number: int) -> None:
    """Write a line past `sys.stderr`, which the signal may have interrupted in the middle of a line."""
    if sys.__stderr__ is None:  # closed from the start: descriptor 2 may belong to another file
        return
    typed = number == signal.SIGINT
    line = STOPPING.format(again="Ctrl-C again" if typed else "a second signal")
    with suppress(OSError):  # the terminal was closed
        os.write(2, ("\n" * (typed and os.isatty(2)) + line).encode())  # the terminal shows ^C in the current line


class WatchedStream:
    """A stream whose output is dropped once its terminal or pipe is closed; then `lost` is called."""

    def __init__(self, stream: TextIO, lost: Callable[[], None]) -> None:
        self._stream, self._lost, self._open = stream, lost, True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        self._try(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._try(self._stream.flush)

    def _try(self, act: Callable[[], object]) -> None:
        try:
            if self._open:
                act()
        except OSError:  # a closed terminal or pipe: the log has it all
            self._open = False
            self._lost()


def number_of(error: BaseException | None) -> int:
    """The signal that raised a KeyboardInterrupt; SIGINT if it does not say."""
    number = error.args[0] if error is not None and error.args else None
    return number if isinstance(number, int) else signal.SIGINT


@contextmanager
def catch_signals() -> Iterator[list[int]]:
    """Yields the signals that arrive inside. A library that is being imported may turn one into an error of its own."""
    _received.clear()

    owner = os.getpid()

    def note(number: int, frame: FrameType | None) -> None:
        if os.getpid() != owner and number != signal.SIGINT:  # a process that was forked meanwhile ends as others do
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        if _importing(frame):
            if _torch_is_loading() and os.getpid() == owner:  # takes seconds, and no command has begun anything yet
                os.write(2, b"hone: interrupted; nothing new was saved\n")
                os._exit(128 + number)
            return _send_later(number)
        _received.append(number)
        raise KeyboardInterrupt(number)

    in_main_thread = threading.current_thread() is threading.main_thread()  # elsewhere Python allows no handlers
    free = [number for number in NUMBERS if in_main_thread and _is_free(number)]
    if signal.SIGINT not in free:  # the program handles signals itself
        yield _received
        return
    for number in free:
        signal.signal(number, note)
    try:
        with _resend_dropped():
            yield _received
    finally:
        for number in free:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        _received.clear()


def _is_free(number: int) -> bool:
    """Whether only Python or `__main__` has set the signal's handler, so that Hone may set its own.

    Ranks of torchrun keep the system's handlers: they may wait for each other in C++, where no Python handler runs.
    """
    before = signal.getsignal(number)
    if number != signal.SIGINT and "RANK" in os.environ:
        return False
    usual = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
    return before == usual or getattr(before, "early", False)


def _torch_is_loading() -> bool:
    spec = getattr(sys.modules.get("torch"), "__spec__", None)
    return bool(getattr(spec, "_initializing", False))
