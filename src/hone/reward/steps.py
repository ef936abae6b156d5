"""Where the steps of a solution end, in its text and in its tokens: one rule for labels, training, rewards and search.

A step ends with the separator. Blank text between two separators belongs to the step before it. Blank text at the
beginning belongs to the first step. Text after the last separator is a step of its own.
"""

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from hone.data.text.detokenizer import Decode, Detokenizer
from hone.errors import HoneError
from hone.types import Rollout


def split_steps(text: str, separator: str = "\n") -> list[str]:
    """The steps. Joined they are the text again.

    >>> split_steps("a = 1\\n\\nb = 2\\nc")
    ['a = 1\\n\\n', 'b = 2\\n', 'c']
    """
    if not separator:
        raise HoneError("the separator of steps is empty: give the text that ends a step, as a line break")
    *ended, rest = text.split(separator)
    steps = list[str]()
    for piece in [*(piece + separator for piece in ended), *([rest] if rest else [])]:
        if steps and (not piece.strip() or not steps[-1].strip()):
            steps[-1] += piece
        else:
            steps.append(piece)
    return steps


def text_ends(tokens: Sequence[int], decode: Decode) -> list[int]:
    """After each token, how many characters of the text no later token can change; linear in the tokens."""
    detokenizer = Detokenizer(decode)
    return list(itertools.accumulate(len(detokenizer.push(token)) for token in tokens))


@dataclass(frozen=True, kw_only=True)
class Stepper:
    """Finds the last token of each step in what the policy wrote. Stop tokens at the end belong to no step."""

    decode: Decode
    stop_ids: Collection[int] = ()
    separator: str = "\n"
    _token_texts: dict[int, str] = field(default_factory=dict[int, str], repr=False, compare=False)

    def ends(self, rollout: Rollout) -> list[int]:
        """The index of each step's last token. A token with characters of two steps belongs to the second."""
        return self.ends_and_texts(rollout)[0]

    def ends_and_texts(self, rollout: Rollout) -> tuple[list[int], list[str]]:
        """The index of each step's last token, and the text of each step. The texts joined are what was written."""
        positions = [i for i, on in enumerate(rollout.mask) if on]
        while positions and rollout.tokens[positions[-1]] in self.stop_ids:
            positions.pop()
        if not positions:
            return [], []
        written = [rollout.tokens[i] for i in positions]
        text = self.decode(written)
        ends, last, boundary, token = self._text_ends(written, text), list[int](), 0, -1
        for step in split_steps(text, self.separator)[:-1]:
            boundary += len(step)
            before = token
            # A token that adds no text at a boundary is the first of a character of several tokens. It belongs to the
            # next step.
            while (token < 0 or ends[token] < boundary) and token + 1 < len(ends) and ends[token + 1] <= boundary:
                token += 1
            last += [token] if token > before else []
        if not last or last[-1] < len(positions) - 1:
            last.append(len(positions) - 1)
        borders = [0, *(ends[i] for i in last[:-1]), len(text)]
        return [positions[i] for i in last], [text[a:b] for a, b in itertools.pairwise(borders)]

    def _text_ends(self, written: Sequence[int], text: str) -> list[int]:
        """As `text_ends`, but from the texts of single tokens where these joined are the text: that is faster."""
        pieces = list[str]()
        for token in written:
            if token not in self._token_texts:
                self._token_texts[token] = self.decode([token])
            pieces.append(self._token_texts[token])
        if "".join(pieces) != text:
            return text_ends(written, self.decode)
        total, ends = 0, list[int]()
        for piece in pieces:
            total += len(piece)
            ends.append(total)
        return ends


def read_separator(text: str) -> str:
    r"""The separator that a shell or a file means: \n stands for a line break, \t for a tab."""
    return text.replace("\\n", "\n").replace("\\t", "\t")
