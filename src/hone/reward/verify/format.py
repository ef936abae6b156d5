"""The form of a completion: tags, boxes and patterns. Every scan here is linear in the completion's length."""

import html
import re
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass

from hone.errors import HoneError

MAX_COMPLETION = 100_000  # characters: of what is said only the end is read
# What leads to an answer on its line, or on the next one that is not blank. Each pattern begins with a plain character,
# which the engine finds fast.
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
# "This gives the answer 5", and what makes another statement of that sentence
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
_OVER_A_LINE = re.compile(r"[ \t#>*_]{0,8}(?:the[ \t]{1,3})?(?:(?:final|my)[ \t]{1,3})?", re.IGNORECASE)
# "answer" as MGSM has it in German, Spanish, French, Swahili, Russian, Bengali, Chinese, Japanese, Thai and Telugu
_TONGUES = re.compile(
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
HOPE = re.compile(r"(?<![ ,])[ ,]{0,3}I hope (?:it|this|that)(?: is|'s) (?:correct|right)\b.*", re.IGNORECASE)
MAX_WRAPPED = 3  # levels of markup around nothing
_STRICT_TAGS = ("<think>", "</think>", "<answer>", "</answer>")
_THOUGHT = re.compile(  # a group that is not empty: the thought ends here
    r"<(/?)(?:seed:)?(?:think(?:ing)?|thoughts?|reasoning|scratchpad)(?:\s[^<>\n]{0,40})?>"
    r"|\u25c1(/?)think\u25b7|(?-i:\[(/?)THINK\])|<\|(?:begin_of_thought|start_thinking|(end_of_thought|end_thinking)"
    r"|channel\|>(?:analysis|commentary|(final))[^<>\n]{0,40}<\|message)\|>",
    re.IGNORECASE,
)
_ANSWER = re.compile(r"<\s{0,3}(/?)\s{0,3}(?:final[_ -]?)?answer\s{0,3}>", re.IGNORECASE)
_BLANKS = frozenset("\u115f\u1160\u2800\u3164\uffa0\U0001d159")  # letters and symbols that show nothing
_BLANK_MARKUP = re.compile(
    r"<!--(?:(?!-->).)*(?:-->|$)|</?(?:br|hr|p)\s{0,3}/?>|<([a-z][a-z0-9]{0,9})(?:\s[^<>\n]{0,80})?>\s{0,20}</\1>"
    r"|\\(?:[hv]?phantom|[hv]space\*?)\s{0,3}\{[^{}]*\}|\\[a-z]{1,12}\s{0,3}\{\s{0,20}\}|\\(?:[,;:! ()\[\]]|\\)"
    r"|\\(?:q?quad|newline|hfill|strut|null|relax|(?:thin|en|neg)space|kern-?[\d.]{1,6}[a-z]{2})(?![a-z])"
    r"|&(?:nbsp|shy|zwn?j|e[nm]sp|thinsp|#8203|#x200b|#160|#xa0);|\$\s*\$|\*\*\s*\*\*|\{\s*\}|^(?:```|~~~)\w*$",
    re.IGNORECASE | re.DOTALL | re.MULTILINE,
)
_STRUCK = re.compile(r"(?<![^\s*_>(\[])~~(?=[^\s~])[^~\n]*(?<=[^\s~])~~(?![A-Za-z0-9])|<s>[^<\n]{0,200}</s>")
_COMMENT = re.compile(r"^[ \t]*%+[ \t$\\(\[]*\\(?:boxed|f(?:rame)?box)[^\n]*", re.MULTILINE)
_MENTION = re.compile(
    r"[\[{<(]?(?:\\text\{)?(?:(?:your|the|final|insert) )*answer(?: here)?[\]})>]*|\.{2,}|\u2026", re.I
)
_HIDES = r"[bxh]?cancel|[hv]?phantom|sout|st|xout|strikethrough|textst"
_BRACES = re.compile(
    rf"\\(?:[{{}}]|(?P<boxed>boxed|fbox|framebox(?:\[[^\[\]{{}}]{{0,20}}\]){{0,2}})\s{{0,3}}(?:\{{|(?P<bare>[-+]?[0-9]+(?:[.,/][0-9]+)*))"
    rf"|(?P<hides>{_HIDES})\s{{0,3}}\{{)|\{{|\}}"
)


@dataclass(frozen=True)
class ThinkAnswer:
    think: str
    answer: str


def think_answer(completion: str, *, opened: bool = False) -> ThinkAnswer | None:
    """`<think>..</think><answer>..</answer>`: each tag once, in order, only whitespace around, an answer to be seen.

    `opened`: the prompt already ends with `<think>`, so the completion starts inside it.
    """
    text = "<think>" + completion if opened else completion
    if any(text.count(tag) != 1 for tag in _STRICT_TAGS):
        return None
    parts, rest = list[str](), text
    for tag in _STRICT_TAGS:
        part, found, rest = rest.partition(tag)
        if not found:  # it is there once, but before an earlier tag
            return None
        parts.append(part)
    outside, think, between, answer = parts
    if (outside + between + rest).strip() or not visible(answer):
        return None
    return ThinkAnswer(think=think.strip(), answer=answer.strip())


def format_reward(completion: str) -> float:
    """1 where `think_answer` reads the completion, else 0.

    >>> format_reward("<think>2 + 2</think><answer>4</answer>"), format_reward("4")
    (1.0, 0.0)
    """
    return float(think_answer(completion) is not None)


def matches(pattern: str) -> Callable[[str], float]:
    """A reward: 1 where the regular expression matches the whole completion (`.` matches line breaks too).

    >>> matches("[0-9]+")("42"), matches("[0-9]+")("about 42")
    (1.0, 0.0)
    """
    try:
        compiled = re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise HoneError(f"the pattern {pattern!r} is not a regular expression: {error}: correct it") from error

    def matches_pattern(completion: str) -> float:
        return float(compiled.fullmatch(completion) is not None)

    return matches_pattern


def visible(text: str) -> bool:
    """Whether a reader sees anything of it: invisible characters and markup around nothing do not count."""
    left = "".join(c for c in text if c in "\n\t" or (unicodedata.category(c)[0] != "C" and c not in _BLANKS))
    for _ in range(MAX_WRAPPED):
        left = _BLANK_MARKUP.sub("", left)
    left = html.unescape(left)
    return any(unicodedata.category(c)[0] in "LNPS" and c not in _BLANKS for c in left)


def said(completion: str, prompt: object = "") -> str:
    """What is said aloud: it follows the last closed thought, and ends where a thought begins that is not closed.

    prompt: one that ends with `<think>` has opened the thought that the completion begins with.
    """
    begin, end = 0, 0 if isinstance(prompt, str) and _opened(prompt.rstrip()[-60:]) else None
    for tag in _THOUGHT.finditer(completion):
        if any(tag.groups()):
            begin, end = tag.end(), None
        elif end is None:
            end = tag.start()
    return completion[begin:end][-MAX_COMPLETION:]


def _opened(prompt: str) -> bool:
    """Whether the prompt ends with a mark that opens a thought."""
    return any(mark.end() == len(prompt) and not any(mark.groups()) for mark in _THOUGHT.finditer(prompt))


def shown(text: str) -> str:
    """The text without what a reader does not see, or sees crossed out: comments, `~~5~~`, `<del>5</del>`."""
    text = _cut(text.replace("\r\n", "\n"), "<!--", "-->", to_the_end=True)
    for opening, closing in (("<del>", "</del>"), ("<strike>", "</strike>"), (r"\iffalse", r"\fi")):
        text = _cut(text, opening, closing)
    if "~~" in text or "</s>" in text:
        text = _STRUCK.sub("", text)
    return _COMMENT.sub("", text) if "%" in text else text


def _cut(text: str, opening: str, closing: str, *, to_the_end: bool = False) -> str:
    """The text without what stands between the two; of one that is not closed nothing or all is cut."""
    parts, at = list[str](), 0
    while (start := text.find(opening, at)) >= 0:
        end = text.find(closing, start)
        if end < 0:
            return "".join(parts) + text[at : start if to_the_end else None]
        parts.append(text[at:start])
        at = end + len(closing)
    return "".join(parts) + text[at:] if parts else text


def unfenced(text: str) -> str:
    """The text outside of fenced code blocks; a fence that is not closed begins none."""
    if "```" not in text:
        return text
    pieces = re.split(r"^[ \t]{0,3}```[^\n]*$", text, flags=re.MULTILINE)
    if len(pieces) < 3:
        return text
    return "\n".join(pieces[::2] if len(pieces) % 2 else [*pieces[:-1:2], pieces[-1]])


def answer_tags(text: str) -> list[slice]:
    """The inside of every `<answer>..</answer>`, of nested ones the outermost, in order."""
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
    """What the last complete `<answer>..</answer>` holds."""
    before, closed, _ = text.rpartition("</answer>")
    _, opened, inside = before.rpartition("<answer>")
    return inside if closed and opened else None


def answered(completion: str) -> str:
    """What the last answer tag holds, or without one all that is said."""
    text = said(completion)
    tagged = answer_tag(text)
    return (text if tagged is None else tagged).strip()


def boxes(text: str) -> list[tuple[int, int, slice]]:
    r"""Start, end and inside of every `\boxed{..}` or `\boxed 5`, in the order they close.

    Its braces must match, and no `\cancel`, `\phantom` or the like may hold it.
    Nested ones share their text, so that it is not copied here.
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
    """Start, end and content of the boxes that stand in no other; of one that holds nothing but a box, of that one."""
    found, reached = list[tuple[int, int, str]](), -1
    for start, end, inside in sorted(boxes(text), key=lambda box: box[0]):
        if start >= reached:
            found.append((start, end, _unboxed(text[inside])))
            reached = end
    return found


def _unboxed(content: str) -> str:
    inner = content.strip()
    while inner.startswith(r"\boxed{") and inner.endswith("}") and inner.count(r"\boxed") < 4:
        found = max(boxes(inner), key=lambda box: box[1] - box[0], default=None)
        if found is None or found[:2] != (0, len(inner)):
            break
        content = inner = inner[found[2]].strip()
    return content


def is_mention(content: str) -> bool:
    r"""Whether a tag or box is the `\boxed{}` or `<answer> answer here </answer>` of a prompt that is repeated."""
    return not content.strip() or _MENTION.fullmatch(content.strip()) is not None


def last_box(found: list[tuple[int, int, slice]]) -> slice:
    """The inside of the box that begins last."""
    return max(found, key=lambda box: box[0])[2]


def phrases(text: str) -> list[tuple[int, int]]:
    """Start and end of what leads to an answer: "answer is", "**Answer:**", a heading "Final Answer" over a line."""
    found, direct = list[tuple[int, int]](), list[tuple[int, int]]()
    for match in _ENGLISH.finditer(text):
        kind, low = match.lastgroup, max(0, match.start() - 200)
        before = text[max(low, text.rfind("\n", low, match.start()) + 1) : match.start()] if kind else ""
        if kind == "direct":
            direct += [match.span()] if _GIVES.search(before[-60:]) and not _DOUBTS.search(before[-200:]) else []
        elif _OVER_A_LINE.fullmatch(before[:40]):
            found.append(match.span())
    if not text.isascii() or any(word in text for word in ("Antwort", "espuesta", "Jibu")):
        found = sorted([*found, *(match.span() for match in _TONGUES.finditer(text))])
    return found or direct  # "gives the answer 3" may lead on to "the answer is 5"


def after_phrase(text: str) -> str | None:
    """What follows the last `answer is` or `answer:`, to the end of the line, without the hope that it is correct."""
    found = phrases(text)
    return HOPE.sub("", text[found[-1][1] :].partition("\n")[0]) if found else None
