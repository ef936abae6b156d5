"""The JSON of answers, in OpenAI's forms."""

import secrets
import time
from collections.abc import Sequence
from typing import Any

from hone.serve.answer import Choice, Piece, chat_logprobs, plain_logprobs
from hone.serve.ask import Ask, Served
from hone.serve.text import TokenBytes

Json = dict[str, Any]


def models(served: Served) -> Json:
    """The base model and every adapter."""
    return {"object": "list", "data": [model(served, name) for name in served.adapters]}


def model(served: Served, name: str) -> Json:
    """One of them."""
    served.adapter_of(name)
    return {"id": name, "object": "model", "created": served.created, "owned_by": "hone"}


def usage(ask: Ask, choices: Sequence[Choice]) -> Json:
    """A prompt counts once, however many completions it has; a completion with its stop token."""
    prompt, completion = sum(map(len, ask.prompts)), sum(choice.tokens for choice in choices)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


class Form:
    """The frame of one answer: every part of it has the same id."""

    def __init__(self, ask: Ask, bytes_of: TokenBytes) -> None:
        self.ask, self.bytes_of = ask, bytes_of
        self.id = f"{'chatcmpl' if ask.chat else 'cmpl'}-{secrets.token_hex(12)}"
        self.created = int(time.time())

    def whole(self, pieces: Sequence[Piece], choices: Sequence[Choice]) -> Json:
        """The answer in one part."""
        form = self._frame("chat.completion" if self.ask.chat else "text_completion")
        return form | {"choices": [self._choice(piece) for piece in pieces], "usage": usage(self.ask, choices)}

    def opening(self, index: int) -> Json:
        """A chat's stream begins with the role."""
        delta = {"role": "assistant", "content": "", "refusal": None}
        return self._event([{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}])

    def part(self, piece: Piece) -> Json:
        """A piece of a stream."""
        if not self.ask.chat:
            return self._event([self._choice(piece)])
        told = piece.text or piece.entries
        delta = {"content": piece.text} if told else {}
        choice = {"index": piece.index, "delta": delta, "logprobs": self._logprobs(piece)}
        return self._event([choice | {"finish_reason": piece.finish}])

    def closing(self, choices: Sequence[Choice]) -> Json:
        """The last part of a stream that asked for the usage."""
        return self._event([]) | {"usage": usage(self.ask, choices)}

    def _event(self, choices: list[Json]) -> Json:
        form = self._frame("chat.completion.chunk" if self.ask.chat else "text_completion") | {"choices": choices}
        return form | {"usage": None} if self.ask.usage else form

    def _frame(self, kind: str) -> Json:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.ask.model}

    def _choice(self, piece: Piece) -> Json:
        said: Json = {"text": piece.text}
        if self.ask.chat:
            said = {"message": {"role": "assistant", "content": piece.text, "refusal": None}}
        ends = {"logprobs": self._logprobs(piece), "finish_reason": piece.finish}
        return {"index": piece.index, **said, **ends}

    def _logprobs(self, piece: Piece) -> Any:
        if self.ask.logprobs is None:
            return None
        return (chat_logprobs if self.ask.chat else plain_logprobs)(piece.entries, self.bytes_of)
