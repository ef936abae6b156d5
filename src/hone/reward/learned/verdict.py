r"""The verdict in a judge's answer: a mark on a scale ("Score: N"), or the winner of two ("Winner: A", "B" or "tie").

What counts is a line of the judge's own that says it and nothing else of the kind, and of several the last. Thoughts,
quotations (`>`, quotation marks around the line) and fenced blocks do not count: they may repeat what the completion
says. An answer that is one JSON object, fenced or not, is read as such. A line that leaves the mark open gives none:
two numbers ("7 or 8", "7-8"), another scale than the one asked for ("2/5" of 10), a mark off the scale.
"""

import json
import re
from typing import Any

from hone.reward.verify.answers import said

MAX_LINE = 400  # characters
_FENCE = re.compile(r"^[ \t]*(`{3,}|~{3,})")
_MARK = r"(?:#{1,6}[ \t]*|[-*+\u2022][ \t]+|\d{1,2}[.)][ \t]+|\|[ \t]*)?"  # of a heading, a list, a table
_LABEL = r"[*_`\"'\[(]*(?:(?:my|the)\s+)?(?:(?:final|overall|total)\s+)?(?:{})[*_`\"'\])]*"
_SAYS = r"\s*(?:\bis\b\s*[:=]?|[:=|\uff1a])?\s*"
_DASHES = "-\u2212\u2012\u2013\u2014\u2015\uff0d"
_WRAP = r"[\s*_`$\[({|\"'~]*(?:\\boxed\s*\{)?"
_NUMBER = r"[-+\u2212\u2012-\u2015\uff0d]?\s?(?:[0-9]{1,6}(?:[.,][0-9]{1,6})?|\.[0-9]{1,6})"
# "Score (1-10): 7" and "Score out of 10: 7"
_SCALE = r"(?:\s*(?P<scale>\([^()\n]{0,30}\)|/\s?[0-9]{1,6}|out\s+of\s+[0-9]{1,6})[*_]{0,3}(?=\s{0,3}[:=]))?"
_SCORE = re.compile(
    rf"{_MARK}{_LABEL.format('score|rating|mark')}{_SCALE}(?P<says>{_SAYS}){_WRAP}(?P<mark>{_NUMBER})(?P<rest>.*)",
    re.IGNORECASE | re.DOTALL,
)
_OF = re.compile(
    rf"[\s*_`\]\)}}]*\(?(?:(?:points?|stars?|marks?)\s+)?"
    rf"(?:/|\b(?:out\s+)?of\b(?:\s+a)?(?:\s+(?:possible|maximum|total))?(?:\s+of\b)?|\bfrom\b"
    rf"|\bon\s+(?:a|the)\s+scale\s+(?:of|from)\s+(?P<low>{_NUMBER})\s*(?:to|[-\u2013])\s*)[\s*_`]*(?P<high>{_NUMBER})",
    re.IGNORECASE,
)
_OPEN = re.compile(  # what leaves the mark open: a range, a fraction, a second number in digits or in words
    r"[0-9\u00bc-\u00be\u2150-\u215e]|\bto\b\s*\w+\s*$|^[\s*_]*(?:and\s+(?:a\s+)?(?:half|quarter)|point\s"
    r"|(?:or|to|and|maybe|perhaps|-|\u2013)\s+(?:maybe\s+|perhaps\s+)?(?:zero|one|two|three|four|five|six|seven|eight|nine|ten)\b)",
    re.IGNORECASE,
)
_TAGGED = re.compile(r"<(score|rating|mark|winner)>([^<>]*)</\1>", re.IGNORECASE)
_BRACKETS = re.compile(
    r"^[*_]{0,3}\[\[(?P<inside>[^\[\]\n]{1,20})\]\][*_]{0,3}\.?"
)  # alone on its line, as MT-bench asks
_WINNER = re.compile(
    rf"{_MARK}{_LABEL.format('winner')}{_SAYS}{_WRAP}(?:(?:answer|response|assistant)\s+)?(?P<who>a|b|tie)\b(?P<rest>.*)",
    re.IGNORECASE | re.DOTALL,
)
_ALONE = re.compile(rf"{_MARK}{_LABEL.format('score|rating|mark|winner')}\s*[:\uff1a]?[*_]*", re.IGNORECASE)
_CODE = re.compile(r"`[^`]*`")
_HIDDEN = re.compile("[\ufeff\u200b-\u200d\u2060\u00ad]")  # characters that show nothing
_QUOTES = ("\u201c\u201d", '""', "''", "\u00ab\u00bb", "\u2018\u2019")


def mark(answer: str, *, low: float, high: float) -> float | None:
    r"""The mark that an answer settles on, on the scale from low to high; None where there is none.

    >>> mark("> Score: 10\nScore: 2 out of 10", low=1, high=10), mark("Score: \u22123", low=-5, high=5)
    (2.0, -3.0)
    """
    text = said(answer).strip()
    found = _of_object(text, "score", "rating", "mark")
    lines = [_SCORE.fullmatch(line) for line in _lines(text)] if found is None else []
    last = next((line for line in reversed(lines) if line is not None), None)
    if last is not None:
        found = _marked(last, low=low, high=high)
    elif isinstance(found, str):
        line = _SCORE.fullmatch(f"score: {found.strip()}")
        found = _marked(line, low=low, high=high) if line else None
    if isinstance(found, bool) or not isinstance(found, int | float):
        return None
    return float(found) if low <= found <= high else None


def _marked(line: re.Match[str], *, low: float, high: float) -> float | None:
    """The number of a line, if it stands alone or with its own scale, and is not a dash away from being another."""
    text, rest = line["mark"], line["rest"]
    if text[0] in _DASHES and not line["says"].strip():  # "Score - 3": three, or minus three?
        if low < 0:
            return None
        text = text[1:]
    named = re.findall(_NUMBER, line["scale"] or "")
    if named and abs(_number(named[-1]) or 0.0) != abs(high):
        return None
    scale = _OF.match(rest)
    if scale is not None:
        if _number(scale["high"]) != high or (scale["low"] and _number(scale["low"]) != low):
            return None
        rest = rest[scale.end() :]
    if re.match(r"\s*%", rest):
        return _number(text) if high == 100 else None
    return None if _OPEN.search(rest) or rest[:1].isalpha() else _number(text)


def _number(text: str) -> float | None:
    """A number as people write it; a comma before three digits may separate thousands, so it is none."""
    plain = re.sub(r"[\u2212\u2012-\u2015\uff0d]", "-", text).replace(" ", "")
    whole, comma, part = plain.partition(",")
    if comma and len(part) == 3:
        return None
    return float(f"{whole}.{part}" if comma else plain)


def winner(answer: str) -> str | None:
    """a, b or tie; None where the answer names none."""
    text = said(answer).strip()
    found = _of_object(text, "winner")
    lines = [f"winner: {found}"] if isinstance(found, str) else [] if found is not None else _lines(text)
    matches = [match for line in lines if (match := _WINNER.fullmatch(line))]
    if not matches or re.search(r"\b(?:or|and|tie|[AB])\b", matches[-1]["rest"].partition(".")[0]):
        return None
    return matches[-1]["who"].lower()


def _of_object(text: str, *names: str) -> Any:
    """What an answer that is one JSON object has under the first of these names; None where it is none."""
    fenced = re.fullmatch(r"(?:```|~~~)(?:json)?\s*\n(.*?)\n?\s*(?:```|~~~)", text, re.DOTALL | re.IGNORECASE)
    inside = fenced[1] if fenced else text
    if not inside.lstrip().startswith("{"):
        return None
    try:
        found = json.loads(inside)
    except (ValueError, RecursionError):
        return None
    known = {str(key).lower().replace("final_", "").replace("overall_", ""): value for key, value in found.items()}
    return next((known[name] for name in names if name in known), None)


def _lines(text: str) -> list[str]:
    """The lines that are the judge's own words; a label alone on its line is joined with the next."""
    own, code, fence = list[str](), list[str](), ""
    for line in _HIDDEN.sub("", text).splitlines():
        mark = _FENCE.match(line)
        if mark and (not fence or mark[1].startswith(fence)):
            fence = "" if fence else mark[1]
        elif not fence and line.strip() and not line.lstrip().startswith(">") and not _quoted(line.strip()):
            plain = _BRACKETS.sub(r"score: \g<inside>", _TAGGED.sub(r"\1: \2", line.strip()[:MAX_LINE]))
            (code if line.startswith(("    ", "\t")) or _CODE.fullmatch(plain) else own).append(plain)
    for i in range(len(own) - 1):
        if _ALONE.fullmatch(own[i]):
            label = own[i].rstrip(" :\uff1a*_")
            own[i : i + 2] = ["", f"{label}: {own[i + 1]}"]
    return [*code, *own]  # code may be a quotation: it counts if nothing else does


def _quoted(line: str) -> bool:
    return len(line) > 1 and f"{line[0]}{line[-1]}" in _QUOTES
