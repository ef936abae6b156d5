"""Tokens of a completion to text as they come: a character is told once all its bytes are there, never taken back."""

import codecs
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from hone.data.text.detokenizer import Detokenizer
from hone.data.text.tokenizer import UNKNOWN, Tokenizer, byte_of
from hone.engine.requests import RequestOutput, TopLogprobs
from hone.types import Stop

BEFORE = 8  # tokens of the prompt that may hold the beginning of a character
BYTE = re.compile(r"<0x([0-9A-F]{2})>")
UTF8 = codecs.getincrementaldecoder("utf-8")
FINISH = {Stop.TOKEN: "stop", Stop.STRING: "stop", Stop.LENGTH: "length"}  # OpenAI's words


class TextStream(Protocol):
    """The text of a completion, a piece at a time; special tokens are left out."""

    def push(self, token: int) -> str:
        """What this token adds; "" while a character is incomplete."""
        ...

    def end(self) -> str:
        """What was held back: bytes that never became a character."""
        ...


class ByteStream:
    """The stream of a tokenizer whose tokens are bytes: it joins them and decodes UTF-8."""

    def __init__(self, tokens: "TokenBytes", before: Sequence[int] = ()) -> None:
        self.tokens, self.decoder = tokens, UTF8(errors="replace")
        for token in before[-BEFORE:]:
            self.push(token)

    def push(self, token: int) -> str:
        if token in self.tokens.silent:
            return ""
        raw = self.tokens(token)
        if not self.tokens.has(token):  # a row of the model's beyond the tokenizer: no character goes across it
            return self.end() + raw.decode()
        return self.decoder.decode(raw)

    def end(self) -> str:
        piece = self.decoder.decode(b"", final=True)
        self.decoder.reset()
        return piece


def text_stream(tokens: "TokenBytes", before: Sequence[int] = ()) -> TextStream:
    """A stream for this tokenizer, the faster one where its tokens are bytes."""
    if tokens.only_bytes:
        return ByteStream(tokens, before)
    return Detokenizer(partial(tokens.tokenizer.decode, specials=False), before)


class TokenBytes:
    """The bytes a token stands for, which log-probs are reported with."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.inner, self.tokenizer = tokenizer.inner, tokenizer
        decoder = json.loads(tokenizer.inner.to_str()).get("decoder") or {}
        parts = json.dumps(decoder)
        self.only_bytes = decoder.get("type") == "ByteLevel"
        self.level, self.fallback = '"ByteLevel"' in parts, '"ByteFallback"' in parts
        self.blank = "\u2581" if json.dumps("\u2581") in parts or '"Metaspace"' in parts else None
        added = tokenizer.inner.get_added_tokens_decoder()
        self.added = {i: t.content.encode() for i, t in added.items()}
        holes = set(range(tokenizer.vocab_size)).difference(tokenizer.inner.get_vocab().values())
        self.silent = holes | {i for i, t in added.items() if t.special}  # no part of a text
        self.known = dict[int, bytes]()

    def has(self, token: int) -> bool:
        """Whether the tokenizer has it: a model's vocabulary may be larger."""
        return token < self.tokenizer.vocab_size

    def __call__(self, token: int) -> bytes:
        found = self.known.get(token)
        if found is None:
            found = self.known[token] = self._bytes(token)
        return found

    def _bytes(self, token: int) -> bytes:
        if token in self.added:
            return self.added[token]
        name = self.inner.id_to_token(token) if self.has(token) else None
        if name is None:
            return UNKNOWN.encode()
        if self.level and all(c in byte_of() for c in name):
            return bytes(byte_of()[c] for c in name)
        if self.fallback and (found := BYTE.fullmatch(name)):
            return bytes([int(found[1], 16)])
        return (name.replace(self.blank, " ") if self.blank else name).encode()


def token_text(raw: bytes) -> str:
    """The text of a token's bytes; half a character as OpenAI writes it, so that no two tokens look alike."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


# --- completions ---


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Tokens of an answer and their log-probs under the model's own distribution."""

    tokens: Sequence[int]
    logps: Sequence[float]
    offsets: Sequence[int]  # characters of the answer before each
    tops: TopLogprobs

    def __len__(self) -> int:
        return len(self.offsets)

    def top(self, i: int) -> list[tuple[int, float]]:
        """The most probable tokens at place i, where they were asked for."""
        return self.tops[i] if len(self.tops) else []


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """What a completion gained. `finish` is set on its last one."""

    index: int
    text: str
    logprobs: TokenLogprobs
    finish: str | None = None


class Completion:
    """One completion as it is written: the same deltas make a stream and a whole answer."""

    def __init__(self, index: int, bytes_of: TokenBytes, *, before: Sequence[int], stops: tuple[str, ...]) -> None:
        self.index, self.stops = index, stops
        self.stream = text_stream(bytes_of, before)
        self.text, self.tokens = "", 0  # the stop token is counted, and not shown

    def add(self, news: RequestOutput) -> Delta:
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
        text = "".join(parts)
        if news.stop is Stop.STRING:
            text = self._before_stop(text, news.text)
            offsets = [offset for offset in offsets if offset < start + len(text)]
        self.text += text
        finish, n = None if news.stop is None else FINISH[news.stop], len(offsets)
        logprobs = TokenLogprobs(news.tokens[:n], news.raw[:n], offsets, news.top)
        return Delta(index=self.index, text=text, logprobs=logprobs, finish=finish)

    def _before_stop(self, text: str, told: str) -> str:
        """The engine's own text, unless it was decoded otherwise (with special tokens in it)."""
        if told.startswith(self.text) and (self.text + text).startswith(told):
            return told[len(self.text) :]
        return text[: min((at for stop in self.stops if (at := text.find(stop)) >= 0), default=len(text))]
