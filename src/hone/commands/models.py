"""hone fetch, inspect: download a model, and show the parts of a model or adapter."""

import argparse
import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

from hone.commands.command import Command
from hone.log.progress import say

if TYPE_CHECKING:
    from rich.table import Table

    from hone.model.inspect import Inspection


WIDE = 120  # columns if there is no terminal


def _fetch_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="smollm2-135m, OWNER/MODEL on the Hugging Face Hub, or FILE.gguf")
    parser.add_argument("--to", metavar="FOLDER", help="write it there instead of the cache")
    parser.add_argument("--optional", action="store_true", help="say why and go on where it cannot be downloaded")


def _fetch(arguments: argparse.Namespace) -> None:
    from hone.model.formats import fetch, hub

    try:
        print(fetch.fetch(arguments.name, to=arguments.to, note=say))
    except hub.Unreachable as error:
        if not arguments.optional:
            raise
        say(f"not fetched: {error}")


def _inspect_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a model folder, an adapter folder (PEFT), or a fetched name")
    parser.add_argument("--base", default="", metavar="MODEL", help="compare the weights with this model's")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the tables")


def _inspect(arguments: argparse.Namespace) -> None:
    from rich.console import Console

    from hone.model.inspect import inspect

    report = inspect(arguments.model, arguments.base)
    if arguments.json:
        totals = {"numbers": sum(k.numbers for k in report.kinds), "update_norm": report.norm}
        print(json.dumps(asdict(report) | totals, indent=1))
        return
    console = Console(width=None if sys.stdout.isatty() else WIDE)
    console.print(_kinds(report))
    if report.changes:
        console.print(_changes(report))
        console.print(f"norm of the whole update {report.norm:.4g}", highlight=False)
    for note in report.notes:
        console.print(note, markup=False, highlight=False)


def _kinds(report: "Inspection") -> "Table":
    lines = _table(report.model, ("parameters", "tensors", "numbers", "MB", "dtype"))
    for k in report.kinds:
        size = "?" if k.bytes is None else f"{k.bytes / 1e6:.1f}"
        lines.add_row(k.kind, str(k.tensors), f"{k.numbers:,}", size, ", ".join(k.dtypes))
    sizes = [k.bytes for k in report.kinds if k.bytes is not None]
    tensors, numbers = sum(k.tensors for k in report.kinds), sum(k.numbers for k in report.kinds)
    lines.add_row("all", str(tensors), f"{numbers:,}", f"{sum(sizes) / 1e6:.1f}", "", style="bold")
    return lines


def _changes(report: "Inspection") -> "Table":
    lines = _table(
        f"update over {report.base or 'its base'}",
        ("weight", "shape", "norm", "relative", "effective rank", "rank of 90 %"),
    )
    for c in report.changes:
        u = c.update
        lines.add_row(
            c.name,
            " x ".join(map(str, c.shape)),
            f"{u.norm:.4g}",
            "-" if u.relative is None else f"{u.relative:.2%}",
            "-" if u.effective_rank is None else f"{u.effective_rank:.2f}",
            "-" if u.energy_rank is None else str(u.energy_rank),
        )
    return lines


def _table(title: str, columns: tuple[str, ...]) -> "Table":
    from rich.box import SIMPLE
    from rich.table import Table
    from rich.text import Text

    lines = Table(title=Text(title), title_justify="left", box=SIMPLE, pad_edge=False)
    lines.add_column(columns[0], overflow="fold")
    for column in columns[1:]:
        lines.add_column(column, justify="left" if column in ("shape", "dtype") else "right", no_wrap=True)
    return lines


COMMANDS = (
    Command(
        name="fetch",
        help="bring a model into the local cache",
        options=_fetch_options,
        run=_fetch,
        examples=("hone fetch smollm2-135m", "hone fetch FILE.gguf --to FOLDER"),
    ),
    Command(
        name="inspect",
        help="what a model or adapter is made of, and its update over a base",
        options=_inspect_options,
        run=_inspect,
        examples=("hone inspect runs/demo/grpo/model --base runs/demo/sft/model",),
    ),
)
