"""A conversation with one model: its tokens are kept as they were sampled, so each turn only reads what is new."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from hone.data.text.chat import continue_chat, render_prompt
from hone.data.text.tokenizer import Tokenizer
from hone.engine.params import SampleParams
from hone.engine.requests import Request
from hone.errors import HoneError
from hone.serve.answer import Choice
from hone.serve.load import Loaded
from hone.serve.text import TokenBytes
from hone.types import Stop


class History(Protocol):
    """What was said, as the model reads it."""

    plain: bool  # no chat template: lines are continued as text

    def asked(self, line: str) -> list[int]:
        """The prompt of the next turn; nothing is remembered yet."""
        ...

    def told(self, line: str, answer: str, tokens: list[int]) -> None:
        """The turn happened: `tokens` is its prompt and all that was written."""
        ...

    def saved(self) -> str: ...


class Chat:
    """Messages under the model's chat template."""

    plain = False

    def __init__(self, tokenizer: Tokenizer, system: str) -> None:
        self.tokenizer, self.system = tokenizer, system
        self.messages: list[dict[str, str]] = []  # without the system message
        self.tokens: list[int] = []  # of the messages, as they were read and written

    def _all(self) -> list[dict[str, str]]:
        return [*([{"role": "system", "content": self.system}] if self.system else []), *self.messages]

    def asked(self, line: str) -> list[int]:
        user = {"role": "user", "content": line}
        if self.tokens:
            try:
                return [*self.tokens, *continue_chat(self.tokenizer, self.tokens, self._all(), [user])]
            except HoneError:  # the template writes earlier turns anew, or the system message is another
                self.tokens = []
        return render_prompt(self.tokenizer, [*self._all(), user])

    def told(self, line: str, answer: str, tokens: list[int]) -> None:
        if answer:  # templates cannot render an empty turn
            self.messages += [{"role": "user", "content": line}, {"role": "assistant", "content": answer}]
            whole = tokens[-1] in self.tokenizer.stop_ids
            self.tokens = tokens if whole else [*tokens, self.tokenizer.eos_id]  # cut off: the template closes it

    def saved(self) -> str:
        return json.dumps({"messages": self._all()}, ensure_ascii=False)


class Plain:
    """Text that the user and the model write in turn, a line break before each line of the user's."""

    plain = True

    def __init__(self, tokenizer: Tokenizer, system: str) -> None:
        self.tokenizer, self.system = tokenizer, system
        self.text, self.tokens = system, tokenizer.start_ids + tokenizer.encode(system)

    def asked(self, line: str) -> list[int]:
        return self.tokens + self.tokenizer.encode(self._line(line)) or self.tokenizer.start_ids

    def _line(self, line: str) -> str:
        return f"\n{line}" if self.text else line

    def told(self, line: str, answer: str, tokens: list[int]) -> None:
        self.text += self._line(line) + answer
        self.tokens = tokens[:-1] if tokens[-1] in self.tokenizer.stop_ids else tokens

    def saved(self) -> str:
        return json.dumps({"text": self.text}, ensure_ascii=False)


class Talk:
    """Turns with the engine; each draws random numbers of its own."""

    def __init__(self, loaded: Loaded, params: SampleParams, *, adapter: str | None = None) -> None:
        self.engine, self.tokenizer, self.context = loaded.engine, loaded.tokenizer, loaded.context
        self.params, self.bytes_of = replace(params, stop_ids=self.tokenizer.stop_ids), TokenBytes(self.tokenizer)
        self.adapter, self.turns = adapter, 0
        self.history: History
        self.reset("")

    def reset(self, system: str) -> None:
        """Begin anew."""
        kind = Plain if self.tokenizer.chat_template is None else Chat
        self.history = kind(self.tokenizer, system)

    def say(self, line: str, *, stopped: Callable[[], bool], note: Callable[[str], None]) -> Iterator[str]:
        """The answer in pieces, until it ends or `stopped` says so."""
        prompt = self.history.asked(line)
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
        choice = Choice(0, self.bytes_of, before=prompt if self.history.plain else (), stops=())
        written, stop = list[int](), None
        self.engine.submit([request])
        while stop is None:
            if stopped():
                self.engine.cancel([request.id])
                break
            for news in self.engine.step():
                written += news.tokens
                stop = news.stop
                yield choice.add(news).text
        self.history.told(line, choice.text, prompt + written)
        if stop is Stop.LENGTH:
            full = f"the model's context of {self.context} tokens is full: begin a new conversation with /reset"
            note(full if limit == room else f"cut at {limit} tokens: --max-tokens allows more")

    def save(self, path: str) -> None:
        """Append to nothing and overwrite nothing: one line of JSON in a file of its own."""
        try:
            with Path(path).expanduser().open("x", encoding="utf-8") as file:
                file.write(self.history.saved() + "\n")
        except FileExistsError:
            raise HoneError(f"{path} is there already: choose another name") from None
        except (OSError, ValueError) as error:
            raise HoneError(f"{path} cannot be written ({error}): choose another name") from None
