"""Parses the code of a completion as Python, and cleans it of prose, prompts and marks.

The text may be hostile, so each function is linear in it and bounded.
"""

import ast
import re
import textwrap
from collections.abc import Iterator

from hone.data.rows.code_names import UNREAD

MAX_PARSED, MAX_NESTED = 50_000, 150  # limits of code that is parsed: characters, and levels of brackets
MAX_TRIES = 20  # how often lines are removed from the end until the rest is Python
# the name of a language or [BEGIN] on the first line, [DONE] on the last, as in MBPP's own prompt: Python takes both
_FIRST = re.compile(r"\s*(?:i?py(?:thon)?[\d.]*|\[[A-Z]{2,12}\])[ \t]*\n", re.IGNORECASE)
_LAST = re.compile(r"\n\[/?[A-Z]{2,12}\]\s*$")


def parse_python(code: str) -> ast.Module | None:
    """The syntax tree; None if the code is not Python, or too large to parse safely."""
    try:
        return ast.parse(code, UNREAD) if _is_safe_to_parse(code) else None
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _is_safe_to_parse(code: str) -> bool:
    """Whether the code is neither long nor deeply nested: hostile code can crash Python's parser."""
    if len(code) > MAX_PARSED or re.search(r"(?:[-+~]\s?|not\s){150}", code):
        return False
    depth = deepest = 0
    for bracket in re.findall(r"[()\[\]{}]", code):
        depth += 1 if bracket in "([{" else -1
        deepest = max(deepest, depth)
    return deepest <= MAX_NESTED


def without_prose(text: str, *, least: int = 0) -> str:
    """The longest beginning of the text that is Python; "" if it has `least` lines or fewer."""
    lines = text.split("\n")
    for _ in range(MAX_TRIES):
        code = "\n".join(lines)
        try:
            return code if _is_safe_to_parse(code) and ast.parse(code, UNREAD) and len(lines) > least else ""
        except SyntaxError as error:
            lines = lines[: max((error.lineno or 1) - 1, 0)]
        except (ValueError, RecursionError, MemoryError):
            return ""
    return ""


def readings(code: str, *, closed: bool) -> Iterator[str]:
    """The code, then its readings without marks, indentation and prompts, and without prose after an open fence.

    >>> list(readings("x = 1\\nThat is all.", closed=False))[-1]
    'x = 1'
    """
    plain = _LAST.sub("\n", _FIRST.sub("", code, count=1) if _FIRST.match(code) else code)
    yield plain
    yield textwrap.dedent(plain)
    if ">>>" in plain:
        yield re.split(r"^[ \t]*>>>", plain, maxsplit=1, flags=re.MULTILINE)[0]
        yield "".join(f"{line}\n" for line in re.findall(r"^[ \t]*(?:>>>|\.\.\.) ?(.*)$", plain, re.MULTILINE))
    if not closed:
        yield without_prose(plain)
