"""Rewards for the form of a completion: tags, patterns, length, language, repetition, JSON Schema, grammars.

A pattern, a schema or a grammar can take very long, so these verifiers run in processes of their own.
"""

import html
import json
import re
import unicodedata
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hone.algo.select import overlong_penalty
from hone.data.corpus.language import identify, languages
from hone.errors import HoneError, not_utf8
from hone.log.rollouts import repetition as repeated_share
from hone.reward.verify.answers import MAX_COMPLETION, WORD, answer_text, spoken_text
from hone.storage.textfile import read_text
from hone.types import Rollout, Task

MAX_WRAPPED = 3  # levels of nested markup without content
_BLANKS = frozenset("\u115f\u1160\u2800\u3164\uffa0\U0001d159")  # letters and symbols that are invisible
_BLANK_MARKUP = re.compile(
    r"<!--(?:(?!-->).)*(?:-->|$)|</?(?:br|hr|p)\s{0,3}/?>|<([a-z][a-z0-9]{0,9})(?:\s[^<>\n]{0,80})?>\s{0,20}</\1>"
    r"|\\(?:[hv]?phantom|[hv]space\*?)\s{0,3}\{[^{}]*\}|\\[a-z]{1,12}\s{0,3}\{\s{0,20}\}|\\(?:[,;:! ()\[\]]|\\)"
    r"|\\(?:q?quad|newline|hfill|strut|null|relax|(?:thin|en|neg)space|kern-?[\d.]{1,6}[a-z]{2})(?![a-z])"
    r"|&(?:nbsp|shy|zwn?j|e[nm]sp|thinsp|#8203|#x200b|#160|#xa0);|\$\s*\$|\*\*\s*\*\*|\{\s*\}|^(?:```|~~~)\w*$",
    re.IGNORECASE | re.DOTALL | re.MULTILINE,
)
MAX_TEXT = 100_000  # characters; longer text is refused, not cut
MIN_DEEP_BRACKETS = 20  # brackets, which any schema can be followed through
_FENCE = re.compile(r"```[a-zA-Z]{0,10}\n(.*?)```", re.DOTALL)
_EXTRA = 'pip install "hone[verify]"'
_TAG = re.compile(r"[A-Za-z][\w-]{0,40}")
MAX_WORD, PIECE = 60, 5  # characters: of a word, and of the pieces that a longer one is cut into


def _tag_contents(completion: str, names: Sequence[str]) -> list[str] | None:
    """Each tag's content; None unless each opens and closes once, in this order, with only white space outside."""
    marks = [mark for name in names for mark in (f"<{name}>", f"</{name}>")]
    if any(completion.count(mark) != 1 for mark in marks):
        return None
    parts, rest = list[str](), completion
    for mark in marks:
        part, found, rest = rest.partition(mark)
        if not found:  # it is there once, but before an earlier one
            return None
        parts.append(part)
    return None if "".join([*parts[::2], rest]).strip() else parts[1::2]


def format_reward(completion: str, task: Task | None = None) -> float:
    """1 for `<think>..</think><answer>..</answer>`, each tag once, with an answer to be seen, else 0.

    A text prompt that ends with `<think>` has written the first tag: the completion goes on from it, or repeats it.

    >>> format_reward("<think>2 + 2</think><answer>4</answer>"), format_reward("4")
    (1.0, 0.0)
    """
    prompt = task.prompt if task else ""
    opened = isinstance(prompt, str) and prompt.rstrip().endswith("<think>") and "<think>" not in completion
    held = _tag_contents("<think>" + completion if opened else completion, ("think", "answer"))
    return float(held is not None and visible(held[1]))


def regex(pattern: str) -> Callable[[str], float]:
    """A reward: 1 where the regular expression matches the whole completion (`.` matches line breaks too).

    >>> regex("[0-9]+")("42"), regex("[0-9]+")("about 42")
    (1.0, 0.0)
    """
    try:
        compiled = re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise HoneError(f"the pattern {pattern!r} is not a regular expression: {error}: correct it") from error

    def matches_pattern(completion: str) -> float:
        return float(compiled.fullmatch(completion) is not None)

    return matches_pattern


def visible(text: str) -> bool:
    """Whether a reader sees anything. Invisible characters and markup without content do not count."""
    left = "".join(c for c in text if c in "\n\t" or (unicodedata.category(c)[0] != "C" and c not in _BLANKS))
    for _ in range(MAX_WRAPPED):
        left = _BLANK_MARKUP.sub("", left)
    left = html.unescape(left)
    return any(unicodedata.category(c)[0] in "LNPS" and c not in _BLANKS for c in left)


def tags(names: str) -> Callable[[str], float]:
    """A reward: 1 where each tag opens and closes once, in this order, and only whitespace is outside them.

    >>> tags("plan,answer")("<plan>add</plan> <answer>4</answer>"), tags("plan,answer")("<answer>4</answer>")
    (1.0, 0.0)
    """
    found = [name.strip() for name in names.split(",")]
    if len(set(found)) < len(found) or not all(_TAG.fullmatch(name) for name in found):
        raise HoneError(f"tags:{names} are no tags: write different names, as in tags:think,answer")

    def tags_in_order(completion: str) -> float:
        return float(_tag_contents(completion, found) is not None)

    return tags_in_order


def length(bounds: str) -> Callable[[Rollout], float]:
    """A reward: 1 where the completion has LOW to HIGH tokens, n / LOW if it is shorter, HIGH / n if it is longer.

    It counts the tokens of a rollout, which a run gives it; it cannot be called with text.
    """
    low, high = _integers(bounds, "length", "length:20-200, in tokens", "-")
    if not 0 < low <= high:
        raise HoneError(f"length:{bounds}: the bounds are the wrong way round: write length:20-200, in tokens")

    def length_reward(rollout: Rollout) -> float:
        written = sum(map(bool, rollout.mask))
        return min(1.0, written / low, high / max(written, 1))

    return length_reward


def overlong(margin: str) -> Callable[[Rollout], float]:
    """A reward: 0, falling to -1 over the last MARGIN tokens before the sampler's limit (DAPO's soft punishment).

    It counts the tokens of a rollout, which a run gives it; it cannot be called with text.
    """
    (tokens,) = _integers(margin, "overlong", "overlong:64, in tokens", ",")
    if tokens < 1:
        raise HoneError(f"overlong:{margin}: the margin has no tokens: write overlong:64")

    def overlong_reward(rollout: Rollout) -> float:
        if not rollout.limit:
            return 0.0
        return overlong_penalty(sum(map(bool, rollout.mask)), limit=rollout.limit, margin=tokens)

    return overlong_reward


def _integers(text: str, kind: str, example: str, between: str) -> list[int]:
    parts = text.split(between)
    if not all(part.strip().isdecimal() and len(part) < 10 for part in parts) or len(parts) != 1 + (between == "-"):
        raise HoneError(f"{kind}:{text} is not understood: write {example}")
    return [int(part) for part in parts]


def language(code: str) -> Callable[[str], float]:
    """A reward: the probability that the text outside of thoughts is in this language, 0 if another is likelier.

    >>> language("en")("Der Hund schläft unter dem Tisch.")
    0.0
    """
    if code not in languages():
        raise HoneError(f"language:{code} is not a language that can be told: write its code, as in language:en")

    def language_reward(completion: str) -> float:
        text = spoken_text(completion).strip()
        found, probability = identify(text) if text else ("", 0.0)
        return probability if found == code else 0.0

    return language_reward


def repetition_units(text: str) -> list[str]:
    """Words; the characters of scripts without spaces, and pieces of a word that is too long.

    >>> repetition_units("so 你好!"), len(repetition_units("ha" * 50))
    (['so', '你', '好', '!'], 20)
    """
    found = list[str]()
    for match in WORD.finditer(text):
        word = match.group()
        found += [word] if len(word) <= MAX_WORD else (word[i : i + PIECE] for i in range(0, len(word), PIECE))
    return found


def repetition(n: str) -> Callable[[str], float]:
    """A reward: the share of runs of N words that are not repeats of earlier ones; 1 for a completion without runs.

    >>> repetition("1")("one two one two"), repetition("2")("one two three")
    (0.5, 1.0)
    """
    (size,) = _integers(n, "repetition", "repetition:4, in words", ",")
    if not 1 <= size <= 100:
        raise HoneError(f"repetition:{n}: write a number of words from 1 to 100, as in repetition:4")

    def repetition_reward(completion: str) -> float:
        return 1.0 - repeated_share([repetition_units(completion[-MAX_COMPLETION:])], n=size)

    return repetition_reward


def submitted_text(completion: str) -> str:
    """The answer tag, or without one the text outside of thoughts; if that has fenced blocks, the last of them."""
    whole = answer_text(completion)
    blocks = _FENCE.findall(whole)
    return blocks[-1].strip() if blocks else whole


def _read(path: str, kind: str) -> str:
    try:
        return read_text(Path(path))
    except UnicodeDecodeError as error:
        raise not_utf8(path, error) from error
    except (OSError, ValueError) as error:
        raise HoneError(f"{kind}:{path} cannot be read ({error}): give the path of a text file") from error


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _object_without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object without duplicate names: readers differ about which of two counts."""
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
    validator: Any = kind(rules, registry=REGISTRY)  # the registry fetches nothing

    def schema_reward(completion: str) -> float:
        text = submitted_text(completion)
        if len(text) > MAX_TEXT:
            return 0.0
        try:
            found = json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_object_without_duplicates)
            return float(validator.is_valid(found))
        except (ValueError, OverflowError):  # 1e999 is JSON, and infinite
            return 0.0
        except RecursionError:
            if text.count("[") + text.count("{") < MIN_DEEP_BRACKETS:  # the schema refers to itself without end
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
        text = submitted_text(completion)
        if not text or len(text) > MAX_TEXT:
            return 0.0
        try:
            parser.parse(text)
        except (lark.exceptions.UnexpectedInput, lark.exceptions.ParseError):
            return 0.0
        return 1.0

    return grammar_reward
