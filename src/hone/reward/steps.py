"""Where the steps of a solution end, in its text and in its tokens. One rule for labels, training, rewards and search.

A step ends with the separator. What is blank between two separators belongs to the step before it, blanks at the
beginning to the first step, and what follows the last separator is a step of its own.
"""

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from hone.data.text.detokenizer import Decode, Detokenizer
from hone.errors import HoneError
from hone.types import Rollout


def split_steps(text: str, separator: str = "\n") -> list[str]:
    """The steps, which joined are the text.

    >>> split_steps("a = 1\\n\\nb = 2\\nc")
    ['a = 1\\n\\n', 'b = 2\\n', 'c']
    """
    if not separator:
        raise HoneError("the separator of steps is empty: give the text that ends a step, as a line break")
    *closed, rest = text.split(separator)
    steps = list[str]()
    for piece in [*(piece + separator for piece in closed), *([rest] if rest else [])]:
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
    """Finds the last token of each step in what the policy wrote; stop_ids are no part of the last step."""

    decode: Decode
    stop_ids: Collection[int] = ()
    separator: str = "\n"
    _token_texts: dict[int, str] = field(default_factory=dict[int, str], repr=False, compare=False)

    def ends(self, rollout: Rollout) -> list[int]:
        """The index of each step's last token. A token that reaches into the next step belongs to that one."""
        return self.cut(rollout)[0]

    def cut(self, rollout: Rollout) -> tuple[list[int], list[str]]:
        """The same, and the text of each step, which joined are what was written."""
        places = [i for i, on in enumerate(rollout.mask) if on]
        while places and rollout.tokens[places[-1]] in self.stop_ids:
            places.pop()
        if not places:
            return [], []
        written = [rollout.tokens[i] for i in places]
        text = self.decode(written)
        reach, last, boundary, token = self._text_ends(written, text), list[int](), 0, -1
        for step in split_steps(text, self.separator)[:-1]:
            boundary += len(step)
            before = token
            # A token that adds no text at a boundary is the first of a character of several tokens: it belongs to the
            # next step.
            while (token < 0 or reach[token] < boundary) and token + 1 < len(reach) and reach[token + 1] <= boundary:
                token += 1
            last += [token] if token > before else []
        if not last or last[-1] < len(places) - 1:
            last.append(len(places) - 1)
        marks = [0, *(reach[i] for i in last[:-1]), len(text)]
        return [places[i] for i in last], [text[a:b] for a, b in itertools.pairwise(marks)]

    def _text_ends(self, written: Sequence[int], text: str) -> list[int]:
        """`text_ends`, from each token's own text where those make up the whole."""
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


def named_separator(text: str) -> str:
    r"""A separator as it is written in a shell or a file: \n and \t stand for the line break and the tab."""
    return text.replace("\\n", "\n").replace("\\t", "\t")
