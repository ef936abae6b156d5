"""A request's body: pydantic checks its parameters, then it becomes prompts in tokens and sampling parameters.

A wrong type or value is refused by name and never converted. Reading may take long, so it never runs in the event loop.
"""

import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from hone.data.text.chat import render_prompt
from hone.data.text.messages import ROLES
from hone.data.text.tokenizer import Tokenizer
from hone.engine.params import SampleParams
from hone.errors import HoneError
from hone.serve.http import APIError, invalid_request

PLAIN_TOKENS = 16  # a completion's default, as OpenAI's
MOST_N = 128  # completions of a prompt
MOST_COMPLETIONS = 256  # of one request: prompts x n
MOST_TOP = 20  # log-probs at a position
DEVELOPER = "developer"  # OpenAI's name for the system role of some models
UNSUPPORTED = "unsupported"


# --- parameters ---


def _only(*values: Any) -> BeforeValidator:
    """Accepts only the values that ask for nothing: this server does not have the feature."""

    def check(value: Any) -> Any:
        if not any(value == fine and isinstance(value, bool) == isinstance(fine, bool) for fine in values):
            raise PydanticCustomError(UNSUPPORTED, "not supported by this server, leave it out")
        return value

    return BeforeValidator(check)


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


Count = Annotated[int, Field(ge=1, lt=2**31)]
Top = Annotated[int, Field(ge=0, le=MOST_TOP)]
StopString = Annotated[str, Field(min_length=1, max_length=500)]
TokenId = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]  # JSON writes keys as strings
Bias = Annotated[float, Field(ge=-100, le=100)]
Ids = Annotated[list[int], Field(fail_fast=True, min_length=1)]  # one error is enough: there may be many thousands
Texts = Annotated[list[str], Field(fail_fast=True, min_length=1, max_length=MOST_COMPLETIONS)]
ManyIds = Annotated[list[Ids], Field(fail_fast=True, min_length=1, max_length=MOST_COMPLETIONS)]


class _Strict(BaseModel):
    """Strict types: 1.0 is no whole number, "1" and NaN are no numbers. Unknown names are refused, null is left out."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        return {name: x for name, x in value.items() if x is not None} if isinstance(value, dict) else value


class StreamOptions(_Strict):
    """What a stream sends beside the answer."""

    include_usage: bool = False
    include_obfuscation: Any = None


class Body(_Strict):
    """What both kinds of request have."""

    model: str | None = None
    n: Annotated[int, Field(ge=1, le=MOST_N)] = 1
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Annotated[list[StopString], Field(max_length=4), BeforeValidator(_listed)] = []
    temperature: Annotated[float, Field(ge=0, le=1e6)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=0, lt=2**31)] = 0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, Field(gt=0, le=1e6)] = 1.0
    max_tokens: Count | None = None
    logit_bias: dict[TokenId, Bias] = {}
    stream: bool = False
    stream_options: StreamOptions | None = None
    # accepted and not used: they change no token
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    parallel_tool_calls: Any = None
    # accepted only with a value that changes nothing
    presence_penalty: Annotated[Any, _only(0)] = 0
    frequency_penalty: Annotated[Any, _only(0)] = 0


class ChatBody(Body):
    """/v1/chat/completions"""

    messages: list[Any] = []
    max_completion_tokens: Count | None = None
    logprobs: bool = False
    top_logprobs: Top | None = None
    tools: Annotated[Any, _only([])] = None
    tool_choice: Annotated[Any, _only("none")] = None
    functions: Annotated[Any, _only([])] = None
    function_call: Annotated[Any, _only("none")] = None
    response_format: Annotated[Any, _only({"type": "text"})] = None
    modalities: Annotated[Any, _only(["text"])] = None


class PlainBody(Body):
    """/v1/completions"""

    prompt: Annotated[str | Ids | Texts | ManyIds, Field(union_mode="left_to_right")]
    logprobs: Top | None = None
    echo: Annotated[Any, _only(False)] = None
    suffix: Annotated[Any, _only("")] = None
    best_of: Annotated[Any, _only(1)] = None


def _parse(raw: bytes, kind: type[ChatBody | PlainBody]) -> ChatBody | PlainBody:
    """pydantic's own parser would take NaN, and refuse half a surrogate pair without naming the parameter."""
    try:
        return kind.model_validate(json.loads(raw, parse_constant=_no_constant))
    except ValidationError as error:
        raise _explained(error) from None
    except RecursionError:
        raise invalid_request("the body is nested too deeply", code="invalid_json") from None
    except ValueError:  # covers bad UTF-8 and numbers of thousands of digits
        raise invalid_request("the body is not JSON in UTF-8", code="invalid_json") from None


def _no_constant(name: str) -> None:
    raise ValueError(name)  # NaN and Infinity are not JSON


def _explained(error: ValidationError) -> APIError:
    """The error about the first thing that is wrong. Unknown names come before wrong values."""
    found = error.errors(include_url=False, include_input=False, include_context=False)
    first = next((each for each in found if each["type"] == "extra_forbidden"), found[0])
    kind, loc = first["type"], first["loc"]
    if not loc:
        return invalid_request("the body is not an object: send a JSON object")
    name = str(loc[0])
    name = name if len(name) <= 40 and name.isprintable() else name[:40].encode("unicode_escape").decode()
    if kind == "extra_forbidden" and len(loc) == 1:
        text = f"the parameter {name} is not supported by this server: leave it out"
        return invalid_request(text, name, "unsupported_parameter")
    if name == "prompt":
        text = f"prompt: give a string, token ids, or up to {MOST_COMPLETIONS} strings or lists of token ids"
        return invalid_request(text, name, "invalid_type")
    code = "invalid_type" if kind.endswith("_type") else "invalid_value"
    return invalid_request(f"{name}: {first['msg']}", name, "unsupported_parameter" if kind == UNSUPPORTED else code)


# --- what is sampled ---


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModels:
    """What the server has: models by name, one tokenizer, and how much a completion may ask for."""

    tokenizer: Tokenizer
    adapters: Mapping[str, str | None]  # by model name; None: the base model
    vocab: int
    context: int  # prompt and completion together
    max_tokens: int  # of a completion; 0: what the context has room for
    created: int

    def adapter_of(self, model: str) -> str | None:
        """What answers under this name, or an error that lists the names."""
        if model not in self.adapters:
            text = f"no model of that name: this server has {', '.join(self.adapters)}"
            raise APIError(404, text, param="model", code="model_not_found")
        return self.adapters[model]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest:
    """A request that can be sampled: completion i * n + j is sample j of prompt i."""

    chat: bool
    model: str
    adapter: str | None
    prompts: list[list[int]]
    params: list[SampleParams]  # one a prompt: they differ in max_tokens
    n: int
    stream: bool
    usage: bool  # at the end of a stream
    logprobs: int | None  # how many alternatives to send for each token; None: no log-probs


def read_request(raw: bytes, served: ServedModels, *, chat: bool) -> CompletionRequest:
    """Check the whole request. It cannot fail later because of what the client sent."""
    body = _parse(raw, ChatBody if chat else PlainBody)
    if body.model is None:
        text = f"model is missing: name one of {', '.join(served.adapters)}"
        raise invalid_request(text, "model", "missing_parameter")
    adapter = served.adapter_of(body.model)
    prompts = _chat_prompt(body, served) if isinstance(body, ChatBody) else _plain_prompts(body, served)
    if body.n * len(prompts) > MOST_COMPLETIONS:
        text = f"{len(prompts)} prompts x n = {body.n}: ask for at most {MOST_COMPLETIONS} completions at once"
        raise invalid_request(text, "n", "invalid_value")
    if body.stream_options is not None and not body.stream:
        raise invalid_request("stream_options is for streams: set stream to true", "stream_options", "invalid_value")
    return CompletionRequest(
        chat=chat,
        model=body.model,
        adapter=adapter,
        prompts=prompts,
        params=_params(body, prompts, served),
        n=body.n,
        stream=body.stream,
        usage=bool(body.stream_options and body.stream_options.include_usage),
        logprobs=_logprobs(body),
    )


def _logprobs(body: ChatBody | PlainBody) -> int | None:
    if isinstance(body, PlainBody):
        return body.logprobs
    if body.top_logprobs is not None and not body.logprobs:
        raise invalid_request("top_logprobs needs logprobs: set logprobs to true", "top_logprobs", "invalid_value")
    return (body.top_logprobs or 0) if body.logprobs else None


def _params(body: ChatBody | PlainBody, prompts: list[list[int]], served: ServedModels) -> list[SampleParams]:
    bias = {int(token): value for token, value in body.logit_bias.items()}
    if outside := [token for token in bias if token >= served.vocab]:
        text = f"logit_bias: token {outside[0]} is outside the vocabulary of {served.vocab}"
        raise invalid_request(text, "logit_bias", "invalid_value")
    try:
        params = SampleParams(
            max_tokens=1,
            temperature=body.temperature,
            top_p=body.top_p,
            top_k=body.top_k,
            min_p=body.min_p,
            repetition_penalty=body.repetition_penalty,
            stop=tuple(body.stop),
            stop_ids=served.tokenizer.stop_ids,
            bias=bias,
            top_logprobs=_logprobs(body) or 0,
            seed=secrets.randbits(64) if body.seed is None else body.seed % 2**64,
        )
    except HoneError as error:
        raise invalid_request(str(error)) from None
    asked, longest = _max_tokens(body, served), max(map(len, prompts))
    if longest >= served.context:
        raise invalid_request(
            f"the prompt has {longest} tokens, the model's context is {served.context} and a completion needs one: "
            "shorten it",
            "messages" if isinstance(body, ChatBody) else "prompt",
            "context_length_exceeded",
        )
    left = [served.context - len(prompt) for prompt in prompts]
    return [replace(params, max_tokens=min(asked or room, room)) for room in left]


def _max_tokens(body: ChatBody | PlainBody, served: ServedModels) -> int:
    """The most tokens of a completion; 0: as many as the context has room for."""
    chat = isinstance(body, ChatBody)
    name, asked = "max_tokens", body.max_tokens
    if chat and body.max_completion_tokens is not None:
        name, asked = "max_completion_tokens", body.max_completion_tokens
    if asked is None:
        return served.max_tokens if chat else min(PLAIN_TOKENS, served.max_tokens or PLAIN_TOKENS)
    if served.max_tokens and asked > served.max_tokens:
        text = f"{name} is {asked}: this server writes at most {served.max_tokens}"
        raise invalid_request(text, name, "invalid_value")
    return asked


def _chat_prompt(body: ChatBody, served: ServedModels) -> list[list[int]]:
    """The one place where a chat template is rendered."""
    if not body.messages:
        text = "messages is missing or empty: give a list of {role, content}"
        raise invalid_request(text, "messages", "missing_parameter")
    if served.tokenizer.chat_template is None:
        text = "the model has no chat template: ask /v1/completions to continue a text"
        raise invalid_request(text, "messages")
    try:
        return [render_prompt(served.tokenizer, [_message(m, i) for i, m in enumerate(body.messages)])]
    except HoneError as error:
        raise invalid_request(str(error), "messages", "invalid_value") from None


def _message(message: Any, i: int) -> Any:
    """The message, with a role that templates know: many templates render any role, also one that was never trained."""
    role = message.get("role") if isinstance(message, dict) else None
    if role == DEVELOPER:
        return {**message, "role": "system"}
    if isinstance(role, str) and role not in ROLES:
        text = f"message {i + 1} has an unknown role: use one of {', '.join((DEVELOPER, *ROLES))}"
        raise invalid_request(text, f"messages[{i}].role", "invalid_value")
    return message


def _plain_prompts(body: PlainBody, served: ServedModels) -> list[list[int]]:
    """In tokens, whether they are given as text or as tokens."""
    given: Any = body.prompt
    several = isinstance(given, list) and not isinstance(given[0], int)
    try:
        prompts = [
            render_prompt(served.tokenizer, p) if isinstance(p, str) else p for p in (given if several else [given])
        ]
    except HoneError as error:
        raise invalid_request(str(error), "prompt", "invalid_value") from None
    if not all(prompts):
        raise invalid_request("the prompt has no token: give at least one", "prompt", "invalid_value")
    if not all(0 <= min(tokens) <= max(tokens) < served.vocab for tokens in prompts):
        text = f"prompt has a token outside the vocabulary of {served.vocab}"
        raise invalid_request(text, "prompt", "invalid_value")
    return prompts
