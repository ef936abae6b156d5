"""`hone chat` on a terminal or in a pipe: lines in, answers out as they are written."""

import io
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from hone.errors import HoneError
from hone.serve.talk import Talk

HELP = "/reset begins anew, /system TEXT sets the system message, /save FILE writes the conversation, /quit leaves"
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # a model must not move the cursor or rename the window
NOT_TEXT = re.compile(r"[\udc80-\udcff]")  # bytes that could not be decoded
CAN_EDIT = "readline"


class Interrupt:
    """Ctrl-C while an answer is written is a wish, not an exception: the engine is never left half-way."""

    def __init__(self) -> None:
        self.asked = False
        self.waiting = False  # for a line: only then it is raised

    @contextmanager
    def heard(self) -> Iterator[None]:
        """Inside, Ctrl-C sets `asked`, or ends the waiting for a line."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.signal(signal.SIGINT, self._ask)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        if self.waiting:
            self.waiting = False
            raise KeyboardInterrupt


class Terminal:
    """Reads lines and shows answers; notes go to stderr, so that a pipe gets answers alone."""

    def __init__(self, talk: Talk, *, system: str) -> None:
        self.talk, self.system = talk, system
        self.reads, self.shows = sys.stdin.isatty(), sys.stdout.isatty()
        self.colours = sys.stderr.isatty() and not os.environ.get("NO_COLOR")
        self.interrupt, self.lines = Interrupt(), 0
        talk.reset(system)

    def run(self) -> None:
        """Until the end of the input or /quit."""
        if isinstance(sys.stdin, io.TextIOWrapper):
            sys.stdin.reconfigure(errors="surrogateescape")  # what is not text is refused as a line, not as a program
        if self.talk.history.plain:
            self.note("the model has no chat template: it continues the text as it is")
        if self.reads:
            self._edit_lines()
            self.note(f"{HELP}; Ctrl-C stops an answer, Ctrl-D leaves")
        with self.interrupt.heard():
            while (line := self._line()) is not None and self._take(line):
                continue

    def _take(self, line: str) -> bool:
        """Answer a line or do what it commands; False: it was /quit."""
        self.lines += 1
        try:
            if NOT_TEXT.search(line):
                raise HoneError(f"line {self.lines} of the input is not UTF-8: write it as UTF-8")
            if line.startswith("/"):
                return self._command(line) != "quit"
            if line.strip():
                self._answer(line)
        except HoneError as error:
            self.note(str(error))
        return True

    def note(self, text: str) -> None:
        """A line for the person, not a part of any answer."""
        shown = f"\x1b[2m{text}\x1b[0m" if self.colours else text
        print(shown, file=sys.stderr, flush=True)

    def _edit_lines(self) -> None:
        """Arrow keys and a history where the system has them."""
        try:
            __import__(CAN_EDIT)
        except ImportError:
            self.note("lines cannot be edited here: this Python has no readline")

    def _line(self) -> str | None:
        """None: there are no more."""
        try:
            self.interrupt.waiting = True
            line = input("> ") if self.reads else sys.stdin.readline()
            self.interrupt.waiting = False
        except KeyboardInterrupt:
            print(file=sys.stderr)
            return "" if self.reads else None
        except EOFError:
            print()
            return None
        finally:
            self.interrupt.waiting = False
        return line if self.reads else line.rstrip("\n") if line else None

    def _command(self, line: str) -> str:
        name, _, rest = line[1:].partition(" ")
        rest = rest.strip()
        if name == "reset":
            self.talk.reset(self.system)
            self.note("a new conversation")
        elif name == "system":
            self.system = rest
            self.talk.reset(self.system)
            self.note(f"a new conversation, {self._begins()}")
        elif name == "save":
            if not rest:
                raise HoneError("name the file: /save FILE")
            self.talk.save(rest)
            self.note(f"saved in {rest}")
        elif name != "quit":
            raise HoneError(f"no command /{name}: {HELP}")
        return name

    def _begins(self) -> str:
        """What the model reads first."""
        if not self.system:
            return "without system message"
        return "which begins with this text" if self.talk.history.plain else "with this system message"

    def _answer(self, line: str) -> None:
        empty, self.interrupt.asked = True, False
        for piece in self.talk.say(line, stopped=lambda: self.interrupt.asked, note=self.note):
            empty = empty and not piece
            sys.stdout.write(CONTROL.sub("\ufffd", piece) if self.shows else piece)
            sys.stdout.flush()
        sys.stdout.write("\n")
        sys.stdout.flush()
        if self.interrupt.asked:
            self.note("stopped")
        elif empty:
            self.note("the model said nothing")
