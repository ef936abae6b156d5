"""Pages as lists of blocks to run. Comments before a block, which a reader of the page does not see, say what to do:

    <!-- run -->              run it; of a console block the lines after `$ `, the others are what they print
    <!-- run: exit 2 -->      the same, and the last command ends with this code
    <!-- file: NAME -->       write it to this file
    <!-- background -->       start it, wait for what the page shows, and leave it running to the end of the page
    <!-- slow: REASON -->     run it by `make docs-test-slow` only, for this reason
    <!-- skip: REASON -->     never run it here, for this reason

Behind a block `<!-- holds: pass@1 > 0.6 -->` is a fact about the number that the output has behind this name.
`<!-- after: tutorial/1-first-run.md -->` at the top of a page names the page whose files it uses.
"""

import re
from dataclasses import dataclass
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
KINDS = ("run", "file", "background", "slow", "skip")
FENCE = re.compile(
    r"(?ms)^(?:<!-- (?P<kind>\w+)(?:: (?P<what>[^\n]*?))? -->\n)?```(?P<language>\w*)\n(?P<text>.*?)^```\n"
    r"(?P<facts>(?:<!-- holds: [^\n]* -->\n)*)"
)


@dataclass(frozen=True)
class Command:
    """A line that a reader types, and the lines that the page shows below it."""

    line: str
    shown: tuple[str, ...]


@dataclass(frozen=True)
class Block:
    """A fenced block and what is to be done with it."""

    page: str
    number: int
    kind: str  # one of KINDS; "": the page does not say
    what: str
    language: str
    text: str
    facts: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.page} block {self.number}"

    @property
    def code(self) -> int:
        """What the last command ends with."""
        return int(self.what.removeprefix("exit ")) if self.what.startswith("exit ") else 0

    def commands(self) -> list[Command]:
        """The commands of a console block."""
        found: list[tuple[str, list[str]]] = []
        typing = False
        for line in self.text.splitlines():
            if line.startswith("$ "):
                found.append((line[2:], []))
            elif typing:
                found[-1] = (f"{found[-1][0]}\n{line}", [])
            elif found:
                found[-1][1].append(line)
            typing = line.endswith("\\") and (line.startswith("$ ") or typing)
        return [Command(line, tuple(shown)) for line, shown in found]


def pages() -> list[str]:
    """The tutorial's pages, then the how-to pages."""
    found = sorted(DOCS.glob("tutorial/*.md")) + sorted(DOCS.glob("howto/*.md"))
    return [page.relative_to(DOCS).as_posix() for page in found]


def blocks(page: str, text: str | None = None) -> list[Block]:
    """The blocks of a page, in order."""
    text = (DOCS / page).read_text(encoding="utf-8") if text is None else text
    return [
        Block(
            page=page,
            number=number,
            kind=match["kind"] or "",
            what=match["what"] or "",
            language=match["language"],
            text=match["text"],
            facts=tuple(re.findall(r"<!-- holds: (.*?) -->", match["facts"])),
        )
        for number, match in enumerate(FENCE.finditer(text), 1)
    ]


def before(page: str) -> str:
    """The page whose files this one uses, "" for none."""
    found = re.search(r"<!-- after: (\S+) -->", (DOCS / page).read_text(encoding="utf-8"))
    return found[1] if found else ""


def plain(line: str) -> str:
    """A line without what differs from run to run: numbers, bars and the width of columns.

    >>> plain("sort_sft  12/600 ━━──  loss  2.310   55k tok/s  0:03 left")
    'sort_sft #/# loss # # tok/s # left'
    """
    line = re.sub(r"[━─]+", " ", line)
    line = re.sub(r"-?\d[\d.,:]*(?:e[-+]?\d+)?[kM]?\b|-:--", "#", line)
    return " ".join(line.split())


def missing(shown: tuple[str, ...], printed: str) -> str:
    """The first shown line that was not printed, "" where all were. `...` stands for any lines, or the rest of one.

    Each printed line counts once. Their order is free: stdout and stderr come in another order from a pipe.
    """
    lines = [plain(line) for line in printed.splitlines()]
    for line in shown:
        wanted, cut, _ = plain(line).partition("...")
        found = [other for other in lines if (other.startswith(wanted) if cut else other == wanted)]
        if wanted and not found:
            return line
        if wanted:
            lines.remove(found[0])
    return ""


def broken(fact: str, printed: str) -> str:
    """Why a fact about the output does not hold, "" where it does.

    >>> broken("pass@1 > 0.6", "pass@1   0.25"), broken("loss < 1", "loss 0.5")
    ('pass@1 is 0.25', '')
    """
    name, sign, bound = fact.rsplit(" ", 2)
    values = re.findall(rf"(?<![\w/]){re.escape(name)}[\s:=]+(-?[\d.]+)", printed)
    if not values:
        return f"there is no {name}"
    value = float(values[-1].rstrip("."))
    held = {">": value > float(bound), "<": value < float(bound), "=": value == float(bound)}[sign]
    return "" if held else f"{name} is {values[-1]}"
