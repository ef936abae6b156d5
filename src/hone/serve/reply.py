"""The JSON of answers, in OpenAI's forms.

Answers are written as text, a few tokens at a time, and not by pydantic. With twenty alternatives for each token,
log-probs are a hundred times as long as the answer: one call of a JSON library would keep every other client waiting.
"""

import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from hone.serve.body import CompletionRequest, ServedModels
from hone.serve.detokenize import Completion, Delta, TokenBytes, TokenLogprobs, token_text
from hone.serve.http import event, json_text

LEAST = -9999.0  # JSON has no -Infinity
SLICE = 16  # tokens whose log-probs are written at once
Json = dict[str, Any]


def models(served: ServedModels) -> Json:
    """The base model and every adapter."""
    return {"object": "list", "data": [model(served, name) for name in served.adapters]}


def model(served: ServedModels, name: str) -> Json:
    """One of them."""
    served.adapter_of(name)
    return {"id": name, "object": "model", "created": served.created, "owned_by": "hone"}


class TokenJson:
    """The JSON around each token's log-prob, made once for each token."""

    def __init__(self, bytes_of: TokenBytes) -> None:
        self.bytes_of = bytes_of
        self._names, self._around = dict[int, str](), dict[int, tuple[str, str]]()

    def name(self, token: int) -> str:
        """The token as a string of JSON."""
        if token not in self._names:
            self._names[token] = json_text(token_text(self.bytes_of(token)))
        return self._names[token]

    def entry(self, token: int, logp: float) -> str:
        """The entry as OpenAI's chat completions have it, without the closing brace."""
        if token not in self._around:
            numbers = json_text(list(self.bytes_of(token)))
            self._around[token] = f'{{"token":{self.name(token)},"logprob":', f',"bytes":{numbers}'
        before, after = self._around[token]
        return f"{before}{max(logp, LEAST)!r}{after}"


class Reply:
    """One answer: every part of it has the same id."""

    def __init__(self, request: CompletionRequest, completions: Sequence[Completion], tokens: TokenJson) -> None:
        self.request, self.completions, self.tokens = request, completions, tokens
        self.id = f"{'chatcmpl' if request.chat else 'cmpl'}-{secrets.token_hex(12)}"
        self.created = int(time.time())

    def full_answer(self, deltas: Iterable[Delta]) -> Iterator[str]:
        """The answer in slices. deltas: one for each completion, taken as the slices are."""
        yield f'{self._frame("chat.completion" if self.request.chat else "text_completion")},"choices":['
        for number, delta in enumerate(deltas):
            yield "," if number else ""
            yield from self._choice(delta)
        yield f'],"usage":{self._usage()}}}'

    def opening(self) -> str:
        """A chat's stream begins with the role."""
        delta = {"role": "assistant", "content": "", "refusal": None}
        roles = [
            {"index": one.index, "delta": delta, "logprobs": None, "finish_reason": None} for one in self.completions
        ]
        return "".join(self._event(json_text(role)) for role in roles) if self.request.chat else ""

    def events(self, deltas: Iterable[Delta]) -> str:
        """The events of a stream. Deltas without content make none."""
        probs = self.request.logprobs is not None
        shown = [delta for delta in deltas if delta.text or delta.finish or (probs and len(delta.logprobs))]
        return "".join(self._event("".join(self._choice(delta))) for delta in shown)

    def closing(self) -> str:
        """A stream ends with the usage, where it was asked for."""
        return (self._event("", self._usage()) if self.request.usage else "") + event("[DONE]")

    def _usage(self) -> str:
        """A prompt counts once, however many completions it has. A completion counts with its stop token."""
        prompt, written = sum(map(len, self.request.prompts)), sum(one.tokens for one in self.completions)
        return json_text({"prompt_tokens": prompt, "completion_tokens": written, "total_tokens": prompt + written})

    def _event(self, choice: str, usage: str = "null") -> str:
        frame = self._frame("chat.completion.chunk" if self.request.chat else "text_completion")
        ending = f',"usage":{usage}}}' if self.request.usage else "}"
        return event(f'{frame},"choices":[{choice}]{ending}')

    def _frame(self, kind: str) -> str:
        about = {"id": self.id, "object": kind, "created": self.created, "model": self.request.model}
        return json_text(about)[:-1]

    def _choice(self, delta: Delta) -> Iterator[str]:
        choice: Json = {"index": delta.index, "text": delta.text}
        if self.request.chat and self.request.stream:
            has_content = delta.text or len(delta.logprobs)
            choice = {"index": delta.index, "delta": {"content": delta.text} if has_content else {}}
        elif self.request.chat:
            choice = {"index": delta.index, "message": {"role": "assistant", "content": delta.text, "refusal": None}}
        yield f'{json_text(choice)[:-1]},"logprobs":'
        yield from self._logprobs(delta.logprobs)
        yield f',"finish_reason":{json_text(delta.finish)}}}'

    def _logprobs(self, given: TokenLogprobs) -> Iterator[str]:
        if self.request.logprobs is None:
            yield "null"
        elif self.request.chat:
            yield '{"content":['
            yield from _sliced(len(given), lambda i: self._chat_entry(given, i))
            yield '],"refusal":null}'
        else:
            names, logps = map(self.tokens.name, given.tokens), [max(x, LEAST) for x in given.logps]
            yield f'{{"tokens":[{",".join(names)}],"token_logprobs":{json_text(logps)},"top_logprobs":'
            count = len(given) if len(given.tops) else 0
            yield "[" if count else "null"
            yield from _sliced(count, lambda i: self._plain_entry(given, i))
            yield "]" if count else ""
            yield f',"text_offset":{json_text(given.offsets)}}}'

    def _chat_entry(self, given: TokenLogprobs, i: int) -> str:
        entry = self.tokens.entry
        tops = "},".join(entry(token, logp) for token, logp in given.top(i))
        return f'{entry(given.tokens[i], given.logps[i])},"top_logprobs":[{tops}{"}" if tops else ""}]}}'

    def _plain_entry(self, given: TokenLogprobs, i: int) -> str:
        """The token written is among its alternatives."""
        pairs = [*given.top(i), (given.tokens[i], given.logps[i])]
        found = {self.tokens.name(token): max(logp, LEAST) for token, logp in pairs}
        return f"{{{','.join(f'{name}:{logp!r}' for name, logp in found.items())}}}"


def _sliced(number: int, entry: Callable[[int], str]) -> Iterator[str]:
    """Entries with commas between them, some at a time."""
    for first in range(0, number, SLICE):
        yield ("," if first else "") + ",".join(map(entry, range(first, min(first + SLICE, number))))
