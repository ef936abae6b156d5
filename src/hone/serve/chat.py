"""`hone chat`: a conversation with one model, on a terminal or in a pipe.

Tokens are kept as they were sampled, so that each turn reads only what is new.
"""

import io
import json
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Protocol

from hone.data.text.chat import continue_chat, render_prompt
from hone.data.text.tokenizer import Tokenizer
from hone.engine.params import SampleParams
from hone.engine.requests import Request
from hone.errors import HoneError
from hone.serve.detokenize import Completion, TokenBytes
from hone.serve.load import LoadedModel
from hone.types import Stop

HELP = "/reset begins anew, /system TEXT sets the system message, /save FILE writes the conversation, /quit leaves"
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # a model must not move the cursor or rename the window
NOT_TEXT = re.compile(r"[\udc80-\udcff]")  # what surrogateescape makes of bytes that are not UTF-8
CAN_EDIT = "readline"


class History(Protocol):
    """What was said, as the model reads it."""

    plain: bool  # no chat template: lines are continued as text

    def prompt(self, line: str) -> list[int]:
        """The prompt of the next turn. It is not added to the history."""
        ...

    def add_turn(self, line: str, answer: str, tokens: list[int]) -> None:
        """Add a turn. tokens: its prompt and all that was written."""
        ...

    def to_json(self) -> str: ...


class ChatHistory:
    """Messages under the model's chat template."""

    plain = False

    def __init__(self, tokenizer: Tokenizer, system: str) -> None:
        self.tokenizer, self.system = tokenizer, system
        self.messages: list[dict[str, str]] = []  # without the system message
        self.tokens: list[int] = []  # of the messages, as they were read and written

    def _all(self) -> list[dict[str, str]]:
        return [*([{"role": "system", "content": self.system}] if self.system else []), *self.messages]

    def prompt(self, line: str) -> list[int]:
        user = {"role": "user", "content": line}
        if self.tokens:
            try:
                return [*self.tokens, *continue_chat(self.tokenizer, self.tokens, self._all(), [user])]
            except HoneError:  # the template writes earlier turns anew, or the system message is another
                self.tokens = []
        return render_prompt(self.tokenizer, [*self._all(), user])

    def add_turn(self, line: str, answer: str, tokens: list[int]) -> None:
        if answer:  # templates cannot render an empty turn
            self.messages += [{"role": "user", "content": line}, {"role": "assistant", "content": answer}]
            whole = tokens[-1] in self.tokenizer.stop_ids
            self.tokens = tokens if whole else [*tokens, self.tokenizer.eos_id]  # cut off: the template closes it

    def to_json(self) -> str:
        return json.dumps({"messages": self._all()}, ensure_ascii=False)


class PlainHistory:
    """One text that the user and the model continue in turn. A line break stands before each line of the user's."""

    plain = True

    def __init__(self, tokenizer: Tokenizer, system: str) -> None:
        self.tokenizer, self.system = tokenizer, system
        self.text, self.tokens = system, tokenizer.start_ids + tokenizer.encode(system)

    def prompt(self, line: str) -> list[int]:
        return self.tokens + self.tokenizer.encode(self._line(line)) or self.tokenizer.start_ids

    def _line(self, line: str) -> str:
        return f"\n{line}" if self.text else line

    def add_turn(self, line: str, answer: str, tokens: list[int]) -> None:
        self.text += self._line(line) + answer
        self.tokens = tokens[:-1] if tokens[-1] in self.tokenizer.stop_ids else tokens

    def to_json(self) -> str:
        return json.dumps({"text": self.text}, ensure_ascii=False)


class Conversation:
    """Turns of user and model. Each turn draws its own random numbers."""

    def __init__(self, loaded: LoadedModel, params: SampleParams, *, adapter: str | None = None) -> None:
        self.engine, self.tokenizer, self.context = loaded.engine, loaded.tokenizer, loaded.context
        self.params, self.bytes_of = replace(params, stop_ids=self.tokenizer.stop_ids), TokenBytes(self.tokenizer)
        self.adapter, self.turns = adapter, 0
        self.history: History
        self.reset("")

    def reset(self, system: str) -> None:
        """Begin anew."""
        kind = PlainHistory if self.tokenizer.chat_template is None else ChatHistory
        self.history = kind(self.tokenizer, system)

    def say(self, line: str, *, stopped: Callable[[], bool], note: Callable[[str], None]) -> Iterator[str]:
        """The answer in pieces, until it ends or `stopped` says so."""
        prompt = self.history.prompt(line)
        room = self.context - len(prompt)
        if room < 1:
            raise HoneError(
                f"the conversation has {len(prompt)} tokens with this line, the model's context is {self.context}: "
                "begin a new one with /reset, or say less"
            )
        limit = min(self.params.max_tokens, room)
        request = Request(
            id=self.turns,
            prompt=tuple(prompt),
            params=replace(self.params, max_tokens=limit),
            adapter=self.adapter,
            stream=True,
            keep=True,
        )
        self.turns += 1
        completion = Completion(0, self.bytes_of, before=prompt if self.history.plain else (), stops=())
        written, stop = list[int](), None
        self.engine.submit([request])
        while stop is None:
            if stopped():
                self.engine.cancel([request.id])
                break
            for news in self.engine.step():
                written += news.tokens
                stop = news.stop
                yield completion.add(news).text
        self.history.add_turn(line, completion.text, prompt + written)
        if stop is Stop.LENGTH:
            full = f"the model's context of {self.context} tokens is full: begin a new conversation with /reset"
            note(full if limit == room else f"cut at {limit} tokens: --max-tokens allows more")

    def save(self, path: str) -> None:
        """Write one line of JSON into a new file."""
        try:
            with Path(path).expanduser().open("x", encoding="utf-8") as file:
                file.write(self.history.to_json() + "\n")
        except FileExistsError:
            raise HoneError(f"{path} is there already: choose another name") from None
        except (OSError, ValueError) as error:
            raise HoneError(f"{path} cannot be written ({error}): choose another name") from None


# --- the terminal ---


class Interrupt:
    """Ctrl-C sets a flag while an answer is written, and raises nothing then: the engine always ends its step."""

    def __init__(self) -> None:
        self.pressed = False
        self.waiting = False  # for a line: only then KeyboardInterrupt is raised

    @contextmanager
    def handler(self) -> Iterator[None]:
        """Inside, Ctrl-C sets `pressed`, or ends the waiting for a line."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.signal(signal.SIGINT, self._press)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def _press(self, number: int, frame: FrameType | None) -> None:
        self.pressed = True
        if self.waiting:
            self.waiting = False
            raise KeyboardInterrupt


class Terminal:
    """Reads lines and prints answers. Notes go to stderr, so that a pipe gets only answers."""

    def __init__(self, conversation: Conversation, *, system: str) -> None:
        self.conversation, self.system = conversation, system
        self.from_terminal, self.to_terminal = sys.stdin.isatty(), sys.stdout.isatty()
        self.colours = sys.stderr.isatty() and not os.environ.get("NO_COLOR")
        self.interrupt, self.lines = Interrupt(), 0
        conversation.reset(system)

    def run(self) -> None:
        """Until the end of the input or /quit."""
        if isinstance(sys.stdin, io.TextIOWrapper):
            # a line that is not UTF-8 is refused, and the program goes on
            sys.stdin.reconfigure(errors="surrogateescape")
        if self.conversation.history.plain:
            typed = "; end a line with \\ to leave out its line break" if self.from_terminal else ""
            self.note(f"the model has no chat template: it continues the text as it is{typed}")
        if self.from_terminal:
            self._edit_lines()
            self.note(f"{HELP}; Ctrl-C stops an answer, Ctrl-D leaves")
        with self.interrupt.handler():
            while (line := self._line()) is not None and self._handle(line):
                continue

    def _handle(self, line: str) -> bool:
        """Answer a line, or carry out its command. False: it was /quit."""
        self.lines += 1
        try:
            if NOT_TEXT.search(line):
                raise HoneError(f"line {self.lines} of the input is not UTF-8: write it as UTF-8")
            if line.startswith("/"):
                return self._command(line.removesuffix("\n")) != "quit"
            if (text := self._text_of(line)).strip():
                self._answer(text)
        except HoneError as error:
            self.note(str(error))
        return True

    def note(self, text: str) -> None:
        """Print a line for the user that is no part of an answer."""
        shown = f"\x1b[2m{text}\x1b[0m" if self.colours else text
        print(shown, file=sys.stderr, flush=True)

    def _edit_lines(self) -> None:
        """Arrow keys and a history where the system has them."""
        try:
            __import__(CAN_EDIT)
        except ImportError:
            self.note("lines cannot be edited here: this Python has no readline")

    def _line(self) -> str | None:
        """A line, with its line break if it has one. None: there are no more."""
        try:
            self.interrupt.waiting = True
            line = f"{input('> ')}\n" if self.from_terminal else sys.stdin.readline()
            self.interrupt.waiting = False
        except KeyboardInterrupt:
            print(file=sys.stderr)
            return "" if self.from_terminal else None
        except EOFError:
            print()
            return None
        finally:
            self.interrupt.waiting = False
        return line or None

    def _command(self, line: str) -> str:
        name, _, rest = line[1:].partition(" ")
        rest = rest.strip()
        if name == "reset":
            self.conversation.reset(self.system)
            self.note("a new conversation")
        elif name == "system":
            self.system = rest
            self.conversation.reset(self.system)
            self.note(f"a new conversation, {self._description()}")
        elif name == "save":
            if not rest:
                raise HoneError("name the file: /save FILE")
            self.conversation.save(rest)
            self.note(f"saved in {rest}")
        elif name != "quit":
            raise HoneError(f"no command /{name}: {HELP}")
        return name

    def _description(self) -> str:
        """What the model reads first, in words."""
        if not self.system:
            return "without system message"
        return "which begins with this text" if self.conversation.history.plain else "with this system message"

    def _text_of(self, line: str) -> str:
        """A line as the model reads it. Without a template it keeps its line break: many prompts end with one."""
        if not self.conversation.history.plain:
            return line.removesuffix("\n")
        return line.removesuffix("\\\n") if self.from_terminal else line

    def _answer(self, line: str) -> None:
        empty, self.interrupt.pressed = True, False
        for piece in self.conversation.say(line, stopped=lambda: self.interrupt.pressed, note=self.note):
            empty = empty and not piece
            sys.stdout.write(CONTROL.sub("\ufffd", piece) if self.to_terminal else piece)
            sys.stdout.flush()
        sys.stdout.write("\n")
        sys.stdout.flush()
        if self.interrupt.pressed:
            self.note("stopped")
        elif empty:
            self.note("the model said nothing")
