"""A request's body to prompts in tokens and the settings to sample with. It may take long: never in the event loop."""

import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from hone.data.text.chat import render_prompt
from hone.data.text.messages import ROLES
from hone.data.text.tokenizer import Tokenizer
from hone.engine.params import SampleParams
from hone.errors import HoneError
from hone.serve.refusal import Refusal, bad
from hone.serve.schema import ChatBody, PlainBody, checked

PLAIN_TOKENS = 16  # a completion's default, as OpenAI's
MOST_CHOICES = 256  # completions of one request: prompts x n
DEVELOPER = "developer"  # OpenAI's name for the system role of some models

Given = ChatBody | PlainBody


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What the server has: models by name, one tokenizer, and how much a completion may ask for."""

    tokenizer: Tokenizer
    adapters: Mapping[str, str | None]  # by model name; None: the base model
    vocab: int
    context: int  # prompt and completion together
    max_tokens: int  # of a completion; 0: what the context has room for
    created: int

    def adapter_of(self, model: str) -> str | None:
        """What answers under this name, or a Refusal that lists the names."""
        if model not in self.adapters:
            known = ", ".join(self.adapters)
            raise Refusal(404, f"no model of that name: this server has {known}", param="model", code="model_not_found")
        return self.adapters[model]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A request that can be sampled: choice i * n + j is sample j of prompt i."""

    chat: bool
    model: str
    adapter: str | None
    prompts: list[list[int]]
    params: list[SampleParams]  # one a prompt: they differ in max_tokens
    n: int
    stream: bool
    usage: bool  # at the end of a stream
    logprobs: int | None  # how many alternatives are told at each position; None: no log-probs


def read_json(raw: bytes) -> Any:
    """The body; NaN and Infinity are not JSON."""
    try:
        return json.loads(raw, parse_constant=_no_constant)
    except RecursionError:
        raise bad("the body is nested too deeply", code="invalid_json") from None
    except ValueError:  # covers bad UTF-8 and numbers of thousands of digits
        raise bad("the body is not JSON in UTF-8", code="invalid_json") from None


def _no_constant(name: str) -> None:
    raise ValueError(name)


def read_ask(raw: bytes, served: Served, *, chat: bool) -> Ask:
    """Everything that can be wrong with a request is found here."""
    given = checked(read_json(raw), ChatBody if chat else PlainBody)
    if given.model is None:
        raise bad(f"model is missing: name one of {', '.join(served.adapters)}", "model", "missing_parameter")
    adapter = served.adapter_of(given.model)
    prompts = _chat_prompt(given, served) if isinstance(given, ChatBody) else _plain_prompts(given, served)
    if given.n * len(prompts) > MOST_CHOICES:
        text = f"{len(prompts)} prompts x n = {given.n}: ask for at most {MOST_CHOICES} completions at once"
        raise bad(text, "n", "invalid_value")
    if given.stream_options is not None and not given.stream:
        raise bad("stream_options is for streams: set stream to true", "stream_options", "invalid_value")
    return Ask(
        chat=chat,
        model=given.model,
        adapter=adapter,
        prompts=prompts,
        params=_params(given, prompts, served),
        n=given.n,
        stream=given.stream,
        usage=bool(given.stream_options and given.stream_options.include_usage),
        logprobs=_logprobs(given),
    )


def _logprobs(given: Given) -> int | None:
    if isinstance(given, PlainBody):
        return given.logprobs
    if given.top_logprobs is not None and not given.logprobs:
        raise bad("top_logprobs needs logprobs: set logprobs to true", "top_logprobs", "invalid_value")
    return (given.top_logprobs or 0) if given.logprobs else None


def _params(given: Given, prompts: list[list[int]], served: Served) -> list[SampleParams]:
    bias = {int(token): value for token, value in given.logit_bias.items()}
    for token in bias:
        if token >= served.vocab:
            text = f"logit_bias: token {token} is outside the vocabulary of {served.vocab}"
            raise bad(text, "logit_bias", "invalid_value")
    try:
        params = SampleParams(
            max_tokens=1,
            temperature=given.temperature,
            top_p=given.top_p,
            top_k=given.top_k,
            min_p=given.min_p,
            repetition_penalty=given.repetition_penalty,
            stop=tuple(given.stop),
            stop_ids=served.tokenizer.stop_ids,
            bias=bias,
            top_logprobs=_logprobs(given) or 0,
            seed=secrets.randbits(64) if given.seed is None else given.seed % 2**64,
        )
    except HoneError as error:
        raise bad(str(error)) from None
    asked = _asked(given, served)
    rooms = [served.context - len(prompt) for prompt in prompts]
    if min(rooms) < 1:
        longest = max(map(len, prompts))
        raise bad(
            f"the prompt has {longest} tokens, the model's context is {served.context} and a completion needs one: "
            "shorten it",
            "messages" if isinstance(given, ChatBody) else "prompt",
            "context_length_exceeded",
        )
    return [replace(params, max_tokens=min(asked or room, room)) for room in rooms]


def _asked(given: Given, served: Served) -> int:
    """The most tokens of a completion; 0: as many as there is room for."""
    chat = isinstance(given, ChatBody)
    name, asked = "max_tokens", given.max_tokens
    if chat and given.max_completion_tokens is not None:
        name, asked = "max_completion_tokens", given.max_completion_tokens
    if asked is None:
        return served.max_tokens if chat else min(PLAIN_TOKENS, served.max_tokens or PLAIN_TOKENS)
    if served.max_tokens and asked > served.max_tokens:
        raise bad(f"{name} is {asked}: this server writes at most {served.max_tokens}", name, "invalid_value")
    return asked


def _chat_prompt(given: ChatBody, served: Served) -> list[list[int]]:
    """The one place where a chat template is rendered."""
    if not given.messages:
        raise bad("messages is missing or empty: give a list of {role, content}", "messages", "missing_parameter")
    if served.tokenizer.chat_template is None:
        raise bad("the model has no chat template: ask /v1/completions to continue a text", "messages")
    try:
        return [render_prompt(served.tokenizer, [_message(m, i) for i, m in enumerate(given.messages)])]
    except HoneError as error:
        raise bad(str(error), "messages", "invalid_value") from None


def _message(message: Any, i: int) -> Any:
    """A role that templates know: many of them render any other as it is, and the model has never read it."""
    role = message.get("role") if isinstance(message, dict) else None
    if role == DEVELOPER:
        return {**message, "role": "system"}
    if isinstance(role, str) and role not in ROLES:
        known = ", ".join((DEVELOPER, *ROLES))
        raise bad(f"message {i + 1} has an unknown role: use one of {known}", f"messages[{i}].role", "invalid_value")
    return message


def _plain_prompts(given: PlainBody, served: Served) -> list[list[int]]:
    """A text, texts, token ids, or lists of token ids."""
    prompt = given.prompt
    found: list[Any] = [prompt]
    if isinstance(prompt, list) and not all(isinstance(item, int) for item in prompt):
        found = prompt
    if len(found) > MOST_CHOICES:
        raise bad(f"prompt has {len(found)} entries: give at most {MOST_CHOICES}", "prompt", "invalid_value")
    return [_tokens(one, served) for one in found]


def _tokens(prompt: Any, served: Served) -> list[int]:
    if isinstance(prompt, str):
        try:
            tokens = render_prompt(served.tokenizer, prompt)
        except HoneError as error:
            raise bad(str(error), "prompt", "invalid_value") from None
    elif isinstance(prompt, list) and all(type(token) is int for token in prompt):
        tokens = prompt
    else:
        raise bad("prompt: give a string, strings, token ids or lists of token ids", "prompt", "invalid_type")
    if not tokens:
        raise bad("the prompt has no token: give at least one", "prompt", "invalid_value")
    if not 0 <= min(tokens) <= max(tokens) < served.vocab:
        raise bad(f"prompt has a token outside the vocabulary of {served.vocab}", "prompt", "invalid_value")
    return tokens
