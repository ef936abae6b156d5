"""The report for a person: one row in colour, then the table."""

from rich.console import Console
from rich.table import Table
from rich.text import Text

from hone.check.finding import Report, Row

STYLES = {"pass": "green", "warn": "yellow", "fail": "bold red", "skip": "dim"}
GRAVEST = ("fail", "warn", "pass")
TRAINED = "black on green"
LONGEST = 1200  # characters of the row that are shown


def show(report: Report, console: Console) -> None:
    """Print the row and the table."""
    if report.row.pieces:
        colour = console.color_system is not None and not console.no_color
        how = "in colour" if colour else "between [[ and ]]"
        console.print(f"{report.row.note}; what is trained on is {how}:", markup=False, highlight=False)
        console.print(coloured(report.row, colour=colour), soft_wrap=True)
        console.print()
    console.print(table(report))
    if names := [f.name for f in report.findings if f.verdict == "skip"]:
        line = f"skipped, as they do not apply here (--json says why): {', '.join(names)}"
        console.print(Text(line, style=STYLES["skip"]), soft_wrap=True)
    counts = {verdict: sum(f.verdict == verdict for f in report.findings) for verdict in STYLES}
    console.print(", ".join(f"{n} {verdict}" for verdict, n in counts.items()), highlight=False)


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


def table(report: Report) -> Table:
    """One finding a line, the gravest first; what was skipped is left out."""
    lines = Table(title=f"hone check {report.recipe}", title_justify="left", pad_edge=False)
    lines.add_column("check", no_wrap=True)
    lines.add_column("verdict", no_wrap=True)
    lines.add_column("seen", overflow="fold", ratio=3)
    told = [f for f in report.findings if f.verdict in GRAVEST]
    if any(f.remedy for f in told):
        lines.add_column("remedy", overflow="fold", ratio=2)
    for f in sorted(told, key=lambda f: GRAVEST.index(f.verdict)):
        cells = [f.name, Text(f.verdict, style=STYLES[f.verdict]), Text(f.seen), Text(f.remedy)]
        lines.add_row(*cells[: len(lines.columns)])
    return lines
