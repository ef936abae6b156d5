"""Wrong answers that scored 1: denied, hidden, hedged, only thought, or one of several; and invisible ones."""

import time
from collections.abc import Callable, Iterator, Sequence

from benchmarks.trials.case import Case, expect
from benchmarks.trials.closings import PUBLISHED
from benchmarks.trials.denials import BOXED, HONEST, ONE_OPTION, SAID, TAGGED, THOUGHT, TWO_OPTIONS
from benchmarks.trials.sentences import reward
from hone.reward.verify.choice import choice_reward
from hone.reward.verify.structure import format_reward
from hone.types import Task

TITLE = "Wrong answers that score 1, and ways around a 0"

INVISIBLE = (
    "", " ", "\u200b", "\ufeff", "\xad", "\u2060", "\u200d", "\u180e", "\u061c", "\u202e", "\u2066\u2069", "\xa0",
    "\u2003", "\u3164", "\u115f", "\u1160", "\uffa0", "\u2800", "\u034f", "\u0301", "\ufe0f",
    "\U000e0041\U000e007f", "\U000e0100", "\U0001d159", "\ue000", "\ufff9", "\u2028", "\x00", "\x1b", "\x7f",
    "\x85", "\u17b4", "\\text{}", "\\boxed{\\text{ }}", "<b></b>", "<p></p>", "<i>\u200b</i>", "<b>&nbsp;</b>",
    "\\hspace{1cm}", "\\newline", "\\\\", "\\hfill", "\\kern1em", "~~~\n~~~",
    "&nbsp;", "&#8203;", "&zwj;", "<!-- 5 -->", "<br>", "\\quad", "\\phantom{5}", "$$", "$ $",
    "****", "{}", "\\,", "\u3000", "\u200b \u2800\n\u3164",
)  # fmt: skip
PIECES = (
    "\\boxed{",
    "<answer>",
    "</answer>",
    "<think>",
    "####",
    "answer is ",
    "answer: 5\n",
    "~~",
    "<!--",
    "$",
    "\\boxed{5} or ",
)


def scores(wanted: float, text: str) -> Callable[[], str | None]:
    return lambda: expect(reward(text, "5"), wanted)


def chooses(wanted: float, text: str) -> Callable[[], str | None]:
    return lambda: expect(choice_reward(text, Task(prompt="q", answer="B")).value, wanted)


def is_formed(wanted: float, answer: str) -> Callable[[], str | None]:
    return lambda: expect(format_reward(f"<think>hm</think><answer>{answer}</answer>"), wanted)


def ends_soon(piece: str) -> str | None:
    """A million characters, in seconds of processor time."""
    begin = time.process_time()
    value = reward(piece * (1_000_000 // len(piece)), "42")
    spent = time.process_time() - begin
    return f"{spent:.1f} s" if spent > 3 else expect(value, 0.0)


def places_of_a_choice(text: str) -> Iterator[str]:
    yield from (text, f"<answer>{text}</answer>", f"\\boxed{{{text}}}", f"The answer is {text}", f"Answer: {text}")


def repeated(form: str) -> str:
    """The form with one answer and then with another."""
    return form.replace("@", "5") + "\n" + form.replace("@", "6")


def maths() -> Iterator[Case]:
    groups: Sequence[tuple[str, Sequence[str]]] = (
        ("denied, hedged or hidden in an answer tag", [f"<answer>{text}</answer>" for text in TAGGED]),
        ("denied, hedged or hidden boxes", BOXED),
        ("answers that were only thought", THOUGHT),
        ("denied or hedged sentences", SAID),
        ("two answers in a published closing form", [repeated(form) for _, form, _ in PUBLISHED]),
    )
    for group, texts in groups:
        yield from (Case(group, text, scores(0.0, text)) for text in texts)
    yield from (Case("honest answers beside such words", text, scores(1.0, text)) for text in HONEST)


def choices() -> Iterator[Case]:
    several = [whole for text in TWO_OPTIONS for whole in places_of_a_choice(text)]
    several += ["\\boxed{A}\\boxed{B}", "\\boxed{A} or \\boxed{B}", "<answer>A</answer><answer>B</answer>"]
    several += ["The answer is A. The answer is B.", "Answer: A\nAnswer: B", "<think>The answer is B"]
    for text in several:
        yield Case("a choice that names two options or denies one", text, chooses(0.0, text))
    for text in ONE_OPTION:
        yield from (Case("a choice of one option", whole, chooses(1.0, whole)) for whole in places_of_a_choice(text))


def cases(quick: bool) -> Iterator[Case]:
    """All of them in both forms, but for some of the long ones."""
    yield from maths()
    yield from choices()
    yield from (Case("invisible answers in the right format", ascii(text), is_formed(0.0, text)) for text in INVISIBLE)
    for answer in ("5", ".", "-", "\u00e9", "e\u0301", "5\u200b", "*", "$5$", "{5}", "<br>5", "\u5317"):
        yield Case("visible answers in the right format", ascii(answer), is_formed(1.0, answer))
    for piece in PIECES[:: 3 if quick else 1]:
        yield Case("a million characters of one mark end soon", piece, lambda p=piece: ends_soon(p))
