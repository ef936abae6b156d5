"""What a seeded fault is: a small patch, what it mimics, where it lives, and who must notice."""

from dataclasses import dataclass
from typing import Literal

Where = Literal["recipe", "data", "template", "reward", "sampler", "learner", "loop", "resume", "algorithm", "model"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    """In one file the old text, which must be there exactly once, becomes the new one; old "" replaces all of it.

    Of the source, `file` is "" where one file only has the text, for code is moved more often than changed. Else it is
    that file, or a folder around it.
    """

    file: str
    old: str
    new: str

    def apply(self, text: str) -> str:
        """The patched text, or ValueError where the catalogue no longer fits the file."""
        if not self.old:
            return self.new
        if text.count(self.old) != 1:
            raise ValueError(f"{self.file} has {text.count(self.old)} times, not once: {self.old!r}")
        return text.replace(self.old, self.new)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """How `hone check` sees a fault: by a finding that warns or fails, or by refusing with a line that says so."""

    recipe: str = "grpo"  # a function of the project's recipes.py
    settings: tuple[str, ...] = ()  # of the recipe; the project without the fault must pass with the same ones
    finding: str = ""
    refusal: str = ""  # words of the one line it refuses with


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Caught when a test goes red, or when `hone check` sees it; where both are named, both must."""

    name: str
    mimics: str  # a row of the list of pains by its number, or a line of the issue
    where: Where
    source: tuple[Edit, ...] = ()  # of files below src/hone
    tests: tuple[str, ...] = ()  # files below tests/, or one test of such: green without the patch, red with it
    project: tuple[Edit, ...] = ()  # of files of the user's project
    settings: tuple[str, ...] = ()  # a.b=value that are the fault
    sight: Sight | None = None


def fault(
    name: str, mimics: str, where: Where, file: str, /, *, old: str, new: str, tests: str, more: tuple[Edit, ...] = ()
) -> Fault:
    """A fault of Hone's own source, in the form of a table's row; `tests` are separated by spaces."""
    first = Edit(file=file, old=old, new=new)
    return Fault(name=name, mimics=mimics, where=where, source=(first, *more), tests=tuple(tests.split()))
