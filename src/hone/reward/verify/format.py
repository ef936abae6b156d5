"""The form of a completion: tags, boxes and patterns. Every scan here is linear in the completion's length."""

import re
from collections.abc import Callable
from dataclasses import dataclass

from hone.errors import HoneError

MAX_COMPLETION = 100_000  # characters: of a longer completion only the end is read
# what leads to an answer on its line, or on the next one that is not blank
PHRASE = re.compile(r"\banswer(?:\s{1,3}is\b|\s{0,3}[:=])[ \t]{0,3}:?[\s*]{0,8}", re.IGNORECASE)
# Thai, Lao, Myanmar, Khmer; CJK punctuation, kana, ideographs; full-width forms; the planes of rarer ideographs
_UNSPACED = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3001-\u30ff\u31f0-\u9fff\uf900-\ufaff\uff00-\uffef\U00020000-\U0003ffff"
)
WORD = re.compile(rf"[{_UNSPACED}]|[^\s{_UNSPACED}]+")
_STRICT_TAGS = ("<think>", "</think>", "<answer>", "</answer>")


@dataclass(frozen=True)
class ThinkAnswer:
    think: str
    answer: str


def think_answer(completion: str, *, opened: bool = False) -> ThinkAnswer | None:
    """`<think>..</think><answer>..</answer>`: each tag once, in order, only whitespace around, an answer to be seen.

    `opened`: the prompt already ends with `<think>`, so the completion starts inside it.
    """
    text = "<think>" + completion if opened else completion
    if any(text.count(tag) != 1 for tag in _STRICT_TAGS):
        return None
    parts, rest = list[str](), text
    for tag in _STRICT_TAGS:
        part, found, rest = rest.partition(tag)
        if not found:  # it is there once, but before an earlier tag
            return None
        parts.append(part)
    outside, think, between, answer = parts
    if (outside + between + rest).strip() or not any(c.isprintable() and not c.isspace() for c in answer):
        return None
    return ThinkAnswer(think=think.strip(), answer=answer.strip())


def format_reward(completion: str) -> float:
    """1 where `think_answer` reads the completion, else 0."""
    return float(think_answer(completion) is not None)


def matches(pattern: str) -> Callable[[str], float]:
    """A reward: 1 where the regular expression matches the whole completion (`.` matches line breaks too)."""
    try:
        compiled = re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise HoneError(f"the pattern {pattern!r} is not a regular expression: {error}: correct it") from error

    def matches_pattern(completion: str) -> float:
        return float(compiled.fullmatch(completion) is not None)

    return matches_pattern


def said(completion: str) -> str:
    """The part that counts as said aloud: what follows the last `</think>`, if there is one."""
    return completion[-MAX_COMPLETION:].rpartition("</think>")[2]


def answer_tag(text: str) -> str | None:
    """What the last complete `<answer>..</answer>` holds."""
    before, closed, _ = text.rpartition("</answer>")
    _, opened, inside = before.rpartition("<answer>")
    return inside if closed and opened else None


def answered(completion: str) -> str:
    """What the last answer tag holds, or without one all that is said."""
    text = said(completion)
    tagged = answer_tag(text)
    return (text if tagged is None else tagged).strip()


def boxes(text: str) -> list[tuple[int, int, slice]]:
    r"""Start, end and inside of every `\boxed{..}` whose braces match, in the order they close.

    Nested ones share their text, so that it is not copied here.
    """
    stack, found = list[tuple[int, bool]](), list[tuple[int, int, slice]]()
    for brace in re.finditer(r"\\[{}]|(\\boxed\s{0,3})?\{|\}", text):
        token = brace.group()
        if token == "}" and stack:
            start, boxed = stack.pop()
            if boxed:
                found.append((start, brace.end(), slice(text.index("{", start) + 1, brace.start())))
        elif token.endswith("{") and token != r"\{":
            stack.append((brace.start(), brace.group(1) is not None))
    return found


def last_box(found: list[tuple[int, int, slice]]) -> slice:
    """The inside of the box that begins last."""
    return max(found, key=lambda box: box[0])[2]


def after_phrase(text: str) -> str | None:
    """What follows the last `answer is` or `answer:`, to the end of the line."""
    found = list(PHRASE.finditer(text))
    return text[found[-1].end() :].partition("\n")[0] if found else None
