"""Code as it stands in a completion, and what of it is the program: read as Python, and without what is none.

Every reading is linear in the text, and bounded: nobody has looked at it.
"""

import ast
import re
import textwrap
from collections.abc import Iterator

from hone.data.rows.code_names import UNREAD

MAX_PARSED, MAX_NESTED = 50_000, 150  # characters of a block, and brackets in brackets, that are read as Python
MAX_TRIES = 20  # lines that are left out from the end, until what is left of a text is Python
# the name of a language or [BEGIN] on the first line, [DONE] on the last, as in MBPP's own prompt: Python takes both
_FIRST = re.compile(r"\s*(?:i?py(?:thon)?[\d.]*|\[[A-Z]{2,12}\])[ \t]*\n", re.IGNORECASE)
_LAST = re.compile(r"\n\[/?[A-Z]{2,12}\]\s*$")


def parsed(code: str) -> ast.Module | None:
    """The syntax tree of code that nobody has read; None where it is not Python or would take too much to find out."""
    try:
        return ast.parse(code, UNREAD) if _modest(code) else None
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _modest(code: str) -> bool:
    """Whether it is neither long nor deep: the parser of a hostile text must not take this process down."""
    if len(code) > MAX_PARSED or re.search(r"(?:[-+~]\s?|not\s){150}", code):
        return False
    depth = deepest = 0
    for bracket in re.findall(r"[()\[\]{}]", code):
        depth += 1 if bracket in "([{" else -1
        deepest = max(deepest, depth)
    return deepest <= MAX_NESTED


def without_prose(text: str, *, least: int = 0) -> str:
    """The text up to the last line from which it is Python; "" where that leaves fewer lines than the least."""
    lines = text.split("\n")
    for _ in range(MAX_TRIES):
        code = "\n".join(lines)
        try:
            return code if _modest(code) and ast.parse(code, UNREAD) and len(lines) > least else ""
        except SyntaxError as error:
            lines = lines[: max((error.lineno or 1) - 1, 0)]
        except (ValueError, RecursionError, MemoryError):
            return ""
    return ""


def readings(code: str, *, closed: bool) -> Iterator[str]:
    """The code, and what it is without marks, indentation, prompts or, if its fence is not closed, what follows it.

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
