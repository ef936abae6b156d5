"""The JSON of answers, in OpenAI's forms.

Log-probs are written as text, a few tokens at a time. With twenty alternatives each they are a hundred times as long as
the answer, and one call of a JSON library for all of them would keep every other client waiting.
"""

import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from hone.serve.answer import Choice, Entries, Piece
from hone.serve.ask import Ask, Served
from hone.serve.refusal import json_text
from hone.serve.text import TokenBytes, shown

LEAST = -9999.0  # JSON has no -Infinity
SLICE = 16  # tokens whose log-probs are written in one go
Json = dict[str, Any]


def models(served: Served) -> Json:
    """The base model and every adapter."""
    return {"object": "list", "data": [model(served, name) for name in served.adapters]}


def model(served: Served, name: str) -> Json:
    """One of them."""
    served.adapter_of(name)
    return {"id": name, "object": "model", "created": served.created, "owned_by": "hone"}


def usage(ask: Ask, choices: Iterable[Choice]) -> Json:
    """A prompt counts once, however many completions it has; a completion with its stop token."""
    prompt, completion = sum(map(len, ask.prompts)), sum(choice.tokens for choice in choices)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


class TokenJson:
    """The text of each token's log-prob before and after the number, made once."""

    def __init__(self, bytes_of: TokenBytes) -> None:
        self.bytes_of = bytes_of
        self._names, self._around = dict[int, str](), dict[int, tuple[str, str]]()

    def name(self, token: int) -> str:
        """The token as a string of JSON."""
        if token not in self._names:
            self._names[token] = json_text(shown(self.bytes_of(token)))
        return self._names[token]

    def entry(self, token: int, logp: float) -> str:
        """As OpenAI's chat completions have it, without the closing brace."""
        if token not in self._around:
            numbers = json_text(list(self.bytes_of(token)))
            self._around[token] = f'{{"token":{self.name(token)},"logprob":', f',"bytes":{numbers}'
        before, after = self._around[token]
        return f"{before}{max(logp, LEAST)!r}{after}"


class Form:
    """The frame of one answer: every part of it has the same id."""

    def __init__(self, ask: Ask, tokens: TokenJson) -> None:
        self.ask, self.tokens = ask, tokens
        self.id = f"{'chatcmpl' if ask.chat else 'cmpl'}-{secrets.token_hex(12)}"
        self.created = int(time.time())

    def whole(self, pieces: Iterable[Piece], choices: Sequence[Choice]) -> Iterator[str]:
        """The answer, in slices; a piece a choice. Pieces are asked for as slices are."""
        yield f'{self._frame("chat.completion" if self.ask.chat else "text_completion")},"choices":['
        for number, piece in enumerate(pieces):
            yield "," if number else ""
            yield from self._choice(piece)
        yield f'],"usage":{json_text(usage(self.ask, choices))}}}'

    def tells(self, piece: Piece) -> bool:
        """Whether a stream has anything to say of it."""
        return bool(piece.text or piece.finish or (len(piece.entries) and self.ask.logprobs is not None))

    def opening(self, index: int) -> str:
        """A chat's stream begins with the role."""
        delta = {"role": "assistant", "content": "", "refusal": None}
        return self._event(json_text({"index": index, "delta": delta, "logprobs": None, "finish_reason": None}))

    def part(self, piece: Piece) -> str:
        """A piece of a stream."""
        return self._event("".join(self._choice(piece)))

    def closing(self, choices: Sequence[Choice]) -> str:
        """The last part of a stream that asked for the usage."""
        return self._event("", json_text(usage(self.ask, choices)))

    def _event(self, choice: str, usage: str = "null") -> str:
        frame = self._frame("chat.completion.chunk" if self.ask.chat else "text_completion")
        ending = f',"usage":{usage}}}' if self.ask.usage else "}"
        return f'{frame},"choices":[{choice}]{ending}'

    def _frame(self, kind: str) -> str:
        about = {"id": self.id, "object": kind, "created": self.created, "model": self.ask.model}
        return json_text(about)[:-1]

    def _choice(self, piece: Piece) -> Iterator[str]:
        said: Json = {"index": piece.index, "text": piece.text}
        if self.ask.chat and self.ask.stream:
            told = piece.text or len(piece.entries)
            said = {"index": piece.index, "delta": {"content": piece.text} if told else {}}
        elif self.ask.chat:
            said = {"index": piece.index, "message": {"role": "assistant", "content": piece.text, "refusal": None}}
        yield f'{json_text(said)[:-1]},"logprobs":'
        yield from self._logprobs(piece.entries)
        yield f',"finish_reason":{json_text(piece.finish)}}}'

    def _logprobs(self, entries: Entries) -> Iterator[str]:
        if self.ask.logprobs is None:
            yield "null"
        elif self.ask.chat:
            yield '{"content":['
            yield from _sliced(len(entries), lambda i: self._chat_entry(entries, i))
            yield '],"refusal":null}'
        else:
            names, logps = map(self.tokens.name, entries.tokens), [max(x, LEAST) for x in entries.logps]
            yield f'{{"tokens":[{",".join(names)}],"token_logprobs":{json_text(logps)},"top_logprobs":'
            told = len(entries) if len(entries.tops) else 0
            yield "[" if told else "null"
            yield from _sliced(told, lambda i: self._plain_entry(entries, i))
            yield "]" if told else ""
            yield f',"text_offset":{json_text(entries.offsets)}}}'

    def _chat_entry(self, entries: Entries, i: int) -> str:
        entry = self.tokens.entry
        tops = "},".join(entry(token, logp) for token, logp in entries.top(i))
        return f'{entry(entries.tokens[i], entries.logps[i])},"top_logprobs":[{tops}{"}" if tops else ""}]}}'

    def _plain_entry(self, entries: Entries, i: int) -> str:
        """The token written is among its alternatives."""
        pairs = [*entries.top(i), (entries.tokens[i], entries.logps[i])]
        found = {self.tokens.name(token): max(logp, LEAST) for token, logp in pairs}
        return f"{{{','.join(f'{name}:{logp!r}' for name, logp in found.items())}}}"


def _sliced(number: int, entry: Callable[[int], str]) -> Iterator[str]:
    """Entries with commas between them, some at a time."""
    for first in range(0, number, SLICE):
        yield ("," if first else "") + ",".join(map(entry, range(first, min(first + SLICE, number))))
