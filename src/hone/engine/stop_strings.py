"""Stop strings, looked for as the tokens come: they may begin in one token and end in another, or inside a character
that takes several tokens. The cost is linear in what is written."""

from collections.abc import Callable, Sequence

Decode = Callable[[list[int]], str]

UNFINISHED = "\ufffd"  # what a tokenizer shows for bytes that are no character, perhaps not yet
LOOK_BACK = 4  # tokens read again before a later one: a tokenizer may look back, a character has at most 4 bytes


class Reader:
    """Text of a growing list of tokens: each piece once, when no later token can change it."""

    def __init__(self, decode: Decode) -> None:
        self.decode = decode
        self.window: list[int] = []  # the tokens at the end, and some before them
        self.given = 0  # characters of the window's text that were given out
        self.open = False  # the text ends inside a character

    def push(self, token: int) -> str:
        """What the token settles."""
        self.window.append(token)
        text = self.decode(self.window)
        settled = len(text.rstrip(UNFINISHED))
        self.open = settled < len(text)
        keep = 0
        if self.open and len(self.window) >= 4 * LOOK_BACK:  # no character is this long: it is rubbish
            settled, keep = len(self.decode(self.window[:-LOOK_BACK])), LOOK_BACK
        piece = text[self.given : settled]
        self.given += len(piece)
        if keep or (len(self.window) >= 2 * LOOK_BACK and not self.open):
            self._shorten(keep)
        return piece

    def rest(self) -> str:
        """What is left when nothing follows."""
        return self.decode(self.window)[self.given :] if self.window else ""

    def _shorten(self, keep: int) -> None:
        """Some tokens to look back on, and the last `keep`, whose text was not given yet."""
        self.window = self.window[-LOOK_BACK - keep :]
        self.given = len(self.decode(self.window[:LOOK_BACK]))


class Automaton:
    """How much of one string the text ends with, a character at a time (Knuth, Morris and Pratt)."""

    def __init__(self, word: str) -> None:
        self.word, self.state = word, 0
        self.back = [0] * len(word)  # the longest beginning of word that also ends word[: i + 1]
        k = 0
        for i in range(1, len(word)):
            while k and word[i] != word[k]:
                k = self.back[k - 1]
            k += word[i] == word[k]
            self.back[i] = k

    def push(self, character: str) -> bool:
        """Whether the word ends here."""
        k, word = self.state, self.word
        if k == len(word):
            k = self.back[-1]
        while k and character != word[k]:
            k = self.back[k - 1]
        self.state = k + (character == word[k])
        return self.state == len(word)


class StopFinder:
    """Watches one completion. Of several stop strings in it, the one that begins first counts."""

    def __init__(self, stops: Sequence[str], decode: Decode) -> None:
        self.reader = Reader(decode)
        self.automata = [Automaton(stop) for stop in stops]
        self.pieces: list[str] = []
        self.length = 0  # characters in them
        self.ends: list[int] = []  # where each token's text ends, for those whose text is settled
        self.tokens = 0
        self.safe = 0  # so many tokens are before any stop string, found or still possible

    def push(self, token: int) -> bool:
        """Whether this token completes a stop string."""
        found = self._search(self.reader.push(token))
        self.tokens += 1
        if found is not None:
            self.pieces = ["".join(self.pieces)[:found]]
            return True
        if not self.reader.open:  # tokens that make up a character end where it ends
            self.ends += [self.length] * (self.tokens - len(self.ends))
        hold = self.length - max(automaton.state for automaton in self.automata)
        while self.safe < len(self.ends) and self.ends[self.safe] <= hold:
            self.safe += 1
        return False

    def text(self) -> str:
        """The completion, up to the stop string where one was found."""
        return "".join(self.pieces)

    def close(self) -> str:
        """The completion that nothing follows and no stop string ended."""
        return self.text() + self.reader.rest()

    def _search(self, piece: str) -> int | None:
        """Add a piece; where the first stop string in it begins."""
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
