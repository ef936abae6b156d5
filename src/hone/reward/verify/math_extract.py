r"""Where a completion states its final answer, and what counts when it does so several times.

Only what follows the last `</think>` is read. The strongest kind of place that appears is used and the others are not
read: answer tag, then `\boxed{..}` (of nested ones the outermost), then `####`, then "answer is" or "answer:".
Every place of that kind states an answer, and all of them have to be right: whoever names two answers has named none.
Two exceptions, for prose that is no answer: a `####` line that begins with a word is a heading, and an "answer is"
without a digit or LaTeX is a remark; both count only where they are the last of their kind.
"""

import re
from collections.abc import Callable

from hone.reward.verify.format import PHRASE, boxes, said

MAX_PLACES = 4  # distinct answers; with more nothing is accepted
MAX_PHRASES = 16  # the last ones
MAX_ANSWER = 1000  # characters of one answer

_TAGGED = re.compile(r"<answer>((?:(?!</?answer>).)*)</answer>", re.DOTALL)
_REASON = re.compile(r"[.;](?:\s|$)|,?\s(?:because|since|which|as)\s|\s<")
_MATHS = re.compile(r"(?:\$\$([^$]+)\$\$|\$([^$\n]+)\$|\\\(([^\n]+?)\\\)|\\\[(.+?)\\\])(?P<rest>(?-s:.*))", re.DOTALL)


def places(completion: str) -> list[str]:
    """The distinct answers that the completion states in places of the strongest kind, in order."""
    text = said(completion)
    for find in (_tags, _boxed, _hashes, _phrases):
        found = find(text)
        if found:
            return list(dict.fromkeys(found))
    return []


def final_answer(completion: str) -> str | None:
    """The last answer stated, or None where there is none."""
    found = places(completion)
    return found[-1] if found else None


def _tags(text: str) -> list[str]:
    if "</answer>" not in text:  # which would be looked for from every opening tag
        return []
    return [_one_box(match.group(1)) for match in _TAGGED.finditer(text)]


def _one_box(tagged: str) -> str:
    """Inside an answer tag a single box may stand among words; with digits beside it the whole is judged."""
    found = boxes(tagged[:MAX_ANSWER])
    if len(found) != 1:
        return tagged
    start, end, inside = found[0]
    return tagged if re.search(r"[0-9]", tagged[:start] + tagged[end:]) else tagged[inside]


def _boxed(text: str) -> list[str]:
    if r"\boxed" not in text:
        return []
    outer, reached = list[str](), -1
    for start, end, inside in sorted(boxes(text), key=lambda box: box[0]):
        if start >= reached:
            outer.append(_unboxed(text[inside]))
            reached = end
    return outer


def _unboxed(content: str) -> str:
    """A box that holds nothing but a box is that box."""
    inner = content.strip()
    while inner.startswith(r"\boxed{") and inner.endswith("}") and inner.count(r"\boxed") < 4:
        found = max(boxes(inner), key=lambda box: box[1] - box[0], default=None)
        if found is None or found[:2] != (0, len(inner)):
            break
        content = inner = inner[found[2]].strip()
    return content


def _hashes(text: str) -> list[str]:
    lines = [line.partition("\n")[0] for line in text.split("####")[1:]]
    return _counted(lines, lambda line: re.match(r"\s*\**[A-Za-z]{2}", line) is None)


def _phrases(text: str) -> list[str]:
    ends = [match.end() for match in PHRASE.finditer(text)][-MAX_PHRASES:]
    found = [_stated(text[end : end + 2 * MAX_ANSWER]) for end in ends]
    return _counted(found, lambda line: re.search(r"[0-9\\]", line) is not None)


def _counted(found: list[str], counts: Callable[[str], bool]) -> list[str]:
    return [line for i, line in enumerate(found) if i == len(found) - 1 or counts(line)]


def _stated(text: str) -> str:
    """The formula that a phrase leads to, if no digit stands after it; else the line up to a reason or full stop."""
    maths = _MATHS.match(text)
    if maths is not None and not re.search(r"[0-9]|\bor\b", maths.group("rest")):
        return next(group for group in maths.groups() if group is not None)
    return _REASON.split(text.partition("\n")[0], maxsplit=1)[0]
