"""Multiple choice (one letter A to J) and exact text.

Where several letters appear, the last one of the strongest kind counts: answer tag, then box, then "answer is",
then a completion that is nothing but a letter. One place must hold one letter: "A or B" in it is wrong.
"""

import re

from hone.reward.outcome import invalid
from hone.reward.verify.format import after_phrase, answer_tag, answered, boxes, last_box, said
from hone.types import Outcome, Task

MAX_ANSWER = 500

_BARE = re.compile(r"(?:(?:option|choice)\s)?(?:\(([A-J])\)|([A-J]))[.):]?", re.IGNORECASE)
_WITH_TEXT = re.compile(r"(?:(?:option|choice)\s)?(?:\(([A-J])\)[.:]?|([A-J])[.):])\s+(.*)", re.DOTALL)
_SECOND = re.compile(
    r"\([A-J]\)|(?:^|[\s,/&])(?:or|and|nor|,|/|&)\s*(?:(?:option|choice)\s)?[A-J](?![A-Za-z])"
    r"|\s[A-J]\)|\n\s*[A-J][.:]\s"  # the next option of a list of them
)
_NEXT = re.compile(r"(?:or|and|nor)\b|[A-J](?:[).:,;/&|]|\s*$)|[B-HJ]\s")  # "A" and "I" are also words
_REASON = re.compile(r"[.,;]?\s+(?:because|since|(?<!well )as(?! well\b))\s.*", re.DOTALL)


def letter(text: str) -> str | None:
    """The one letter a short text chooses: "B", "(b)", "B.", "**B**", "option B", "B) Paris"; else None."""
    text = re.sub(r"\\(?:text|mathrm|textbf|mathbf)\{([^{}]*)\}", r"\1", text[: MAX_ANSWER + 1])
    text = text.strip().strip("*$").strip()
    if len(text) > MAX_ANSWER:
        return None
    bare = _BARE.fullmatch(text)
    if bare is not None:
        return (bare.group(1) or bare.group(2)).upper()
    named = _WITH_TEXT.fullmatch(text)
    if named is None or _SECOND.search(named.group(3)) or _NEXT.match(named.group(3)):
        return None
    return named.group(1) or named.group(2)


def final_choice(completion: str) -> str | None:
    """The letter a completion settles on, or None where it settles on none or on several."""
    text = said(completion)
    tagged = answer_tag(text)
    if tagged is not None:
        found = boxes(tagged[:MAX_ANSWER])
        return letter(tagged[found[0][2]] if len(found) == 1 and _alone(tagged, found[0]) else tagged)
    found = boxes(text)
    if found:
        return letter(text[last_box(found)])
    phrase = after_phrase(text)
    if phrase is not None:
        return letter(_REASON.sub("", phrase[: MAX_ANSWER + 1]))
    return letter(text) if len(text.strip()) <= MAX_ANSWER else None


def _alone(tagged: str, box: tuple[int, int, slice]) -> bool:
    return not (tagged[: box[0]] + tagged[box[1] :]).strip()


def choice_reward(completion: str, task: Task) -> Outcome:
    """1 where the chosen letter is the gold one, else 0; invalid where the gold answer is no letter A to J."""
    gold = _BARE.fullmatch((task.answer or "").strip())
    if gold is None:
        return invalid(f"the gold answer {str(task.answer)[:60]!r} is not a letter A to J")
    return Outcome(value=float(final_choice(completion) == (gold.group(1) or gold.group(2)).upper()))


def exact_reward(completion: str, task: Task) -> Outcome:
    """1 where the answer tag, or without one all that is said, is the gold text up to outer whitespace, else 0."""
    gold = (task.answer or "").strip()
    if not gold:
        return invalid("the task has no gold answer")
    return Outcome(value=float(answered(completion) == gold))
