r"""Finds the final answers that a completion states.

Only text outside of thoughts that a reader sees counts. The strongest kind of place that appears is used, and the
others are not read: answer tag, then `\boxed{..}` (of nested ones the outermost), then `{"answer": ..}`, then `####`,
then "answer is" or "answer:". Every place of that kind states an answer, and all of them must be right. A place that
the words beside it deny states no answer; if only such places are left, there is none.
"""

import re

from hone.reward.verify.answers import (
    HOPE_PHRASE,
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

MAX_PLACES = 4  # distinct answers; more of them are never accepted
MAX_PHRASES = 16  # phrases that are read, from the end
MAX_ANSWER = 1000  # characters of one answer
DENIED = "(denied)"  # in place of an answer that was taken back: it is never right
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
_FILLER_WORDS = re.compile(
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
    """The distinct answers in places of the strongest kind, in order."""
    text = visible_text(spoken_text(completion, prompt))
    text = text if text.isascii() else _UNSEEN.sub("", text)
    if not text.isascii() or any(mark in text for mark in ("square", r"\Box", r"\checkmark", r"\qed")):
        text = _MARKS.sub("", text)
    text = _LABEL.sub(r"\2: \1", text) if r"\text" in text else text
    text = _CALCULATION.sub("", text) if "<<" in text else text
    outside = without_fences(text)
    views = (outside,) if outside == text else (outside, text)  # fenced text counts if nothing else does
    for kind in ((_from_tags,), (_from_boxes,), (_from_json,), (_from_hashes, _from_phrases)):
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
    """The answers without empty places before them, which repeat the prompt."""
    blank = [is_mention(answer) for answer in found]
    return [answer for i, answer in enumerate(found) if not blank[i] or all(blank[i:])]


def _from_tags(text: str) -> list[str]:
    return [_answer_in_place(_innermost_tag(text[inside])) for inside in answer_tags(text)]


def _innermost_tag(tagged: str) -> str:
    """The content of the innermost tag, where each outer one holds nothing but a tag."""
    for _ in range(3):
        inner = tagged.strip()
        found = answer_tags(inner) if inner.startswith("<") and inner.endswith(">") else []
        if len(found) != 1 or inner[: found[0].start].count("<") != 1 or inner[found[0].stop :].count(">") != 1:
            break
        tagged = inner[found[0]]
    return tagged


def _answer_in_place(text: str) -> str:
    """The answer of a place that should hold nothing else: a box, formula or number may stand among words."""
    if len(text) > 2 * MAX_ANSWER:
        return text
    outer = outer_boxes(text)
    if outer:
        start, end, content = outer[0]
        if len(outer) > 1:
            return text
        taken_back = is_denied(text, start, end) or _NEXT_VALUE.match(text[end:])
        if not taken_back and harmless(_last_clause(text[:start]), _first_sentence(text[end:])):
            return _with_unit(content, text[end:])
        return f"{text[:start]} {content} {text[end:]}"
    led = phrases(text)
    if led and harmless(text[: led[0][0]], ""):
        found = _from_phrases(text)
        return found[0] if len(found) == 1 else text
    return _value_in_sentence(_without_delimiters(_without_markup(text)))


def _last_clause(before: str) -> str:
    r"""The words before an answer in its own clause. "" where an expression such as `2+3=` leads to it."""
    clause = _EARLIER.split(before)[-1]
    return "" if re.search(r"=[\s$({\[\\]*$", clause) else clause


def _from_boxes(text: str) -> list[str]:
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
    r"""An answer with the unit after its box: "5 cm" for `\boxed{5} cm`. A percent sign is left out."""
    found = _UNIT.match(after)
    if found is None:
        return content
    unit = found.group(1)
    known = unit == "\u00b0" or (unit.lower() not in ("percent", "pct") and unit_sizes(unit))
    if not known or (unit == "in" and re.match(r"\s+[a-z]", after[found.end() :])):  # "in total" is no inch
        return content
    number = amount(content)
    return content if number is not None and number[1] else f"{content} {unit}"


def _from_json(text: str) -> list[str]:
    """The numbers or texts under the key "answer" of JSON objects; DENIED where one holds another value."""
    keys = len(_KEY.findall(text)) if '"' in text else 0
    found = list[str]()
    for match in _KEY_VALUE.finditer(text) if keys else ():
        start, end = text.rfind("{", 0, match.start() + 1), text.find("}", match.end()) + 1
        taken_back = start < 0 or not end or is_denied(text, start, end) or _NEXT_VALUE.match(text[end : end + 200])
        found.append(
            DENIED if taken_back or _OR_AFTER.match(text[end : end + 60]) else match.group(1) or match.group(2)
        )
    return found if len(found) == keys else [DENIED]


def _from_hashes(text: str) -> list[str]:
    """The text after `####` on its line. A line that begins with a word is a heading: it counts if alone."""
    pieces = text.split("####")[1:]
    if not pieces:
        return []
    lines = list(dict.fromkeys(piece.partition("\n")[0] for piece in pieces))
    found = [_without_delimiters(_first_sentence(line)) for line in lines if not _HEADING.match(line)]
    if found and _NEXT_VALUE.match(pieces[-1].partition("\n")[2][:200]):  # one guess after another
        return [DENIED]
    return found if found or phrases(text) else lines[-1:]


def _from_phrases(text: str) -> list[str]:
    """The answer after each "answer is". Prose without a value is a remark: the last one counts if alone."""
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
    """Whether it is a number or LaTeX with few words, and not a sentence."""
    value = re.search(r"[0-9\\]", stated) or NUMERAL.search(stated)
    if value is None:
        return False
    words = re.findall(r"(?<![\\A-Za-z{])[A-Za-z]{2,}", re.sub(r"\\[A-Za-z]+(?:\{[A-Za-z ]*\})?", "", stated))
    return len(words) <= 6 and len(stated[: value.start()].split()) <= 2


def stated_answer(text: str) -> tuple[str, bool]:
    """The formula or sentence after a phrase; and whether it is taken back or another answer follows."""
    filler = _FILLER_WORDS.match(text)
    text = HOPE_PHRASE.sub("", text[filler.end() :] if filler else text)
    maths = _formula(text)
    if maths is None:
        sentence = _first_sentence(text.partition("\n")[0])
        stated, end = _value_in_sentence(_without_markup(sentence)), len(sentence)
    else:
        content, end = maths
        rest = text[end:].partition("\n")[0]
        cut = _first_sentence(rest)
        alone = harmless("", cut) and not NUMERAL.search(cut)
        stated = _formula_with_unit(content, cut) if alone else text[:end] + cut
        end = end if alone else end + len(cut)  # a list goes on after its first formula
    return stated, is_denied(text, 0, end) or _NEXT_VALUE.match(text[end : end + 200]) is not None


def _formula(text: str) -> tuple[str, int] | None:
    """The content and the end of a formula that the text begins with; None for money such as "$5 and $"."""
    found = _MATHS.match(text)
    content = next((group for group in found.groups() if group is not None), "") if found else ""
    if found is None or (content[-1].isspace() and not content[0].isspace()):
        return None
    return content, found.end()


def _without_delimiters(text: str) -> str:
    """The content of a text that is one formula, else the text."""
    formula = _formula(text.strip())
    return formula[0] if formula and formula[1] == len(text.strip().rstrip(".")) else text


def _formula_with_unit(content: str, rest: str) -> str:
    """A formula, with the words after it where they are its unit."""
    whole = f"{content} {rest.strip()}".strip()
    return whole if amount(content) is not None and amount(whole) is not None else _with_unit(content, rest)


def _first_sentence(line: str) -> str:
    """The line up to its first full stop, reason or consequence."""
    return _SENTENCE.split(line, maxsplit=1)[0]


def _without_markup(text: str) -> str:
    r"""The text without fences, quotes, and brackets or dollars copied from a template: `[5]`, `$x^2`."""
    text = re.sub(r"^\s*```\w{0,12}\n|\n\s*```\s*$", "", text).strip(" \n\t_")
    text = re.sub(r"(?<![^\s(])\*\*([^*\n]+)\*\*", r"\1", text)
    quoted = _QUOTED.fullmatch(text)
    text = (quoted.group(1) or quoted.group(2) or quoted.group(3)) if quoted else text
    bracketed = re.fullmatch(r"\[([^\[\]]{1,200})\]\.?", text)
    if bracketed and (amount(bracketed.group(1)) is not None or not re.search(r"[,;()]", bracketed.group(1))):
        return bracketed.group(1)
    lone = text.startswith("$") and text.replace(r"\$", "").count("$") == 1
    return text[1:] if lone and (amount(text) is None or re.search(r"\\(?:circ|text|mbox|\$)", text)) else text


def _value_in_sentence(text: str) -> str:
    """The only formula or number of a harmless sentence; else the text as it is."""
    text = LABEL.sub("", text.strip())
    if amount(text) is not None or len(text) > MAX_ANSWER or not re.search(r"[A-Za-z]{2}", text):
        return text
    formulas = [found for found in _MATHS.finditer(text) if _formula(found.group())]
    if len(formulas) == 1:
        start, end = formulas[0].span()
        content, _ = _formula(formulas[0].group()) or ("", 0)
        return _formula_with_unit(content, text[end:]) if _is_prose(text[:start], text[end:]) else text
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
    """Whether both texts are plain words that do not change the value between them."""
    words = f"{before} {after}".split()
    return len(words) <= MAX_WORDS and harmless(before, after) and not re.search(r"[\\${}_~]", f"{before}{after}")
