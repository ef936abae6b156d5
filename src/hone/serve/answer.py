"""What the engine tells of one completion, to text and log-probs; the same pieces make a stream and a whole answer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hone.data.tokenizer import Tokenizer
from hone.rollout.request import News
from hone.serve.text import TextStream, TokenBytes, before_stop, shown
from hone.types import Stop

LEAST = -9999.0  # JSON has no -Infinity
FINISH = {Stop.TOKEN: "stop", Stop.STRING: "stop", Stop.LENGTH: "length"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A token of the answer and its log-prob under the model's own distribution."""

    token: int
    logp: float
    top: tuple[tuple[int, float], ...]
    offset: int  # characters of the answer before it


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """What a choice gained; finish is set on its last one."""

    index: int
    text: str
    entries: tuple[Entry, ...] = ()
    finish: str | None = None


class Choice:
    """One completion as it is written."""

    def __init__(self, index: int, tokenizer: Tokenizer, *, before: Sequence[int], stops: tuple[str, ...]) -> None:
        self.index, self.stops = index, stops
        self.stream = TextStream(tokenizer, before)
        self.text, self.tokens = "", 0  # the stop token is counted, and not shown

    def add(self, news: News) -> Piece:
        """The text that is certain by now: no part of a character or of a stop string."""
        self.tokens += len(news.tokens)
        shown_tokens = news.tokens[:-1] if news.stop is Stop.TOKEN else news.tokens
        start, piece, entries = len(self.text), "", list[Entry]()
        for i, token in enumerate(shown_tokens):
            top = news.top[i] if news.top else ()
            entries.append(Entry(token=token, logp=news.raw[i], top=top, offset=start + len(piece)))
            piece += self.stream.push(token)
        if news.stop is not None:
            piece += self.stream.end()
        if news.stop is Stop.STRING:
            piece = self._before_stop(piece, news.text)
            entries = [entry for entry in entries if entry.offset < start + len(piece)]
        self.text += piece
        finish = None if news.stop is None else FINISH[news.stop]
        return Piece(index=self.index, text=piece, entries=tuple(entries), finish=finish)

    def _before_stop(self, piece: str, told: str) -> str:
        """The engine's own text, unless it was decoded otherwise (with special tokens in it)."""
        whole = self.text + piece
        return (
            told[len(self.text) :]
            if told.startswith(self.text) and whole.startswith(told)
            else before_stop(piece, self.stops)
        )


def joined(pieces: Sequence[Piece]) -> Piece:
    """All pieces of one choice as one."""
    entries = tuple(entry for piece in pieces for entry in piece.entries)
    return Piece(
        index=pieces[-1].index,
        text="".join(piece.text for piece in pieces),
        entries=entries,
        finish=pieces[-1].finish,
    )


Form = Mapping[str, Any]


def chat_logprobs(entries: Sequence[Entry], bytes_of: TokenBytes) -> Form:
    """As OpenAI's chat completions have them."""

    def one(token: int, logp: float) -> dict[str, Any]:
        raw = bytes_of(token)
        return {"token": shown(raw), "logprob": max(logp, LEAST), "bytes": list(raw)}

    content = [{**one(e.token, e.logp), "top_logprobs": [one(*pair) for pair in e.top]} for e in entries]
    return {"content": content, "refusal": None}


def plain_logprobs(entries: Sequence[Entry], bytes_of: TokenBytes) -> Form:
    """As OpenAI's completions have them: the token written is among its alternatives."""

    def top(e: Entry) -> dict[str, float]:
        return {shown(bytes_of(token)): max(logp, LEAST) for token, logp in (*e.top, (e.token, e.logp))}

    return {
        "tokens": [shown(bytes_of(e.token)) for e in entries],
        "token_logprobs": [max(e.logp, LEAST) for e in entries],
        "top_logprobs": [top(e) for e in entries] if any(e.top for e in entries) else None,
        "text_offset": [e.offset for e in entries],
    }
