"""What one check found, and the report of all of them."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Verdict = Literal["pass", "warn", "fail", "skip"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line of the table; a skipped check says in `seen` why it does not apply."""

    name: str = ""  # the suite fills it in
    seen: str
    verdict: Verdict
    remedy: str = ""  # what to do about a warning or a failure


def passed(seen: str) -> Finding:
    return Finding(seen=seen, verdict="pass")


def skipped(why: str) -> Finding:
    return Finding(seen=why, verdict="skip")


def warned(seen: str, remedy: str) -> Finding:
    return Finding(seen=seen, verdict="warn", remedy=remedy)


def failed(seen: str, remedy: str) -> Finding:
    return Finding(seen=seen, verdict="fail", remedy=remedy)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row as it will be trained: its text cut where training starts and stops."""

    pieces: Sequence[tuple[str, bool]] = ()  # text, and whether it is trained on
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All findings of one recipe."""

    recipe: str
    findings: Sequence[Finding]
    row: Row = field(default_factory=Row)

    @property
    def failures(self) -> list[Finding]:
        return [f for f in self.findings if f.verdict == "fail"]

    @property
    def ok(self) -> bool:
        return not self.failures

    def plain(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "recipe": self.recipe,
            "ok": self.ok,
            "findings": [asdict(f) for f in self.findings],
            "row": {
                "pieces": [{"text": text, "trained": trained} for text, trained in self.row.pieces],
                "note": self.row.note,
            },
        }
