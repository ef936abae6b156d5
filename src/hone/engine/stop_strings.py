"""Stop strings are looked for while tokens are written, at a cost that is linear in the text.

A stop string may begin in one token and end in another, and a character may take several tokens.
"""

from collections.abc import Sequence

from hone.data.text.detokenizer import Decode, Detokenizer


class Automaton:
    """Finds one word in a text that comes a character at a time (Knuth, Morris and Pratt)."""

    def __init__(self, word: str) -> None:
        self.word, self.state = word, 0  # state: characters of the word with which the text ends
        self.failure = [0] * len(word)  # length of the longest beginning of the word that also ends word[: i + 1]
        k = 0
        for i in range(1, len(word)):
            while k and word[i] != word[k]:
                k = self.failure[k - 1]
            k += word[i] == word[k]
            self.failure[i] = k

    def push(self, character: str) -> bool:
        """Whether the word ends with this character."""
        k, word = self.state, self.word
        if k == len(word):
            k = self.failure[-1]
        while k and character != word[k]:
            k = self.failure[k - 1]
        self.state = k + (character == word[k])
        return self.state == len(word)


class StopFinder:
    """Looks for stop strings in one completion. If a token completes several, the one that begins first counts."""

    def __init__(self, stops: Sequence[str], decode: Decode) -> None:
        self.detokenizer = Detokenizer(decode)
        self.automata = [Automaton(stop) for stop in stops]
        self.pieces: list[str] = []
        self.length = 0  # characters in them
        self.ends: list[int] = []  # where each token's text ends, for tokens whose text is final
        self.tokens = 0
        self.safe = 0  # how many tokens end before any stop string that was found or is still possible

    def push(self, token: int) -> bool:
        """Whether this token completes a stop string."""
        found = self._search(self.detokenizer.push(token))
        self.tokens += 1
        if found is not None:
            self.pieces = ["".join(self.pieces)[:found]]
            return True
        if not self.detokenizer.incomplete:  # all tokens of a character end where it ends
            self.ends += [self.length] * (self.tokens - len(self.ends))
        certain = self.length - max(automaton.state for automaton in self.automata)
        while self.safe < len(self.ends) and self.ends[self.safe] <= certain:
            self.safe += 1
        return False

    def text(self) -> str:
        """The completion so far, or up to the stop string that was found."""
        return "".join(self.pieces)

    def close(self) -> str:
        """The whole completion, where no stop string ended it."""
        return self.text() + self.detokenizer.end()

    def _search(self, piece: str) -> int | None:
        """Add a piece of text. Returns where the first stop string that it completes begins."""
        found: int | None = None
        for automaton in self.automata:
            for at, character in enumerate(piece, start=self.length + 1):
                if automaton.push(character):
                    begin = at - len(automaton.word)
                    found = begin if found is None else min(found, begin)
                    break
        self.pieces.append(piece)
        self.length += len(piece)
        return found
