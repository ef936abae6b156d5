"""Multiple choice (one letter A to J) and exact text.

The strongest kind of place that appears is read: answer tag, then box, then "answer is" or "correct option:", then a
completion that is only a letter. One place must hold one letter: "A or B" is wrong. Several places must agree, or words
between them must take the earlier one back: "The answer is A. Wait, the answer is B."
"""

import re
from itertools import pairwise

from hone.reward.outcome import as_task, invalid
from hone.reward.verify.answers import (
    HOPE_PHRASE,
    answer_tags,
    answer_text,
    is_denied,
    is_mention,
    is_not_stated,
    outer_boxes,
    phrases,
    spoken_text,
    visible_text,
)
from hone.types import Outcome, Task

MAX_ANSWER = 500
MAX_PHRASES = 64  # the last ones

_NAME = r"(?:(?:option|choice|answer)\s)?"
_LETTER_ALONE = re.compile(rf"{_NAME}(?:\(([A-J])\)|\[([A-J])\]|([A-J]))[.):]?", re.IGNORECASE)
_WITH_TEXT = re.compile(
    rf"{_NAME}(?:\(([A-J])\)[.:,]?|([A-J])(?:[.):,]|(?=\s\([^A-J)])|\s[-\u2013\u2014]))\s+(.*)", re.DOTALL
)
_JOIN = r"(?:\b(?i:or|and|nor|also|plus|maybe|perhaps|possibly|as\s+well\s+as|either|both)\b|[,/&;|+])"
_LETTER = r"(?:[AI](?=[).:,;/&|]|\s*$)|[B-HJ](?![A-Za-z]))"  # "A" and "I" are also words
_SECOND = re.compile(
    rf"\([A-J]\)|{_JOIN}\s*(?:(?:maybe|perhaps|possibly|also|even)\s+)?{_NAME}{_LETTER}"
    rf"|\b(?i:no|nope|wait|actually|sorry|oops|correction|rather|hmm|i\s+mean)\b[\s,.!:;\u2013\u2014-]*"
    rf"(?:(?i:it['\u2019]s|i\s+mean|(?:it|that|the\s+answer)\s+(?:is|must\s+be|should\s+be))\s+)?{_NAME}\(?{_LETTER}"
    r"|\s[A-J]\)|\n\s*(?:[A-J][.:]\s|\(?[A-J][).:]?\s*(?:\n|$))"  # the next option of a list of them
)
_NEXT = re.compile(r"(?:or|and|nor|not|except)\b|[A-J](?:[).:,;/&|]|\s*$)|[B-HJ]\s")
_NEXT_LINE = re.compile(rf"\s*(?:[-*\u2022]\s*)?(?:{_JOIN}\s+{_NAME}\(?{_LETTER}|\(?[A-J][).:]?\s*(?:\n|$))")
_REASON = re.compile(
    r"[.,;]?\s+(?:because|since|(?<!well )as(?! well\b))\s.*|,\s+(?:and\s+)?(?:not|rather\s+than)\s+\(?[A-J]\b.*",
    re.DOTALL,
)
_LEAD = re.compile(r"\W*(?:(?:so|thus|hence|therefore|the|final|correct|best)\W+)*", re.IGNORECASE)
_AROUND = " \n\t*$_`\"'\u201c\u201d\u2018\u2019.!\u3002"  # what may stand around an answer
_OPTION = re.compile(
    r"\b(?:correct|right|best|final)\s{1,3}(?:option|choice)\s{0,3}(?:is\b|[:=])[\s*_]{0,8}", re.IGNORECASE
)
_RETRACTION = re.compile(
    r"\b(?:no|not|wait|actually|but|however|instead|rather|correction|sorry|wrong|incorrect|mistaken?|hmm|oops|second"
    r"\s+thought|reconsider(?:ing)?|re-?check(?:ing)?)\b|n['\u2019]t\b",
    re.IGNORECASE,
)
Place = tuple[int, int, str | None]  # where it starts and ends, and the letter that it names


def letter(text: str) -> str | None:
    """The one letter that a short text chooses, as in "B", "(b)", "**B**", "option B", "B) Paris"; else None."""
    text = re.sub(r"\\(?:text|mathrm|textbf|mathbf)\{([^{}]*)\}", r"\1", text[: MAX_ANSWER + 1])
    text = re.sub(r"\\[()\[\]]", "", text).replace("\\ ", " ").strip(_AROUND)
    if len(text) > MAX_ANSWER:
        return None
    bare = _LETTER_ALONE.fullmatch(text)
    if bare is not None:
        return next(group for group in bare.groups() if group).upper()
    named = _WITH_TEXT.fullmatch(text)
    if named is None or _SECOND.search(named.group(3)) or _NEXT.match(named.group(3)):
        return None
    if is_denied(text, 0, named.start(3)) or is_denied(named.group(3), 0, 0):
        return None
    return named.group(1) or named.group(2)


def final_choice(completion: str, prompt: object = "") -> str | None:
    """The letter that a completion chooses; None where it chooses none or several."""
    text = visible_text(spoken_text(completion, prompt))
    for find in (_from_tags, _from_boxes, _from_phrases):
        found = find(text)
        if found:
            return _last_letter(text, found)
    return letter(text) if len(text.strip()) <= MAX_ANSWER else None


def _last_letter(text: str, found: list[Place]) -> str | None:
    """The last place's letter, if every place before it has the same letter or is taken back; else None."""
    for (_, end, chosen), (start, _, later) in pairwise(found):
        if chosen != later and not _RETRACTION.search(text[end:start]):
            return None
    return found[-1][2]


def _from_tags(text: str) -> list[Place]:
    insides = answer_tags(text)
    stated = [inside for inside in insides if not is_mention(text[inside])] or insides[-1:]
    return [(inside.start, inside.stop, _letter_of_tag(text[inside])) for inside in stated]


def _letter_of_tag(text: str) -> str | None:
    """The letter in a tag, also in a box with spaces and dollars around it."""
    held = outer_boxes(text[: MAX_ANSWER + 1])
    alone = len(held) == 1 and not (text[: held[0][0]] + text[held[0][1] :]).strip(" \n\t$.*")
    return letter(held[0][2] if alone else _after_phrase(text))


def _after_phrase(tagged: str) -> str:
    """The text of a tag after "the answer is", if it begins with that; else all of it."""
    led = phrases(tagged[:MAX_ANSWER])
    if not led or not _LEAD.fullmatch(tagged[: led[0][0]]):
        return tagged
    return _REASON.sub("", HOPE_PHRASE.sub("", tagged[led[0][1] :]))


def _from_boxes(text: str) -> list[Place]:
    held = outer_boxes(text)
    found = list[Place]()
    for start, end, content in [box for box in held if not is_mention(box[2])] or held[-1:]:
        joined = _NEXT_LINE.match(text[end : end + 60].lstrip("$ )"))
        found.append((start, end, None if joined or is_denied(text, start, end) else letter(content)))
    return found


def _from_phrases(text: str) -> list[Place]:
    """The letter after each phrase. A phrase without a letter is a remark, and counts only as the last one."""
    led = sorted([*phrases(text), *(match.span() for match in _OPTION.finditer(text))])[-MAX_PHRASES:]
    found = list[Place]()
    for i, (lead, start) in enumerate(led):
        last = i == len(led) - 1
        stop = len(text) if last else led[i + 1][0]
        line, _, below = text[start : min(stop, start + 2 * MAX_ANSWER)].partition("\n")
        if is_not_stated(text[max(0, lead - 200) : lead]):
            found += [(lead, start, None)] * last
            continue
        stated = _REASON.sub("", HOPE_PHRASE.sub("", line)[: MAX_ANSWER + 1])
        chosen = None if _NEXT_LINE.match(below) else letter(stated)
        if chosen is not None or last or re.match(r"\W*(?:option\s)?[A-J]\b", line):
            found.append((lead, start, chosen))
    return found


def choice_reward(completion: str, task: Task | str) -> Outcome:
    """1 where the chosen letter is the gold one, else 0; invalid where the gold answer is no letter A to J.

    >>> choice_reward("The answer is (B).", "B").value, choice_reward("A or B", "B").value
    (1.0, 0.0)
    """
    task = as_task(task)
    gold = _LETTER_ALONE.fullmatch((task.answer or "").strip())
    if gold is None:
        return invalid(f"the gold answer {(task.answer or '')[:60]!r} is not a letter A to J")
    chosen = next(group for group in gold.groups() if group).upper()
    return Outcome(value=float(final_choice(completion, task.prompt) == chosen))


def exact_reward(completion: str, task: Task | str) -> Outcome:
    """1 where the answer tag, or without one the text outside of thoughts, is the gold text, else 0.

    White space around either does not count.

    >>> exact_reward("<think>easy</think><answer>yes</answer>", "yes").value, exact_reward("yes!", "yes").value
    (1.0, 0.0)
    """
    task = as_task(task)
    gold = (task.answer or "").strip()
    if not gold:
        return invalid("the task has no gold answer")
    return Outcome(value=float(answer_text(completion, task.prompt) == gold))
