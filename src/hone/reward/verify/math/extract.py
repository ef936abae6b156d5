r"""Where a completion states its final answer, and what counts when it does so several times.

Only what is said aloud and shown is read. The strongest kind of place that appears is used and the others are not read:
answer tag, then `\boxed{..}` (of nested ones the outermost), then `{"answer": ..}`, then `####`, then "answer is" or
"answer:". Every place of that kind states an answer, and all of them have to be right: whoever names two answers has
named none. What the words beside a place deny is no answer; where nothing else is left, nothing was answered.
"""

import re

from hone.reward.verify.answers import (
    HOPE,
    NUMERAL,
    answer_tags,
    harmless,
    is_denied,
    is_mention,
    is_not_stated,
    outer_boxes,
    phrases,
    spoken_text,
    visible_text,
    without_fences,
)
from hone.reward.verify.math.amount import amount, unit_sizes
from hone.reward.verify.math.expression import LABEL
from hone.reward.verify.math.normalise import MARK

MAX_PLACES = 4  # distinct answers; with more nothing is accepted
MAX_PHRASES = 16  # the last ones
MAX_ANSWER = 1000  # characters of one answer
DENIED = "(denied)"  # stands for an answer that was taken back: it is an answer, and never right
MAX_WORDS = 25  # of a sentence that states one number

_INVISIBLE = "\u00ad\u180e\u200b\u200c\u200d\u200e\u200f\u2060\ufeff"
_UNSEEN = re.compile(
    rf"(?<![^\W_])[{_INVISIBLE}]+|[{_INVISIBLE}]+(?![^\W_{_INVISIBLE}])"
)  # not inside a word or number
_EARLIER = re.compile(r"(?<=[A-Za-z0-9)$}][.;])\s+(?=\S)|\n\s*\n")
_HEADING = re.compile(r"\s*[*_]{0,3}[A-Za-z]{2}")
_SENTENCE = re.compile(
    r"[.;](?:\s|$)|[\u3002\uff1b\u0964]|,?\s\(?(?:because|since|which|as)\s"
    r"|,\s(?:so|thus|hence|therefore|where|and so)\s|,?\s(?:rather than|instead of)\s|\s?\u3067\u3059"
    r"|\s?<(?=\||/?[A-Za-z_]+>)|\[/INST\]|,\s(?:and\s)?not\s(?=[-$\\(]*[0-9])"
)
_MATHS = re.compile(
    r"\$\$((?:\\.|[^$\\])+)\$\$|\$((?:\\.|[^$\\\n])+)\$(?![0-9])|\\\(((?:(?!\\\)).)+)\\\)|\\\[((?:(?!\\\]).)+)\\\]",
    re.DOTALL,
)
_FILLER = re.compile(
    r"(?:[\s*_:,]|\.{3}|\u2026|```\w{0,12}\n|not (?:\$[^$\n]{1,40}\$|[^\s,]{1,40}),? but (?:rather )?"
    r"|(?:therefore|thus|then|hence|simply|just|exactly|indeed|clearly|equal to|given by)\b)+",
    re.I,
)
_NUMBER = re.compile(r"(?<![\w.\\^])[-+]?[$\u20ac\u00a3\u00a5]?[0-9](?:[0-9.,/]*[0-9])?%?(?=[\s.,;:!?)]|$)")
_VALUE = rf"(?:[$\\(\s]*[-+]?[0-9][0-9.,/]*(?:\\?%)?|{NUMERAL.pattern})[\s$)\\*]*"
_NEXT_OPTION = r"(?<=[.,;]\s)\(?(?-i:[A-J])\)?"  # another letter, a sentence of its own
_NEXT_VALUE = re.compile(
    rf"[\s.,;*]*(?:(?:or|and|also|maybe|perhaps)\s+)?(?:{_VALUE}|{_NEXT_OPTION})(?:[.,;](?:\s|$)|\n|$)", re.I
)
_OR = r"(?:or|or else|or maybe|or perhaps|or possibly|or even|alternatively,?|maybe|perhaps|possibly)"
_OR_AFTER = re.compile(rf"[\s$)}}\],.;(]*{_OR}\s+(?:(?:it is|[a-z]\s*=)\s*)?({_VALUE})", re.I)
_OR_BEFORE = re.compile(rf"(?<![\w.])({_VALUE}),?\s+{_OR}[\s$({{]*$", re.I)
_UNIT = re.compile(
    r"[\s$*]*(?:\\[,; ]|\\\))*[\s$]*(?:\\(?:text|mathrm|mbox)\{)?\s*"
    r"(\u00b0|[A-Za-z]+(?:\^\{?[23]\}?)?)(?![A-Za-z])"
)
_MARKS = re.compile(rf"\$\s?(?:{MARK})\s?\$|{MARK}")
_LABEL = re.compile(r"(\$?)\\text(?:bf|it|rm)?\{\s*((?:[Tt]he )?(?:[Ff]inal )?[Aa]nswer)(?: is)?\s?:?\s*\}\s?[:=]?")
_CALCULATION = re.compile(r"(?<![0-9.,])<<[-0-9.,+*/()=%$ ]{1,100}>>")  # GSM8K's 9 * 2 = <<9*2=18>>18
_KEY = re.compile(r"[{,]\s{0,20}\"(?:final[_ ]?)?answer\"\s{0,5}:", re.I)
_KEY_VALUE = re.compile(
    rf"{_KEY.pattern}\s{{0,5}}(?:\"((?:[^\"\\\n]|\\.){{1,1000}})\"|(-?[0-9][0-9.eE+-]{{0,40}}))(?=\s{{0,20}}[,}}])",
    re.I,
)
_NOT = re.compile(r"[\s*_:]*not\b(?!.*\bbut\b)", re.I)
_QUOTED = re.compile(r"\"([^\"]+)\"\.?|'([^']+)'\.?|[\u201c\u2018]([^\u201d\u2019]+)[\u201d\u2019]\.?")


def places(completion: str, prompt: object = "") -> list[str]:
    """The distinct answers that the completion states in places of the strongest kind, in order."""
    text = visible_text(spoken_text(completion, prompt))
    text = text if text.isascii() else _UNSEEN.sub("", text)
    if not text.isascii() or any(mark in text for mark in ("square", r"\Box", r"\checkmark", r"\qed")):
        text = _MARKS.sub("", text)
    text = _LABEL.sub(r"\2: \1", text) if r"\text" in text else text
    text = _CALCULATION.sub("", text) if "<<" in text else text
    outside = without_fences(text)
    views = (outside,) if outside == text else (outside, text)  # what stands in a fence counts if nothing else does
    for kind in ((_tags,), (_boxed,), (_json,), (_hashes, _phrases)):
        found = [find(view) for view in views for find in kind]
        if any(found):
            stated = [answers for answers in found if any(answer.strip() for answer in answers)]
            return list(dict.fromkeys(_without_mentions(stated[0] if stated else [""])))
    return []


def final_answer(completion: str, prompt: object = "") -> str | None:
    """The last answer stated, or None where there is none."""
    found = places(completion, prompt)
    return found[-1] if found else None


def _without_mentions(found: list[str]) -> list[str]:
    """Without the empty places of a prompt that is repeated before the answer."""
    blank = [is_mention(answer) for answer in found]
    return [answer for i, answer in enumerate(found) if not blank[i] or all(blank[i:])]


def _tags(text: str) -> list[str]:
    return [_settled(_untagged(text[inside])) for inside in answer_tags(text)]


def _untagged(tagged: str) -> str:
    """A tag that holds nothing but a tag is that tag."""
    for _ in range(3):
        inner = tagged.strip()
        found = answer_tags(inner) if inner.startswith("<") and inner.endswith(">") else []
        if len(found) != 1 or inner[: found[0].start].count("<") != 1 or inner[found[0].stop :].count(">") != 1:
            break
        tagged = inner[found[0]]
    return tagged


def _settled(text: str) -> str:
    """What a place settles on that should hold nothing but an answer: a box or a formula may stand among words."""
    if len(text) > 2 * MAX_ANSWER:
        return text
    outer = outer_boxes(text)
    if outer:
        start, end, content = outer[0]
        if len(outer) > 1:
            return text
        taken_back = is_denied(text, start, end) or _NEXT_VALUE.match(text[end:])
        if not taken_back and harmless(_clause(text[:start]), _sentence(text[end:])):
            return _with_unit(content, text[end:])
        return f"{text[:start]} {content} {text[end:]}"
    led = phrases(text)
    if led and harmless(text[: led[0][0]], ""):
        found = _phrases(text)
        return found[0] if len(found) == 1 else text
    return _among_words(_undelimited(_plain(text)))


def _clause(before: str) -> str:
    r"""What the answer's own clause says before it: no earlier sentence, and nothing of `2+3=`, which leads to it."""
    clause = _EARLIER.split(before)[-1]
    return "" if re.search(r"=[\s$({\[\\]*$", clause) else clause


def _boxed(text: str) -> list[str]:
    if "box" not in text:
        return []
    kept = list[str]()
    for start, end, content in outer_boxes(text):
        if is_denied(text, start, end):
            kept.append(DENIED)
            continue
        kept.append(_with_unit(content, text[end : end + 40]))
        others = _OR_BEFORE.search(text[max(0, start - 40) : start]), _OR_AFTER.match(text[end : end + 60])
        kept += [other.group(1) for other in others if other is not None]
    return kept


def _with_unit(content: str, after: str) -> str:
    r"""An answer with the unit that stands after its box: "5 cm" of `\boxed{5} cm`; a percent sign is set aside."""
    found = _UNIT.match(after)
    if found is None:
        return content
    unit = found.group(1)
    known = unit == "\u00b0" or (unit.lower() not in ("percent", "pct") and unit_sizes(unit))
    if not known or (unit == "in" and re.match(r"\s+[a-z]", after[found.end() :])):  # "in total" is no inch
        return content
    number = amount(content)
    return content if number is not None and number[1] else f"{content} {unit}"


def _json(text: str) -> list[str]:
    """The number or text behind the key "answer" of a JSON object; any other value is no answer."""
    keys = len(_KEY.findall(text)) if '"' in text else 0
    found = list[str]()
    for match in _KEY_VALUE.finditer(text) if keys else ():
        start, end = text.rfind("{", 0, match.start() + 1), text.find("}", match.end()) + 1
        taken_back = start < 0 or not end or is_denied(text, start, end) or _NEXT_VALUE.match(text[end : end + 200])
        found.append(
            DENIED if taken_back or _OR_AFTER.match(text[end : end + 60]) else match.group(1) or match.group(2)
        )
    return found if len(found) == keys else [DENIED]


def _hashes(text: str) -> list[str]:
    """What follows `####` on its line. A line that begins with a word is a heading: it counts if nothing else does."""
    pieces = text.split("####")[1:]
    if not pieces:
        return []
    lines = list(dict.fromkeys(piece.partition("\n")[0] for piece in pieces))
    found = [_undelimited(_sentence(line)) for line in lines if not _HEADING.match(line)]
    if found and _NEXT_VALUE.match(pieces[-1].partition("\n")[2][:200]):  # one guess after another
        return [DENIED]
    return found if found or phrases(text) else lines[-1:]


def _phrases(text: str) -> list[str]:
    """What each "answer is" leads to. Prose without a value is a remark: the last one counts if nothing else does."""
    led = phrases(text)[-MAX_PHRASES:]
    ends = [*(start for start, _ in led[1:]), len(text)]
    found, remarks = list[str](), list[str]()
    for (lead, start), end in zip(led, ends, strict=False):
        answer, denied = stated_answer(text[start : min(end, start + 2 * MAX_ANSWER)])
        if is_not_stated(text[max(0, lead - 200) : lead]) or _NOT.match(text[start : start + 100].partition("\n")[0]):
            remarks.append(DENIED)
        else:
            (found if _is_value(answer) else remarks).append(DENIED if denied else answer)
    return found or remarks[-1:]


def _is_value(stated: str) -> bool:
    """Whether it has a number or LaTeX and is not a sentence about one."""
    value = re.search(r"[0-9\\]", stated) or NUMERAL.search(stated)
    if value is None:
        return False
    words = re.findall(r"(?<![\\A-Za-z{])[A-Za-z]{2,}", re.sub(r"\\[A-Za-z]+(?:\{[A-Za-z ]*\})?", "", stated))
    return len(words) <= 6 and len(stated[: value.start()].split()) <= 2


def stated_answer(text: str) -> tuple[str, bool]:
    """What a phrase leads to, a formula or the rest of its sentence; and whether it is taken back or one of many."""
    filler = _FILLER.match(text)
    text = HOPE.sub("", text[filler.end() :] if filler else text)
    maths = _formula(text)
    if maths is None:
        sentence = _sentence(text.partition("\n")[0])
        stated, end = _among_words(_plain(sentence)), len(sentence)
    else:
        content, end = maths
        rest = text[end:].partition("\n")[0]
        cut = _sentence(rest)
        alone = harmless("", cut) and not NUMERAL.search(cut)
        stated = _measured(content, cut) if alone else text[:end] + cut
        end = end if alone else end + len(cut)  # a list goes on after its first formula
    return stated, is_denied(text, 0, end) or _NEXT_VALUE.match(text[end : end + 200]) is not None


def _formula(text: str) -> tuple[str, int] | None:
    """The content and the end of a formula that the text begins with; "$5 and $" is money and none."""
    found = _MATHS.match(text)
    content = next((group for group in found.groups() if group is not None), "") if found else ""
    if found is None or (content[-1].isspace() and not content[0].isspace()):
        return None
    return content, found.end()


def _undelimited(text: str) -> str:
    """The content of a formula that is all of the text, else the text."""
    formula = _formula(text.strip())
    return formula[0] if formula and formula[1] == len(text.strip().rstrip(".")) else text


def _measured(content: str, rest: str) -> str:
    """A formula with the words after it, where they are its unit."""
    whole = f"{content} {rest.strip()}".strip()
    return whole if amount(content) is not None and amount(whole) is not None else _with_unit(content, rest)


def _sentence(line: str) -> str:
    """The line up to a reason, a consequence or its full stop."""
    return _SENTENCE.split(line, maxsplit=1)[0]


def _plain(text: str) -> str:
    r"""Without fences, quotes, and the marks of a template that was taken at its word: `[5]`, `$x^2`."""
    text = re.sub(r"^\s*```\w{0,12}\n|\n\s*```\s*$", "", text).strip(" \n\t_")
    text = re.sub(r"(?<![^\s(])\*\*([^*\n]+)\*\*", r"\1", text)
    quoted = _QUOTED.fullmatch(text)
    text = (quoted.group(1) or quoted.group(2) or quoted.group(3)) if quoted else text
    bracketed = re.fullmatch(r"\[([^\[\]]{1,200})\]\.?", text)
    if bracketed and (amount(bracketed.group(1)) is not None or not re.search(r"[,;()]", bracketed.group(1))):
        return bracketed.group(1)
    lone = text.startswith("$") and text.replace(r"\$", "").count("$") == 1
    return text[1:] if lone and (amount(text) is None or re.search(r"\\(?:circ|text|mbox|\$)", text)) else text


def _among_words(text: str) -> str:
    """The one formula or number of a sentence that says nothing else; else the text as it is."""
    text = LABEL.sub("", text.strip())
    if amount(text) is not None or len(text) > MAX_ANSWER or not re.search(r"[A-Za-z]{2}", text):
        return text
    formulas = [found for found in _MATHS.finditer(text) if _formula(found.group())]
    if len(formulas) == 1:
        start, end = formulas[0].span()
        content, _ = _formula(formulas[0].group()) or ("", 0)
        return _measured(content, text[end:]) if _is_prose(text[:start], text[end:]) else text
    numbers = list(_NUMBER.finditer(text))
    if len(numbers) != 1 or formulas:
        return text
    start, end = numbers[0].span()
    unit = re.match(r"\s+[A-Za-z]{2,}", text[end:])
    tail = text[end:] if unit is None else text[end + unit.end() :]
    if not _is_prose(text[:start], tail) or not harmless(text[:start], text[end:]):
        return text
    return numbers[0].group() + (unit.group() if unit else "")


def _is_prose(before: str, after: str) -> bool:
    """Whether both are words and nothing else, and leave what stands between them as it is."""
    words = f"{before} {after}".split()
    return len(words) <= MAX_WORDS and harmless(before, after) and not re.search(r"[\\${}_~]", f"{before}{after}")
