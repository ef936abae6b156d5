r"""Where a completion states an answer, and which words beside it take it back. Every scan is linear in the length.

Only text after the last closed thought is read. Answers stand in tags, in boxes or after "answer is". A word denies an
answer only directly beside it: `not \boxed{5}` denies it, "this is not prime, so \boxed{5}" does not.
"""

import re

MAX_COMPLETION = 100_000  # characters that are read, from the end
# Phrases before an answer on the same line, or on the next one that is not blank. Each pattern begins with a plain
# character, which the regex engine finds fast.
_ENGLISH = re.compile(
    r"""[Aa](?<![A-Za-z].)(?i:ns(?:wers?)?)[*_]{0,3}                     # answer, **Answer**, Ans
        (?:(?:(?:\s{1,3}(?i:to|for)\s[^.:;!?\n]{1,60}?                # answer to the question
              |,?\s{1,3}(?i:therefore|then|thus|hence|now),?|\s\([^()\n]{1,40}\)|,\s(?i:in|after|as)\s[^.,:;!?\n]{1,40},
              |\s{1,3}(?i:we|I)\s(?i:get|got|obtain|found|find|seek|want|need|have))?
              \s{1,3}(?i:is|are|equals|becomes|(?:would|should|must|will|has\s{1,3}to)\s{1,3}be
                 |(?:turns|comes|works)\s{1,3}out\s{1,3}(?:to|as)(?:\s{1,3}be)?|can\s{1,3}be\s{1,3}(?:written|expressed)\s{1,3}as
                 |of(?=\s{1,3}(?:[-$0-9]|\\[(\[b])))(?![A-Za-z])
           |\s{0,3}[*_]{0,3}\s{0,3}(?:[:=\uff1a\u2192\u21d2]|\u2014(?=\s)|->))[ \t*_]{0,6}[:\uff1a]?
        |(?P<heading>[ \t*_]{0,6}\n)|(?P<direct>[ ]{1,3}(?=[-$0-9]|\\[(\[])))[\s*_]{0,8}""",
    re.VERBOSE,
)
# "This gives the answer 5", and words that change the meaning of that sentence
_GIVES = re.compile(
    r"\b(?:gives|giving|yields|yielding|obtain|obtaining|get|getting|reach)\s(?:(?:us|me)\s)?(?:the|an|our|my)\s"
    r"(?:(?:final|correct|desired|required)\s)?[*_]{0,3}$",
    re.IGNORECASE,
)
_DOUBTS = re.compile(
    r"\b(?:not|no|never|cannot|nobody|if|unless|whether|suppose|wrong\w*|incorrect\w*|false\w*|mistake\w*|error|naive\w*"
    r"|would|might|could|may|should|guess\w*|tempt\w*|instead|part|step)\b|n['\u2019]t\b",
    re.IGNORECASE,
)
_BEFORE_HEADING = re.compile(r"[ \t#>*_]{0,8}(?:the[ \t]{1,3})?(?:(?:final|my)[ \t]{1,3})?", re.IGNORECASE)
# "answer" as MGSM has it in German, Spanish, French, Swahili, Russian, Bengali, Chinese, Japanese, Thai and Telugu
_OTHER_LANGUAGES = re.compile(
    "(?:Antwort|[Rr]espuesta(?: final)?|[Rr]\u00e9ponse(?: finale)?|Jibu"
    "|\u041e\u0442\u0432\u0435\u0442|\u0989\u09a4\u09cd\u09a4\u09b0|\u7b54\u6848"
    "|\u7b54\u3048|\u0e04\u0e33\u0e15\u0e2d\u0e1a|\u0c38\u0c2e\u0c3e\u0c27\u0c3e\u0c28\u0c02)"
    "[*_]{0,3}\\s{0,3}(?:[:=\uff1a\u2014]|\u662f|\u4e3a|\u306f|\u0e04\u0e37\u0e2d|\u09b9\u09b2\u09cb?"
    "|(?:ist|lautet|es|est|ni)\\b|(?<=\u0c02)\\s|(?<=\u0c02\\s))[ \\t*_]{0,6}[:\uff1a]?[\\s*_]{0,8}"
)
# Thai, Lao, Myanmar, Khmer; CJK punctuation, kana, ideographs; full-width forms; the planes of rarer ideographs
_UNSPACED = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3001-\u30ff\u31f0-\u9fff\uf900-\ufaff\uff00-\uffef\U00020000-\U0003ffff"
)
WORD = re.compile(rf"[{_UNSPACED}]|[^\s{_UNSPACED}]+")
HOPE_PHRASE = re.compile(r"(?<![ ,])[ ,]{0,3}I hope (?:it|this|that)(?: is|'s) (?:correct|right)\b.*", re.IGNORECASE)
_THOUGHT = re.compile(  # where a group matches, the thought ends
    r"<(/?)(?:seed:)?(?:think(?:ing)?|thoughts?|reasoning|scratchpad)(?:\s[^<>\n]{0,40})?>"
    r"|\u25c1(/?)think\u25b7|(?-i:\[(/?)THINK\])|<\|(?:begin_of_thought|start_thinking|(end_of_thought|end_thinking)"
    r"|channel\|>(?:analysis|commentary|(final))[^<>\n]{0,40}<\|message)\|>",
    re.IGNORECASE,
)
_ANSWER = re.compile(r"<\s{0,3}(/?)\s{0,3}(?:final[_ -]?)?answer\s{0,3}>", re.IGNORECASE)
_STRUCK_OUT = re.compile(r"(?<![^\s*_>(\[])~~(?=[^\s~])[^~\n]*(?<=[^\s~])~~(?![A-Za-z0-9])|<s>[^<\n]{0,200}</s>")
_COMMENT = re.compile(r"^[ \t]*%+[ \t$\\(\[]*\\(?:boxed|f(?:rame)?box)[^\n]*", re.MULTILINE)
_MENTION = re.compile(
    r"[\[{<(]?(?:\\text\{)?(?:(?:your|the|final|insert) )*answer(?: here)?[\]})>]*|\.{2,}|\u2026", re.I
)
_HIDING_COMMANDS = r"[bxh]?cancel|[hv]?phantom|sout|st|xout|strikethrough|textst"
_BRACES = re.compile(
    rf"\\(?:[{{}}]|(?P<boxed>boxed|fbox|framebox(?:\[[^\[\]{{}}]{{0,20}}\]){{0,2}})\s{{0,3}}(?:\{{|(?P<bare>[-+]?[0-9]+(?:[.,/][0-9]+)*))"
    rf"|(?P<hides>{_HIDING_COMMANDS})\s{{0,3}}\{{)|\{{|\}}"
)


def spoken_text(completion: str, prompt: object = "") -> str:
    """The text outside of thoughts: after the last closed thought, up to a thought that is not closed.

    prompt: if it ends with `<think>`, the completion begins inside a thought.
    """
    begin, end = 0, 0 if isinstance(prompt, str) and _opens_thought(prompt.rstrip()[-60:]) else None
    for tag in _THOUGHT.finditer(completion):
        if any(tag.groups()):
            begin, end = tag.end(), None
        elif end is None:
            end = tag.start()
    return completion[begin:end][-MAX_COMPLETION:]


def _opens_thought(prompt: str) -> bool:
    """Whether the prompt ends with a tag that opens a thought."""
    return any(mark.end() == len(prompt) and not any(mark.groups()) for mark in _THOUGHT.finditer(prompt))


def visible_text(text: str) -> str:
    """The text without comments and without what is crossed out: `~~5~~`, `<del>5</del>`."""
    text = _remove_between(text.replace("\r\n", "\n"), "<!--", "-->", to_the_end=True)
    for opening, closing in (("<del>", "</del>"), ("<strike>", "</strike>"), (r"\iffalse", r"\fi")):
        text = _remove_between(text, opening, closing)
    if "~~" in text or "</s>" in text:
        text = _STRUCK_OUT.sub("", text)
    return _COMMENT.sub("", text) if "%" in text else text


def _remove_between(text: str, opening: str, closing: str, *, to_the_end: bool = False) -> str:
    """The text without the parts between two marks. After a mark that is not closed, nothing or all is removed."""
    parts, at = list[str](), 0
    while (start := text.find(opening, at)) >= 0:
        end = text.find(closing, start)
        if end < 0:
            return "".join(parts) + text[at : start if to_the_end else None]
        parts.append(text[at:start])
        at = end + len(closing)
    return "".join(parts) + text[at:] if parts else text


def without_fences(text: str) -> str:
    """The text outside of fenced code blocks. A fence that is not closed begins no block."""
    if "```" not in text:
        return text
    pieces = re.split(r"^[ \t]{0,3}```[^\n]*$", text, flags=re.MULTILINE)
    if len(pieces) < 3:
        return text
    return "\n".join(pieces[::2] if len(pieces) % 2 else [*pieces[:-1:2], pieces[-1]])


def answer_tags(text: str) -> list[slice]:
    """The inside of every `<answer>..</answer>` in order; of nested ones the outermost."""
    opened, found = list[int](), list[slice]()
    for tag in _ANSWER.finditer(text):
        if not tag.group(1):
            opened.append(tag.end())
        elif opened:
            start = opened.pop()
            while found and found[-1].start >= start:
                found.pop()
            found.append(slice(start, tag.start()))
    return found


def answer_tag(text: str) -> str | None:
    """The content of the last complete `<answer>..</answer>`."""
    before, closed, _ = text.rpartition("</answer>")
    _, opened, inside = before.rpartition("<answer>")
    return inside if closed and opened else None


def answer_text(completion: str, prompt: object = "") -> str:
    """The content of the last answer tag; without one the text outside of thoughts."""
    text = spoken_text(completion, prompt)
    tagged = answer_tag(text)
    return (text if tagged is None else tagged).strip()


def boxes(text: str) -> list[tuple[int, int, slice]]:
    r"""Start, end and inside of every `\boxed{..}` or `\boxed 5`, in the order in which they close.

    Braces must match. A box in `\cancel`, `\phantom` or the like does not count. Insides are slices, so that nested
    boxes copy no text.
    """
    stack, found, hidden = list[tuple[int, int, str]](), list[tuple[int, int, slice]](), 0
    for brace in _BRACES.finditer(text):
        token, kind = brace.group(), brace.lastgroup
        if kind == "bare" and not hidden:
            found.append((brace.start(), brace.end(), slice(*brace.span("bare"))))
        elif token == "}" and stack:
            start, inside, kind = stack.pop()
            hidden -= kind == "hides"
            if kind == "boxed" and not hidden:
                found.append((start, brace.end(), slice(inside, brace.start())))
        elif token.endswith("{") and token != r"\{":
            stack.append((brace.start(), brace.end(), kind or ""))
            hidden += kind == "hides"
    return found


def outer_boxes(text: str) -> list[tuple[int, int, str]]:
    """Start, end and content of each outermost box. If it holds nothing but a box, the content is that box's."""
    found, reached = list[tuple[int, int, str]](), -1
    for start, end, inside in sorted(boxes(text), key=lambda box: box[0]):
        if start >= reached:
            found.append((start, end, _innermost_box(text[inside])))
            reached = end
    return found


def _innermost_box(content: str) -> str:
    inner = content.strip()
    while inner.startswith(r"\boxed{") and inner.endswith("}") and inner.count(r"\boxed") < 4:
        found = max(boxes(inner), key=lambda box: box[1] - box[0], default=None)
        if found is None or found[:2] != (0, len(inner)):
            break
        content = inner = inner[found[2]].strip()
    return content


def is_mention(content: str) -> bool:
    r"""Whether a tag or box is empty or repeats the prompt: `\boxed{}`, `<answer> answer here </answer>`."""
    return not content.strip() or _MENTION.fullmatch(content.strip()) is not None


def phrases(text: str) -> list[tuple[int, int]]:
    """Start and end of each phrase before an answer: "answer is", "**Answer:**", a heading "Final Answer"."""
    found, direct = list[tuple[int, int]](), list[tuple[int, int]]()
    for match in _ENGLISH.finditer(text):
        kind, low = match.lastgroup, max(0, match.start() - 200)
        before = text[max(low, text.rfind("\n", low, match.start()) + 1) : match.start()] if kind else ""
        if kind == "direct":
            direct += [match.span()] if _GIVES.search(before[-60:]) and not _DOUBTS.search(before[-200:]) else []
        elif _BEFORE_HEADING.fullmatch(before[:40]):
            found.append(match.span())
    if not text.isascii() or any(word in text for word in ("Antwort", "espuesta", "Jibu")):
        found = sorted([*found, *(match.span() for match in _OTHER_LANGUAGES.finditer(text))])
    return found or direct  # "gives the answer 3" counts only without an "answer is"


def after_phrase(text: str) -> str | None:
    """The text after the last "answer is" or "answer:" on its line, without "I hope it is correct"."""
    found = phrases(text)
    return HOPE_PHRASE.sub("", text[found[-1][1] :].partition("\n")[0]) if found else None


CONTEXT = 100  # characters before and after an answer that are looked at

_NUMERALS = """two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen
    eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety hundred thousand million zero"""
_NUMERAL = rf"(?:{'|'.join(_NUMERALS.split())})"
NUMERAL = re.compile(rf"\b{_NUMERAL}\b", re.IGNORECASE)
# in a place that should hold only the answer, these words deny it or offer another one
_DENIES = """not no nor none never neither nobody cannot wrong wrongly incorrect incorrectly false untrue invalid
    mistaken impossible rejected except excluding unlike or either whether unless otherwise alternatively versus vs
    instead rather maybe perhaps possibly unknown
    nicht kein keine niemals pas jamais nunca tampoco sio hapana"""
DENIES = frozenset(_DENIES.split())
_WORD = re.compile(r"[A-Za-z]+(?:['\u2019][a-z]+)?")
_DELIMITERS = re.compile(r"\\[()\[\]]|\\(?:text|textbf|mathrm|mathbf|mbox|displaystyle)(?![a-z])")
_SIGNS = re.compile(r"[0-9\\^+/<>=|\u2260\u00b1\u221a]|(?<![A-Za-z])[-\u2212]|[-\u2212](?![A-Za-z])")

# between a word and the answer: spaces, delimiters of formulas, fonts
_OPENING_MARKS = (
    r"(?:[\s$*_`~({\[}:\"'\u201c\u2018=]|\\[(\[,;:! ]|\\(?:text|textbf|textit|mathrm|mathbf|left|quad)(?![a-z]))*"
)
_CLOSING_MARKS = r"(?:[\s$*_`~)}\]\"'\u201d\u2019]|\\[)\]])*"
_DENIAL = (
    r"(?:\bnot|\bnever|n['\u2019]t|\bcannot|\bneither|\bnor|\b(?:anything|everything)\s+but|\brather\s+than"
    r"|\binstead\s+of|\b(?:wrong|incorrect|false|bad)(?=\s+(?:answer|result|value|solution)|\s*\W)|\bfar\s+from"
    r"|\bdifferent\s+from|\\n(?:eq?|ot)(?![a-z])|\u2260|(?<=\s)!=(?=\s)|<>)"
)
_BEFORE = re.compile(
    rf"{_DENIAL}(?:\s+(?:be|been|equals?|to|the|a|an|at|all|that|it|is|was|as|my|our|final|correct|right|actual|true|"
    rf"actually|really|necessarily|exactly|simply|possibly|even|answer|value|result|solution)\b)*{_OPENING_MARKS}$",
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
    rf"{_CLOSING_MARKS}[,:(\[\u2013\u2014-]*\s*(?:(?:which|that|this|it)\s*)?{_VERDICT}"  # in the same sentence
    rf"|{_CLOSING_MARKS}[,(\[\u2013\u2014-]*\s*(?:not|wrong|incorrect|false|just\s+kidding)\s*(?:[.!?)\]]|$)"
    rf"|{_CLOSING_MARKS}[\u2717\u2718\u274c]"
    # in the next one
    rf"|{_CLOSING_MARKS}[.!?;,\u2013\u2014-]+[\s*_(]*(?:(?:but|however|oh|hmm|sorry|wait|well|actually|and),?\s+)*"
    rf"(?:(?:that|this|it|which|the\s+(?:above|answer\s+above|previous\s+answer))\s*{_VERDICT}"
    r"|(?:no|nope)\b(?=\s*[,.!;:\u2013\u2014-]|\s*$|\s+(?:wait|it|that|this|the\s+answer)\b)"
    r"|(?:just\s+kidding|scratch\s+that|never\s?mind|correction|i\s+(?:take\s+(?:it|that)\s+back|was\s+wrong|lied))\b)",
    re.IGNORECASE,
)
_OF = "half|third|quarter|root|square|cube|reciprocal|inverse|opposite|double|multiple|log|power|factor|negative|digit"
_CHANGED_BEFORE = re.compile(
    rf"\b(?:minus|negative|plus|times|about|around|approximately|roughly|nearly|almost|over|under|above|below|beyond"
    rf"|between|within|than|at\s+(?:least|most)|up\s+to|close\s+to|(?:{_OF})s?\s+of|twice|half|double|triple|sqrt|log|ln"
    rf"|sin|cos|tan|all\s+but|[b-hj-z]|{_NUMERAL}){_OPENING_MARKS}$",
    re.IGNORECASE,
)
_CHANGED_AFTER = re.compile(
    rf"{_CLOSING_MARKS}(?:squared|cubed|factorial|minus|plus|divided|multiplied|mod|to\s+the|times\s+{_NUMERAL}|if|!(?!\s|$)"
    rf"|[b-hj-z](?![a-z]))",
    re.IGNORECASE,
)
# before "answer is": words that keep the sentence from stating an answer
_ARTICLE = r"(?:(?:the|my|our|your)\s+)?(?:(?:final|correct|right)\s+)?"
_UNSTATED = re.compile(
    r"(?:\b(?:wrong|incorrect|false|bad|another|other|possible|alternative|alternate|partial|intermediate|previous|initial"
    r"|estimated|approximate|rough|naive|tempting|no|nobody['\u2019]s|not(?:\s+(?:the|my|an?))?)\s+(?:final\s+)?"
    rf"|\b(?:if|whether|suppose|assume|assuming|imagine|unless|pretend|doubt|deny|disagree)\s+(?:that\s+)?{_ARTICLE}"
    r"|(?:\bnot|n['\u2019]t|\bnever|\bfalse|\bwrong|\bincorrect|\bno\s+way)\s+(?:(?:true|correct|right|the\s+case|so|think"
    rf"|believe|say|saying|said|mean|claim|certain|sure|clear|likely)\s+)?(?:that\s+)?{_ARTICLE})[*_]{{0,3}}$",
    re.IGNORECASE,
)


def is_denied(text: str, start: int, end: int) -> bool:
    """Whether the words directly before or after text[start:end] deny it."""
    before, after = text[max(0, start - CONTEXT) : start], text[end : end + CONTEXT]
    return _BEFORE.search(before) is not None or _AFTER.match(after) is not None


def is_not_stated(before: str) -> bool:
    """Whether words before "answer is" keep it from stating an answer: "a wrong", "if the", "I doubt that the"."""
    return _UNSTATED.search(before[-CONTEXT:]) is not None


def harmless(before: str, after: str) -> bool:
    """Whether the text on both sides of an answer leaves its value alone: no digits, signs, denials or operations."""
    before, after = _DELIMITERS.sub(" ", before), _DELIMITERS.sub(" ", after)
    if _SIGNS.search(before) or _SIGNS.search(after):
        return False
    words = [word.lower() for word in _WORD.findall(f"{before} {after}")]
    if any(word in DENIES or word.endswith(("n't", "n\u2019t")) for word in words):
        return False
    around = before[-CONTEXT:], after[:CONTEXT]
    return not (
        _BEFORE.search(around[0])
        or _CHANGED_BEFORE.search(around[0])
        or _CHANGED_AFTER.match(around[1])
        or _AFTER.match(around[1])
    )
