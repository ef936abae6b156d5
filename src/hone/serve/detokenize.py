"""From tokens to text while they are written: a character is sent once it is complete, and never taken back."""

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
    """The text of a completion, a piece at a time, without special tokens."""

    def push(self, token: int) -> str:
        """The text that this token adds; "" while a character is incomplete."""
        ...

    def end(self) -> str:
        """The text of bytes that never became a character."""
        ...


class ByteStream:
    """The stream of a tokenizer whose tokens are bytes: they are joined and decoded as UTF-8."""

    def __init__(self, tokens: "TokenBytes", before: Sequence[int] = ()) -> None:
        self.tokens, self.decoder = tokens, UTF8(errors="replace")
        for token in before[-BEFORE:]:
            self.push(token)

    def push(self, token: int) -> str:
        if token in self.tokens.hidden:
            return ""
        raw = self.tokens(token)
        if not self.tokens.in_vocabulary(
            token
        ):  # the model has more tokens than the tokenizer: such a one ends a character
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
    """The bytes that each token stands for, which OpenAI's log-probs contain."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.inner, self.tokenizer = tokenizer.inner, tokenizer
        decoder = json.loads(tokenizer.inner.to_str()).get("decoder") or {}
        parts = json.dumps(decoder)
        self.only_bytes = decoder.get("type") == "ByteLevel"
        self.level, self.fallback = '"ByteLevel"' in parts, '"ByteFallback"' in parts
        self.space = "\u2581" if json.dumps("\u2581") in parts or '"Metaspace"' in parts else None
        added = tokenizer.inner.get_added_tokens_decoder()
        self.added = {i: t.content.encode() for i, t in added.items()}
        holes = set(range(tokenizer.vocab_size)).difference(tokenizer.inner.get_vocab().values())
        self.hidden = holes | {i for i, t in added.items() if t.special}  # no part of a text
        self.cache = dict[int, bytes]()

    def in_vocabulary(self, token: int) -> bool:
        """Whether the tokenizer has it: a model's vocabulary may be larger."""
        return token < self.tokenizer.vocab_size

    def __call__(self, token: int) -> bytes:
        found = self.cache.get(token)
        if found is None:
            found = self.cache[token] = self._bytes(token)
        return found

    def _bytes(self, token: int) -> bytes:
        if token in self.added:
            return self.added[token]
        name = self.inner.id_to_token(token) if self.in_vocabulary(token) else None
        if name is None:
            return UNKNOWN.encode()
        if self.level and all(c in byte_of() for c in name):
            return bytes(byte_of()[c] for c in name)
        if self.fallback and (found := BYTE.fullmatch(name)):
            return bytes([int(found[1], 16)])
        return (name.replace(self.space, " ") if self.space else name).encode()


def token_text(raw: bytes) -> str:
    """The text of a token's bytes. Half a character is written as OpenAI does, so no two tokens look alike."""
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
    """What was added to a completion. `finish` is set on the last one."""

    index: int
    text: str
    logprobs: TokenLogprobs
    finish: str | None = None


class Completion:
    """One completion while it is written. The same deltas make a stream and a full answer."""

    def __init__(self, index: int, bytes_of: TokenBytes, *, before: Sequence[int], stops: tuple[str, ...]) -> None:
        self.index, self.stops = index, stops
        self.stream = text_stream(bytes_of, before)
        self.text, self.tokens = "", 0  # the stop token is counted but not shown

    def add(self, output: RequestOutput) -> Delta:
        """The text that is certain now: no half of a character, no part of a stop string."""
        self.tokens += len(output.tokens)
        shown = len(output.tokens) - (output.stop is Stop.TOKEN)
        start, parts, offsets = len(self.text), list[str](), list[int]()
        end = start
        for token in output.tokens[:shown]:
            offsets.append(end)
            parts.append(self.stream.push(token))
            end += len(parts[-1])
        if output.stop is not None:
            parts.append(self.stream.end())
        text = "".join(parts)
        if output.stop is Stop.STRING:
            text = self._before_stop(text, output.text)
            offsets = [offset for offset in offsets if offset < start + len(text)]
        self.text += text
        finish, n = None if output.stop is None else FINISH[output.stop], len(offsets)
        logprobs = TokenLogprobs(output.tokens[:n], output.raw[:n], offsets, output.top)
        return Delta(index=self.index, text=text, logprobs=logprobs, finish=finish)

    def _before_stop(self, text: str, full: str) -> str:
        """The text before the stop string. full: as the engine decoded it, perhaps with special tokens in it."""
        if full.startswith(self.text) and (self.text + text).startswith(full):
            return full[len(self.text) :]
        return text[: min((at for stop in self.stops if (at := text.find(stop)) >= 0), default=len(text))]
