"""Messages as datasets write them, to messages as chat templates read them; what would come out wrong is refused."""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from hone.data.text.tokenizer import Tokenizer
from hone.errors import HoneError

Message = Mapping[str, Any]  # as in hone.types, which imports torch: a corpus is cleaned without it
REASONING = ("reasoning_content", "thinking", "reasoning")  # the names a message's reasoning goes by
ROLES = ("system", "user", "assistant", "tool")  # Phi-3 has its role markers among its stop tokens
Tool = Mapping[str, Any]  # a JSON schema: {"type": "function", "function": {"name": ..., "parameters": ...}}


def check_messages(tokenizer: Tokenizer, messages: Sequence[Message]) -> None:
    """Refuse what a template would render to something other than the messages say."""
    if isinstance(messages, str) or not isinstance(messages, Sequence) or not messages:
        raise HoneError("messages must be a list with at least one {role, content}")
    for n, m in enumerate(messages, start=1):
        if not isinstance(m, Mapping) or not isinstance(m.get("role"), str):
            raise HoneError(f'message {n} has no text as its "role": every message needs role and content')
        clean = clean_message(m, n)
        empty = not any(clean.get(key) for key in ("content", "tool_calls", "reasoning_content"))
        if m["role"] == "assistant" and empty:
            raise HoneError(f"message {n} is an empty assistant turn: remove it or fill it")
        refuse_special(tokenizer.reserved, clean, f"message {n}")
        spelt = any(m["role"] == stop.strip("<|>") for stop in (tokenizer.eos, *tokenizer.stops))
        if spelt and m["role"] not in ROLES:
            raise HoneError(f"message {n} has the role {m['role']!r}, the name of a stop token: use another role")


def clean_tools(tokenizer: Tokenizer, tools: Sequence[Tool] | str | None) -> list[dict[str, Any]] | None:
    """JSON schemas, checked; datasets whose columns have one type each hold them as JSON text."""
    if isinstance(tools, str) and tools:
        try:
            tools = json.loads(tools)
        except (ValueError, RecursionError) as error:
            raise HoneError(f"tools is text that is not JSON ({error}): write a list of JSON schemas") from error
    _check_tools(tokenizer, tools or ())
    return [dict(tool) for tool in tools if isinstance(tool, Mapping)] if tools else None


def _check_tools(tokenizer: Tokenizer, tools: Any) -> None:
    if isinstance(tools, str) or not isinstance(tools, Sequence):
        raise HoneError(f"tools is {type(tools).__name__}, expected a list of JSON schemas")
    for n, tool in enumerate(tools, start=1):
        schema = tool.get("function", tool) if isinstance(tool, Mapping) else None
        if not isinstance(schema, Mapping) or not isinstance(schema.get("name"), str):
            raise HoneError(f'tool {n} has no "name": write {{"type": "function", "function": {{"name": ...}}}}')
        try:
            json.dumps(tool)
        except (TypeError, ValueError, RecursionError) as error:
            raise HoneError(f"tool {n} is not JSON ({error}): use text, numbers, lists and objects") from error
        refuse_special(tokenizer.reserved, tool, f"tool {n}")


def refuse_special(names: Collection[str], value: Any, where: str) -> None:
    """HoneError where a text in the value contains one of the tokens: it would be read as the token itself."""
    for text in strings_in(value):
        forged = next((name for name in names if name in text), None)
        if forged:
            raise HoneError(f"{where} contains the special token {forged}: remove it from the text")


def strings_in(value: Any) -> Iterator[str]:
    """Every text in a JSON value, keys too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield str(key)
            yield from strings_in(item)
    elif isinstance(value, Sequence):
        for item in value:
            yield from strings_in(item)


def clean_message(message: Message, n: int) -> dict[str, Any]:
    """No nulls, content as one text, reasoning under its usual names, the arguments of tool calls as objects."""
    clean = {key: value for key, value in message.items() if value is not None}
    calls = clean.pop("tool_calls", None)
    if calls:
        clean["tool_calls"] = _calls(calls, n)
    reasoning = next((clean[key] for key in REASONING if key in clean), None)
    if reasoning is not None:
        if not isinstance(reasoning, str):
            raise HoneError(f'message {n}: its "reasoning_content" is {type(reasoning).__name__}, expected text')
        clean |= {"reasoning_content": reasoning, "thinking": clean.get("thinking", reasoning)}
    content = _text_of(clean.get("content"), role=clean["role"])
    if content is None and not calls:
        raise HoneError(f'message {n} has no text as its "content": every message needs role and content')
    return {**clean, "content": content}  # None is what templates look for in a message that only calls tools


def text_of(message: Message) -> str:
    """A message's content as one text: parts joined, the object a tool returned as JSON, "" where there is none."""
    content = _text_of(message.get("content"), role=str(message.get("role")))
    return content if isinstance(content, str) else "" if content is None else json.dumps(content, ensure_ascii=False)


def _text_of(content: Any, *, role: str) -> Any:
    """Text, or a list of text parts joined; the result of a tool may be any object. None for all else."""
    if isinstance(content, str) or (role == "tool" and isinstance(content, Mapping)):
        return content
    if not isinstance(content, Sequence) or not content:
        return None
    parts = [part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None for part in content]
    if all(isinstance(part, str) for part in parts):
        return "".join(str(part) for part in parts)
    return list(content) if role == "tool" else None


def _calls(calls: Any, n: int) -> list[dict[str, Any]]:
    if isinstance(calls, str) or not isinstance(calls, Sequence):
        raise HoneError(f"message {n}: tool_calls is {type(calls).__name__}, expected a list")
    return [_call(call, f"tool call {k} of message {n}") for k, call in enumerate(calls, start=1)]


def _call(call: Any, where: str) -> dict[str, Any]:
    """{"type": "function", "function": {"name", "arguments"}, ...}; a bare {"name", "arguments"} is taken too."""
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise HoneError(f'{where} has no "name": write {{"function": {{"name": ..., "arguments": {{...}}}}}}')
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            raise HoneError(f"{where}: its arguments are not JSON ({error}): write a JSON object") from error
    if not isinstance(arguments, Mapping | None):
        raise HoneError(f"{where}: its arguments are {type(arguments).__name__}, expected a JSON object")
    filled = {**function, "arguments": dict(arguments or {})}
    if "function" not in call:
        return {"type": "function", "function": filled}
    return {**{key: value for key, value in call.items() if value is not None}, "function": filled}
