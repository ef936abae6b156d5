"""What the engine tells of one completion, to text and log-probs; the same pieces make a stream and a whole answer."""

from collections.abc import Sequence
from dataclasses import dataclass

from hone.engine.requests import News, Tops
from hone.serve.text import TokenBytes, before_stop, text_stream
from hone.types import Stop

FINISH = {Stop.TOKEN: "stop", Stop.STRING: "stop", Stop.LENGTH: "length"}


@dataclass(frozen=True, slots=True)
class Entries:
    """Tokens of an answer and their log-probs under the model's own distribution."""

    tokens: Sequence[int]
    logps: Sequence[float]
    offsets: Sequence[int]  # characters of the answer before each
    tops: Tops

    def __len__(self) -> int:
        return len(self.offsets)

    def top(self, i: int) -> list[tuple[int, float]]:
        """The most probable tokens at place i, where they were asked for."""
        return self.tops[i] if len(self.tops) else []


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """What a choice gained; finish is set on its last one."""

    index: int
    text: str
    entries: Entries
    finish: str | None = None


class Choice:
    """One completion as it is written."""

    def __init__(self, index: int, bytes_of: TokenBytes, *, before: Sequence[int], stops: tuple[str, ...]) -> None:
        self.index, self.stops = index, stops
        self.stream = text_stream(bytes_of, before)
        self.text, self.tokens = "", 0  # the stop token is counted, and not shown

    def add(self, news: News) -> Piece:
        """The text that is certain by now: no part of a character or of a stop string."""
        self.tokens += len(news.tokens)
        shown = len(news.tokens) - (news.stop is Stop.TOKEN)
        start, parts, offsets = len(self.text), list[str](), list[int]()
        end = start
        for token in news.tokens[:shown]:
            offsets.append(end)
            parts.append(self.stream.push(token))
            end += len(parts[-1])
        if news.stop is not None:
            parts.append(self.stream.end())
        piece = "".join(parts)
        if news.stop is Stop.STRING:
            piece = self._before_stop(piece, news.text)
            offsets = [offset for offset in offsets if offset < start + len(piece)]
        self.text += piece
        finish = None if news.stop is None else FINISH[news.stop]
        return Piece(index=self.index, text=piece, entries=_entries(news, offsets), finish=finish)

    def _before_stop(self, piece: str, told: str) -> str:
        """The engine's own text, unless it was decoded otherwise (with special tokens in it)."""
        whole = self.text + piece
        return (
            told[len(self.text) :]
            if told.startswith(self.text) and whole.startswith(told)
            else before_stop(piece, self.stops)
        )


def _entries(news: News, offsets: list[int]) -> Entries:
    n = len(offsets)
    return Entries(news.tokens[:n], news.raw[:n], offsets, news.top)
