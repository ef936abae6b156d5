"""What each check found, the report of all of them, and that report printed for a person: what matters first."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

Verdict = Literal["pass", "warn", "fail", "skip"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line of the table; a skipped check says in `seen` why it does not apply."""

    name: str = ""  # the suite fills it in
    seen: str
    verdict: Verdict
    remedy: str = ""  # what to do about a warning or a failure


def pass_finding(seen: str) -> Finding:
    return Finding(seen=seen, verdict="pass")


def skip_finding(why: str) -> Finding:
    return Finding(seen=why, verdict="skip")


def warn_finding(seen: str, remedy: str) -> Finding:
    return Finding(seen=seen, verdict="warn", remedy=remedy)


def fail_finding(seen: str, remedy: str) -> Finding:
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
        """The report as JSON."""
        return {
            "recipe": self.recipe,
            "ok": self.ok,
            "findings": [asdict(f) for f in self.findings],
            "row": {
                "pieces": [{"text": text, "trained": trained} for text, trained in self.row.pieces],
                "note": self.row.note,
            },
        }


STYLES = {"pass": "green", "warn": "yellow", "fail": "bold red", "skip": "dim"}
TRAINED = "black on green"
LONGEST = 1200  # characters of the row that are shown


def show(report: Report, console: Console) -> None:
    """The verdict, what failed or is doubtful with its remedy, what passed, and a row as it will be trained."""
    console.print(verdict(report))
    console.print()
    grave = [f for verdict in ("fail", "warn") for f in report.findings if f.verdict == verdict]
    if grave:
        console.print(table(f"hone check {report.recipe}: put right", grave))
    if fine := [f for f in report.findings if f.verdict == "pass"]:
        console.print(table(f"hone check {report.recipe}: passed", fine))
    if report.row.pieces:
        colour = console.color_system is not None and not console.no_color
        how = "in colour" if colour else "between [[ and ]]"
        console.print(f"\n{report.row.note}; what is trained on is {how}:", markup=False, highlight=False)
        console.print(coloured(report.row, colour=colour), soft_wrap=True)
        console.print()
    if names := [f.name for f in report.findings if f.verdict == "skip"]:
        line = f"skipped, as they do not apply here (--json says why): {', '.join(names)}"
        console.print(Text(line, style=STYLES["skip"]), soft_wrap=True)
    counts = {verdict: sum(f.verdict == verdict for f in report.findings) for verdict in STYLES}
    console.print(f"{', '.join(f'{n} {verdict}' for verdict, n in counts.items())}", highlight=False)


def verdict(report: Report) -> Text:
    """Whether the recipe is fit to run, in one line."""
    failed = [f.name for f in report.findings if f.verdict == "fail"]
    doubtful = [f.name for f in report.findings if f.verdict == "warn"]
    if failed:
        return Text(f"FAIL: do not run {report.recipe} yet: {', '.join(failed)}", style=STYLES["fail"])
    if doubtful:
        return Text(f"WARN: {report.recipe} can run; look at {', '.join(doubtful)}", style=STYLES["warn"])
    return Text(f"PASS: {report.recipe} is ready to run", style=STYLES["pass"])


def coloured(row: Row, *, colour: bool) -> Text:
    """Trained text on a ground of its own, or in double brackets where there is no colour; white space made visible."""
    text = Text()
    for piece, trained in row.pieces:
        seen = piece.replace("\n", "\u21b5\n")
        if colour:
            text.append(seen, style=TRAINED if trained else "")
        else:
            text.append(f"[[{seen}]]" if trained else seen)
    if len(text) > LONGEST:
        text = Text.assemble(text[: LONGEST // 2], " ... ", text[-LONGEST // 2 :])
    return text


def table(title: str, findings: Sequence[Finding]) -> Table:
    """One finding a line, with a column of remedies where there are any."""
    lines = Table(title=title, title_justify="left", pad_edge=False)
    lines.add_column("check", no_wrap=True)
    lines.add_column("verdict", no_wrap=True)
    lines.add_column("seen", overflow="fold", ratio=3)
    if any(f.remedy for f in findings):
        lines.add_column("remedy", overflow="fold", ratio=2)
    for f in findings:
        cells = [f.name, Text(f.verdict, style=STYLES[f.verdict]), Text(f.seen), Text(f.remedy)]
        lines.add_row(*cells[: len(lines.columns)])
    return lines
