"""The parameters of a request, one check each: a wrong type or value is refused by name, never bent into shape."""

from collections.abc import Callable, Mapping
from typing import Any

from hone.serve.refusal import bad

Check = Callable[[str, Any], Any]

STOPS = 4  # stop strings a request
STOP_LENGTH = 500  # characters of each
BIAS = 100.0  # the largest bias, as OpenAI's
MOST_TOP = 20  # log-probs at a position
MOST_N = 128  # completions of a prompt


def integer(low: int, high: int) -> Check:
    """A whole number in [low, high]."""

    def check(name: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise bad(f"{name} is {_kind(value)}: give a whole number", name, "invalid_type")
        if not low <= value <= high:
            raise bad(f"{name} is out of range: set it between {low} and {high}", name, "invalid_value")
        return value

    return check


def number(low: float, high: float, *, above: bool = False) -> Check:
    """A finite number in [low, high], or in (low, high] where it must be above."""

    def check(name: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise bad(f"{name} is {_kind(value)}: give a number", name, "invalid_type")
        if not low <= value <= high or (above and value == low):
            raise bad(f"{name} is out of range: set it between {low:g} and {high:g}", name, "invalid_value")
        return float(value)

    return check


def flag(name: str, value: Any) -> bool:
    """true or false"""
    if not isinstance(value, bool):
        raise bad(f"{name} is {_kind(value)}: give true or false", name, "invalid_type")
    return value


def text(name: str, value: Any) -> str:
    """A string."""
    if not isinstance(value, str):
        raise bad(f"{name} is {_kind(value)}: give a string", name, "invalid_type")
    return value


def stops(name: str, value: Any) -> tuple[str, ...]:
    """A string, or a list of up to four."""
    found = value if isinstance(value, list) else [value]
    if len(found) > STOPS:
        raise bad(f"{name} has {len(found)} strings: give at most {STOPS}", name, "invalid_value")
    for one in found:
        if not 0 < len(text(name, one)) <= STOP_LENGTH:
            raise bad(f"{name}: give strings of 1 to {STOP_LENGTH} characters", name, "invalid_value")
    return tuple(found)


def biases(name: str, value: Any) -> dict[int, float]:
    """Token ids, which JSON writes as strings, to numbers."""
    if not isinstance(value, Mapping):
        raise bad(f"{name} is {_kind(value)}: give an object of token ids and numbers", name, "invalid_type")
    if not all(key.isascii() and key.isdigit() and len(key) < 10 for key in value):
        raise bad(f"{name}: its keys must be token ids", name, "invalid_value")
    bounded = number(-BIAS, BIAS)
    return {int(key): bounded(name, bias) for key, bias in value.items()}


def stream_options(name: str, value: Any) -> bool:
    """Whether the usage comes at the end of a stream."""
    if not isinstance(value, Mapping):
        raise bad(f"{name} is {_kind(value)}: give an object", name, "invalid_type")
    unknown = sorted(set(value) - {"include_usage", "include_obfuscation"})
    if unknown:
        raise bad(f"{name} has the unknown key {unknown[0]!r}: only include_usage is known", name, "unknown_parameter")
    return flag(f"{name}.include_usage", value.get("include_usage") or False)


def anything(name: str, value: Any) -> Any:
    """Checked where it is read."""
    return value


def neutral(*values: Any) -> Check:
    """Only a value that asks for nothing, since this server does not do it."""

    def check(name: str, value: Any) -> None:
        if not any(value == fine and isinstance(value, bool) == isinstance(fine, bool) for fine in values):
            raise bad(f"{name} is not supported by this server: leave it out", name, "unsupported_parameter")

    return check


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


SHARED: dict[str, Check] = {
    "model": text,
    "n": integer(1, MOST_N),
    "seed": integer(-(2**63), 2**63 - 1),
    "stop": stops,
    "temperature": number(0, 1e6),
    "top_p": number(0, 1, above=True),
    "top_k": integer(0, 2**31 - 1),
    "min_p": number(0, 1),
    "repetition_penalty": number(0, 1e6, above=True),
    "max_tokens": integer(1, 2**31 - 1),
    "logit_bias": biases,
    "stream": flag,
    "stream_options": stream_options,
    # told to others than the model: they change no token
    **dict.fromkeys(
        ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "parallel_tool_calls"),
        anything,
    ),
    # what would change the answer and is not done here
    "presence_penalty": neutral(0),
    "frequency_penalty": neutral(0),
}
CHAT: dict[str, Check] = SHARED | {
    "messages": anything,
    "max_completion_tokens": SHARED["max_tokens"],
    "logprobs": flag,
    "top_logprobs": integer(0, MOST_TOP),
    "tools": neutral([]),
    "tool_choice": neutral("none"),
    "functions": neutral([]),
    "function_call": neutral("none"),
    "response_format": neutral({"type": "text"}),
    "modalities": neutral(["text"]),
}
COMPLETION: dict[str, Check] = SHARED | {
    "prompt": anything,
    "logprobs": integer(0, MOST_TOP),
    "echo": neutral(False),
    "suffix": neutral(""),
    "best_of": neutral(1),
}


def checked(body: Any, known: Mapping[str, Check]) -> dict[str, Any]:
    """The parameters that are set, each checked; null is as good as left out."""
    if not isinstance(body, Mapping):
        raise bad(f"the body is {_kind(body)}: send a JSON object")
    given = {name: value for name, value in body.items() if value is not None}
    for name in given:
        if name not in known:
            shown = name if len(name) <= 40 and name.isprintable() else name[:40].encode("unicode_escape").decode()
            raise bad(
                f"the parameter {shown} is not supported by this server: leave it out", shown, "unsupported_parameter"
            )
    return {name: known[name](name, value) for name, value in given.items()}
