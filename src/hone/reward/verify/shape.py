"""The outer form of a completion: tags, length, language, repetition. Every scan is linear in its length."""

import re
from collections.abc import Callable

from hone.algo.select import overlong_penalty
from hone.data.corpus.language import identify, languages
from hone.errors import HoneError
from hone.log.monitor import repetition
from hone.reward.verify.format import MAX_COMPLETION, WORD, said
from hone.types import Rollout

_TAG = re.compile(r"[A-Za-z][\w-]{0,40}")
LONGEST, PIECE = 60, 5  # characters: of a word, and of the pieces that a longer one is cut into


def tags(names: str) -> Callable[[str], float]:
    """A reward: 1 where each tag opens and closes once, in this order, and only whitespace is outside them.

    >>> tags("plan,answer")("<plan>add</plan> <answer>4</answer>"), tags("plan,answer")("<answer>4</answer>")
    (1.0, 0.0)
    """
    found = [name.strip() for name in names.split(",")]
    if len(set(found)) < len(found) or not all(_TAG.fullmatch(name) for name in found):
        raise HoneError(f"tags:{names} are no tags: write different names, as in tags:think,answer")
    order = [mark for name in found for mark in (f"<{name}>", f"</{name}>")]

    def tags_in_order(completion: str) -> float:
        if any(completion.count(mark) != 1 for mark in order):
            return 0.0
        places = [completion.index(mark) for mark in order]
        ends = [place + len(mark) for place, mark in zip(places, order, strict=True)]
        if places != sorted(places):
            return 0.0
        edges = [0, *ends[1::2]], [*places[0::2], len(completion)]
        return float(not any(completion[a:b].strip() for a, b in zip(*edges, strict=True)))

    return tags_in_order


def length(bounds: str) -> Callable[[Rollout], float]:
    """A reward: 1 where the completion has LOW to HIGH tokens, else how far it is from that: n / LOW or HIGH / n."""
    low, high = _whole(bounds, "length", "length:20-200, in tokens", "-")
    if not 0 < low <= high:
        raise HoneError(f"length:{bounds}: the bounds are the wrong way round: write length:20-200, in tokens")

    def length_reward(rollout: Rollout) -> float:
        written = sum(map(bool, rollout.mask))
        return min(1.0, written / low, high / max(written, 1))

    return length_reward


def overlong(margin: str) -> Callable[[Rollout], float]:
    """A reward: 0, falling to -1 over the last MARGIN tokens before the sampler's limit (DAPO's soft punishment)."""
    (tokens,) = _whole(margin, "overlong", "overlong:64, in tokens", ",")
    if tokens < 1:
        raise HoneError(f"overlong:{margin}: the margin has no tokens: write overlong:64")

    def overlong_reward(rollout: Rollout) -> float:
        if not rollout.limit:
            return 0.0
        return overlong_penalty(sum(map(bool, rollout.mask)), limit=rollout.limit, margin=tokens)

    return overlong_reward


def _whole(text: str, kind: str, example: str, between: str) -> list[int]:
    parts = text.split(between)
    if not all(part.strip().isdecimal() and len(part) < 10 for part in parts) or len(parts) != 1 + (between == "-"):
        raise HoneError(f"{kind}:{text} is not understood: write {example}")
    return [int(part) for part in parts]


def language(code: str) -> Callable[[str], float]:
    """A reward: the probability that what is said is in this language, 0 where another is likelier.

    >>> language("en")("Der Hund schläft unter dem Tisch.")
    0.0
    """
    if code not in languages():
        raise HoneError(f"language:{code} is not a language that can be told: write its code, as in language:en")

    def language_reward(completion: str) -> float:
        text = said(completion).strip()
        found, probability = identify(text) if text else ("", 0.0)
        return probability if found == code else 0.0

    return language_reward


def units(text: str) -> list[str]:
    """Words; of scripts written without spaces the characters, and of an endless word pieces as long as a word.

    >>> units("so 你好!"), len(units("ha" * 50))
    (['so', '你', '好', '!'], 20)
    """
    found = list[str]()
    for match in WORD.finditer(text):
        word = match.group()
        found += [word] if len(word) <= LONGEST else (word[i : i + PIECE] for i in range(0, len(word), PIECE))
    return found


def varied(n: str) -> Callable[[str], float]:
    """A reward: the share of runs of N units that the completion did not have before; 1 for one without any.

    >>> varied("1")("one two one two"), varied("2")("one two three")
    (0.5, 1.0)
    """
    (size,) = _whole(n, "repetition", "repetition:4, in words", ",")
    if not 1 <= size <= 100:
        raise HoneError(f"repetition:{n}: write a number of words from 1 to 100, as in repetition:4")

    def repetition_reward(completion: str) -> float:
        return 1.0 - repetition([units(completion[-MAX_COMPLETION:])], n=size)

    return repetition_reward
