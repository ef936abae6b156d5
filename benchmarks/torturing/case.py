"""What was tried and what came of it: a line of the page."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.torturing.victim import Told
from benchmarks.torturing.world import World


@dataclass(slots=True)
class Case:
    """One way to hurt a run."""

    name: str
    tried: int = 0
    ends: str = ""  # how it ends, in words of the run or of ours
    wrong: list[str] = field(default_factory=list[str])

    def expect(self, holds: bool, what: str) -> None:
        """Note what does not hold."""
        if not holds:
            self.wrong.append(what)

    def ended(self, told: Told, code: int, words: str = "") -> None:
        """One attempt: this exit code, and these words on its last line."""
        self.tried += 1
        self.expect(told.code == code, f"ended with {told.code} instead of {code}: {told.said.strip()[-400:]}")
        self.expect(words in told.words, f"said {told.words!r} instead of {words!r}")
        self.expect(not told.hung, "it hung")


Try = Callable[[World, Path], Case]
