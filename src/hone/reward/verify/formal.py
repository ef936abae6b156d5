"""JSON by a schema, text by a grammar: languages that a file describes. Both may take long, so they run apart."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hone.config.textfile import read_text
from hone.errors import HoneError, not_utf8
from hone.reward.verify.format import answer_tag, said

MAX_TEXT = 100_000  # characters: what is longer is refused, not cut
SHALLOW = 20  # brackets, which any schema can be followed through
_FENCE = re.compile(r"```[a-zA-Z]{0,10}\n(.*?)```", re.DOTALL)
_EXTRA = 'pip install "hone[verify]"'


def document(completion: str) -> str:
    """What is handed in: the answer tag, or without one all that is said; of either the last fenced block."""
    text = said(completion)
    tagged = answer_tag(text)
    whole = text if tagged is None else tagged
    blocks = _FENCE.findall(whole)
    return (blocks[-1] if blocks else whole).strip()


def _read(path: str, kind: str) -> str:
    try:
        return read_text(Path(path))
    except UnicodeDecodeError as error:
        raise not_utf8(path, error) from error
    except (OSError, ValueError) as error:
        raise HoneError(f"{kind}:{path} cannot be read ({error}): give the path of a text file") from error


def _constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object in which no name hides another: readers differ about which of two counts."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name stands twice in an object")
    return found


def schema(path: str) -> Callable[[str], float]:
    """A reward: 1 where the completion is JSON that fits the JSON Schema of the file, else 0."""
    try:
        import jsonschema
        from jsonschema.validators import validator_for
        from jsonschema_specifications import REGISTRY
    except ImportError as error:
        raise HoneError(f"schema:{path} needs jsonschema: {_EXTRA}") from error
    try:
        rules = json.loads(_read(path, "schema"))
        kind = validator_for(rules, default=jsonschema.Draft202012Validator)
        kind.check_schema(rules)
    except (ValueError, TypeError, AttributeError, RecursionError, jsonschema.SchemaError) as error:
        raise HoneError(
            f"schema:{path} is not a JSON Schema: {str(error).partition(chr(10))[0]}: correct it"
        ) from error
    validator: Any = kind(rules, registry=REGISTRY)  # which fetches nothing

    def schema_reward(completion: str) -> float:
        text = document(completion)
        if len(text) > MAX_TEXT:
            return 0.0
        try:
            found = json.loads(text, parse_constant=_constant, object_pairs_hook=_once)
            return float(validator.is_valid(found))
        except (ValueError, OverflowError):  # 1e999 is JSON, and infinite
            return 0.0
        except RecursionError:
            if text.count("[") + text.count("{") < SHALLOW:  # the schema refers to itself without end
                raise
            return 0.0

    return schema_reward


def grammar(path: str) -> Callable[[str], float]:
    """A reward: 1 where the completion is a sentence of the file's grammar (Lark's notation, rule `start`), else 0."""
    try:
        import lark
    except ImportError as error:
        raise HoneError(f"grammar:{path} needs lark: {_EXTRA}") from error
    try:
        parser = lark.Lark(_read(path, "grammar"), parser="earley", ambiguity="resolve")
    except lark.exceptions.LarkError as error:
        first = str(error).partition("\n")[0]
        raise HoneError(f"grammar:{path} is not a grammar of Lark: {first}: correct it") from error

    def grammar_reward(completion: str) -> float:
        text = document(completion)
        if not text or len(text) > MAX_TEXT:
            return 0.0
        try:
            parser.parse(text)
        except (lark.exceptions.UnexpectedInput, lark.exceptions.ParseError):
            return 0.0
        return 1.0

    return grammar_reward
