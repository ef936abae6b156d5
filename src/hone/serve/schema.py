"""The parameters of a request: a wrong type or value is refused by name, never bent into shape."""

from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import PydanticCustomError

from hone.serve.refusal import Refusal, bad

MOST_N = 128  # completions of a prompt
MOST_TOP = 20  # log-probs at a position
UNSUPPORTED = "unsupported"


B = TypeVar("B", bound="Body")


def neutral(*values: Any) -> BeforeValidator:
    """Only a value that asks for nothing, since this server does not do it."""

    def check(value: Any) -> Any:
        if not any(value == fine and isinstance(value, bool) == isinstance(fine, bool) for fine in values):
            raise PydanticCustomError(UNSUPPORTED, "not supported by this server, leave it out")
        return value

    return BeforeValidator(check)


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


Tokens = Annotated[int, Field(ge=1, lt=2**31)]
Share = Annotated[float, Field(ge=0, le=1)]
Top = Annotated[int, Field(ge=0, le=MOST_TOP)]
StopString = Annotated[str, Field(min_length=1, max_length=500)]
TokenId = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]  # JSON writes keys as strings
Bias = Annotated[float, Field(ge=-100, le=100)]


class _Strict(BaseModel):
    """1.0 is no whole number, "1" no number, NaN none either, and what is not known is refused."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(_Strict):
    """What a stream tells beside the answer."""

    include_usage: bool | None = None
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
    min_p: Share = 0.0
    repetition_penalty: Annotated[float, Field(gt=0, le=1e6)] = 1.0
    max_tokens: Tokens | None = None
    logit_bias: dict[TokenId, Bias] = {}
    stream: bool = False
    stream_options: StreamOptions | None = None
    # told to others than the model: they change no token
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    parallel_tool_calls: Any = None
    # what would change the answer and is not done here
    presence_penalty: Annotated[Any, neutral(0)] = 0
    frequency_penalty: Annotated[Any, neutral(0)] = 0


class ChatBody(Body):
    """/v1/chat/completions"""

    messages: list[Any] = []
    max_completion_tokens: Tokens | None = None
    logprobs: bool = False
    top_logprobs: Top | None = None
    tools: Annotated[Any, neutral([])] = None
    tool_choice: Annotated[Any, neutral("none")] = None
    functions: Annotated[Any, neutral([])] = None
    function_call: Annotated[Any, neutral("none")] = None
    response_format: Annotated[Any, neutral({"type": "text"})] = None
    modalities: Annotated[Any, neutral(["text"])] = None


class PlainBody(Body):
    """/v1/completions"""

    prompt: Any = None
    logprobs: Top | None = None
    echo: Annotated[Any, neutral(False)] = None
    suffix: Annotated[Any, neutral("")] = None
    best_of: Annotated[Any, neutral(1)] = None


def checked(value: Any, kind: type[B]) -> B:
    """The parameters that are set, each checked; null is as good as left out."""
    if not isinstance(value, Mapping):
        raise bad("the body is not an object: send a JSON object")
    try:
        return kind.model_validate({name: given for name, given in value.items() if given is not None})
    except ValidationError as error:
        raise _refusal(error) from None


def _refusal(error: ValidationError) -> Refusal:
    """Of the first thing that is wrong; names that are unknown come before values."""
    found = error.errors(include_url=False, include_input=False, include_context=False)
    first = next((each for each in found if each["type"] == "extra_forbidden"), found[0])
    name = str(first["loc"][0]) if first["loc"] else ""
    name = name if len(name) <= 40 and name.isprintable() else name[:40].encode("unicode_escape").decode()
    if (first["type"] == "extra_forbidden" and len(first["loc"]) == 1) or not name:
        text = f"the parameter {name} is not supported by this server: leave it out"
        return bad(text, name or None, "unsupported_parameter")
    kind = first["type"]
    code = (
        "unsupported_parameter"
        if kind == UNSUPPORTED
        else "invalid_type"
        if kind.endswith("_type")
        else "invalid_value"
    )
    return bad(f"{name}: {first['msg']}", name, code)
