"""Text of tokens as they are written: a piece at a time, no half of a character, and nothing is taken back."""

from collections.abc import Callable, Sequence

Decode = Callable[[list[int]], str]

UNFINISHED = "\ufffd"  # what a tokenizer shows for bytes that are no character, or not yet
UNFINISHED_BYTES = 3  # of a character that may still be completed
LOOK_BACK = 4  # tokens decoded again with a new one: tokenizers look at neighbours, a character has 4 bytes at most


class Detokenizer:
    """Decodes tokens as they are written. It gives each piece of text once no later token can change it.

    It decodes a window of the last tokens again with each new one. The window begins where a character does: byte
    fallback turns every byte beside half a character into UNFINISHED. before: tokens that the text continues.
    """

    def __init__(self, decode: Decode, before: Sequence[int] = ()) -> None:
        self.decode = decode
        self.window, known = _last_characters(decode, before)
        self.emitted = len(known.rstrip(UNFINISHED))  # characters of the window's text that are known already
        self.incomplete = False  # whether the text ends inside a character
        self.boundaries: list[int] = []  # how many tokens of the window make up whole characters
        self.waiting = 0  # tokens since the text was complete or grew

    def push(self, token: int) -> str:
        """The text that is final with this token."""
        self.window.append(token)
        text = self.decode(self.window)
        final = len(text.rstrip(UNFINISHED))
        self.incomplete = final < len(text)
        if not self.incomplete:
            self.boundaries.append(len(self.window))
        self.waiting = self.waiting + 1 if self.incomplete and final <= self.emitted else 0
        if self.waiting > 2 * LOOK_BACK:  # no character is so long: these bytes are no text
            final = max(final, len(text) - UNFINISHED_BYTES)
        piece = text[self.emitted : final]
        self.emitted += len(piece)
        if len(self.window) >= 2 * LOOK_BACK:
            self._cut_window(text)
        return piece

    def end(self) -> str:
        """The remaining text when no token follows."""
        piece = self.decode(self.window)[self.emitted :] if self.window else ""
        self.emitted += len(piece)
        return piece

    def _cut_window(self, text: str) -> None:
        """Keep some tokens to look back on, from the beginning of a character where there is one."""
        starts = [count for count in self.boundaries if count <= len(self.window) - LOOK_BACK]
        too_long = len(self.window) >= 4 * LOOK_BACK
        start = starts[-1] if starts and not self.incomplete else len(self.window) - 2 * LOOK_BACK if too_long else 0
        window = self.window[start:]
        emitted = len(self.decode(window)) - (len(text) - self.emitted)
        if start and (emitted > 0 or too_long):  # a tokenizer may drop the blank that begins a text
            self.window, self.emitted = window, max(emitted, 0)
            self.boundaries = [count - start for count in self.boundaries if count > start]


def _last_characters(decode: Decode, tokens: Sequence[int]) -> tuple[list[int], str]:
    """The last tokens, from the beginning of a character, and their text without half a character at the end."""
    best = list[int](), ""
    for count in range(2 * LOOK_BACK, 3 * LOOK_BACK) if tokens else ():
        window = list(tokens[-count:])
        for end in range(len(window), max(-1, len(window) - LOOK_BACK), -1):
            text = decode(window[:end])
            if not best[0] or text.count(UNFINISHED) < best[1].count(UNFINISHED):
                best = window, text
    return best
