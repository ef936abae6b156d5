r"""Words beside an answer that take it back, offer another one, or make another value of it.

A completion speaks in sentences, so a word counts only where it stands directly at the answer: `not \boxed{5}` and
`\boxed{5} is wrong` deny it, "this is not prime, so \boxed{5}" does not. No look goes further than `REACH` characters.
"""

import re

REACH = 100  # characters before and after an answer

_NUMERALS = """two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen
    eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety hundred thousand million zero"""
_NUMERAL = rf"(?:{'|'.join(_NUMERALS.split())})"
NUMERAL = re.compile(rf"\b{_NUMERAL}\b", re.IGNORECASE)
# in a place that should hold nothing but the answer, these words deny it or offer another one wherever they stand
_DENIES = """not no nor none never neither nobody cannot wrong wrongly incorrect incorrectly false untrue invalid
    mistaken impossible rejected except excluding unlike or either whether unless otherwise alternatively versus vs
    instead rather maybe perhaps possibly unknown
    nicht kein keine niemals pas jamais nunca tampoco sio hapana"""
DENIES = frozenset(_DENIES.split())
_WORD = re.compile(r"[A-Za-z]+(?:['\u2019][a-z]+)?")
_DELIMITERS = re.compile(r"\\[()\[\]]|\\(?:text|textbf|mathrm|mathbf|mbox|displaystyle)(?![a-z])")
_SIGNS = re.compile(r"[0-9\\^+/<>=|\u2260\u00b1\u221a]|(?<![A-Za-z])[-\u2212]|[-\u2212](?![A-Za-z])")

# what may stand between a word and the answer: spaces, delimiters of formulas, fonts
_GAP = r"(?:[\s$*_`~({\[}:\"'\u201c\u2018=]|\\[(\[,;:! ]|\\(?:text|textbf|textit|mathrm|mathbf|left|quad)(?![a-z]))*"
_CLOSE = r"(?:[\s$*_`~)}\]\"'\u201d\u2019]|\\[)\]])*"
_DENIAL = (
    r"(?:\bnot|\bnever|n['\u2019]t|\bcannot|\bneither|\bnor|\b(?:anything|everything)\s+but|\brather\s+than"
    r"|\binstead\s+of|\b(?:wrong|incorrect|false|bad)(?=\s+(?:answer|result|value|solution)|\s*\W)|\bfar\s+from"
    r"|\bdifferent\s+from|\\n(?:eq?|ot)(?![a-z])|\u2260|(?<=\s)!=(?=\s)|<>)"
)
_BEFORE = re.compile(
    rf"{_DENIAL}(?:\s+(?:be|been|equals?|to|the|a|an|at|all|that|it|is|was|as|my|our|final|correct|right|actual|true|"
    rf"actually|really|necessarily|exactly|simply|possibly|even|answer|value|result|solution)\b)*{_GAP}$",
    re.IGNORECASE,
)
_WRONG = (
    r"(?:wrong|incorrect|false|untrue|mistaken|invalid|impossible|rejected|excluded|ruled\s+out|nonsense"
    r"|a\s+(?:mistake|lie|guess|joke|trap)|not\s*(?:[.!?)\]]|$)|not\s+(?:be\s+)?(?:true|so|right|correct|it|valid|possible"
    r"|accepted|allowed|the|my|our|what|a\s+(?:solution|valid|correct)|an\s+answer)\b)"
)
_IS = r"(?:(?:is|was|are|were|seems|looks|must\s+be|would\s+be|can|could|may|might)\b|['\u2019]s\b)"
_ISNT = r"(?:(?:is|was|are|ca|would|could)n['\u2019]t|cannot)"
_RIGHT = r"(?:right|correct|true|it|the|valid|possible|so|my|our)\b"
_VERDICT = rf"(?:{_IS}\s+(?:[a-z]+ly\s+)?{_WRONG}|{_ISNT}\s+(?:be\s+)?{_RIGHT})"
_AFTER = re.compile(
    rf"{_CLOSE}[,:(\[\u2013\u2014-]*\s*(?:(?:which|that|this|it)\s*)?{_VERDICT}"  # in the same sentence
    rf"|{_CLOSE}[,(\[\u2013\u2014-]*\s*(?:not|wrong|incorrect|false|just\s+kidding)\s*(?:[.!?)\]]|$)"
    rf"|{_CLOSE}[\u2717\u2718\u274c]"
    # in the next one
    rf"|{_CLOSE}[.!?;,\u2013\u2014-]+[\s*_(]*(?:(?:but|however|oh|hmm|sorry|wait|well|actually|and),?\s+)*"
    rf"(?:(?:that|this|it|which|the\s+(?:above|answer\s+above|previous\s+answer))\s*{_VERDICT}"
    r"|(?:no|nope)\b(?=\s*[,.!;:\u2013\u2014-]|\s*$|\s+(?:wait|it|that|this|the\s+answer)\b)"
    r"|(?:just\s+kidding|scratch\s+that|never\s?mind|correction|i\s+(?:take\s+(?:it|that)\s+back|was\s+wrong|lied))\b)",
    re.IGNORECASE,
)
_OF = "half|third|quarter|root|square|cube|reciprocal|inverse|opposite|double|multiple|log|power|factor|negative|digit"
_CHANGED_BEFORE = re.compile(
    rf"\b(?:minus|negative|plus|times|about|around|approximately|roughly|nearly|almost|over|under|above|below|beyond"
    rf"|between|within|than|at\s+(?:least|most)|up\s+to|close\s+to|(?:{_OF})s?\s+of|twice|half|double|triple|sqrt|log|ln"
    rf"|sin|cos|tan|all\s+but|[b-hj-z]|{_NUMERAL}){_GAP}$",
    re.IGNORECASE,
)
_CHANGED_AFTER = re.compile(
    rf"{_CLOSE}(?:squared|cubed|factorial|minus|plus|divided|multiplied|mod|to\s+the|times\s+{_NUMERAL}|if|!(?!\s|$)"
    rf"|[b-hj-z](?![a-z]))",
    re.IGNORECASE,
)
# in front of "answer is": what makes of the sentence another statement than that
_ARTICLE = r"(?:(?:the|my|our|your)\s+)?(?:(?:final|correct|right)\s+)?"
_UNSTATED = re.compile(
    r"(?:\b(?:wrong|incorrect|false|bad|another|other|possible|alternative|alternate|partial|intermediate|previous|initial"
    r"|estimated|approximate|rough|naive|tempting|no|nobody['\u2019]s|not(?:\s+(?:the|my|an?))?)\s+(?:final\s+)?"
    rf"|\b(?:if|whether|suppose|assume|assuming|imagine|unless|pretend|doubt|deny|disagree)\s+(?:that\s+)?{_ARTICLE}"
    r"|(?:\bnot|n['\u2019]t|\bnever|\bfalse|\bwrong|\bincorrect|\bno\s+way)\s+(?:(?:true|correct|right|the\s+case|so|think"
    rf"|believe|say|saying|said|mean|claim|certain|sure|clear|likely)\s+)?(?:that\s+)?{_ARTICLE})[*_]{{0,3}}$",
    re.IGNORECASE,
)


def denied(text: str, start: int, end: int) -> bool:
    """Whether the words directly before or after text[start:end] take it back."""
    before, after = text[max(0, start - REACH) : start], text[end : end + REACH]
    return _BEFORE.search(before) is not None or _AFTER.match(after) is not None


def unstated(before: str) -> bool:
    """Whether what leads up to "answer is" keeps it from stating an answer: "a wrong", "if the", "I doubt that the"."""
    return _UNSTATED.search(before[-REACH:]) is not None


def harmless(before: str, after: str) -> bool:
    """Whether an answer between these two keeps its value: prose without digits, signs, denials or operations."""
    before, after = _DELIMITERS.sub(" ", before), _DELIMITERS.sub(" ", after)
    if _SIGNS.search(before) or _SIGNS.search(after):
        return False
    words = [word.lower() for word in _WORD.findall(f"{before} {after}")]
    if any(word in DENIES or word.endswith(("n't", "n\u2019t")) for word in words):
        return False
    around = before[-REACH:], after[:REACH]
    return not (
        _BEFORE.search(around[0])
        or _CHANGED_BEFORE.search(around[0])
        or _CHANGED_AFTER.match(around[1])
        or _AFTER.match(around[1])
    )
