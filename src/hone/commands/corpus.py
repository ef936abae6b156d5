"""hone corpus clean, overlap: a pre-training corpus without copies, junk and evaluation items."""

import argparse
import json
import os
from typing import Any

from hone.commands.command import Command, add_actions, add_command, run_action
from hone.errors import HoneError
from hone.log.progress import say


def _options(parser: argparse.ArgumentParser) -> None:
    actions = add_actions(parser)
    clean = add_command(
        actions,
        "clean",
        "filter, remove copies, report",
        notes="Killed, the same command goes on where it was.",
        examples=("hone corpus clean TEXTS --out corpus --eval gsm8k --drop-overlap",),
    )
    _shared(clean)
    _clean_options(clean)
    clean.set_defaults(action=_clean)
    overlap = add_command(
        actions,
        "overlap",
        "compare a corpus as it is with evaluation sets",
        examples=("hone corpus overlap TEXTS --eval gsm8k --json",),
    )
    _shared(overlap)
    overlap.add_argument("--json", action="store_true", help="the whole result as JSON")
    overlap.set_defaults(action=_overlap)


def _shared(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("sources", nargs="+", metavar="IN", help="a .jsonl or .txt file (or .gz of it), or a folder")
    parser.add_argument(
        "--column", default="text", metavar="NAME", help="the text's column in JSON lines (default: text)"
    )
    parser.add_argument(
        "--split", default="blank", metavar="HOW", help="documents of a .txt file: blank (lines between), line, file"
    )
    parser.add_argument(
        "--eval", nargs="+", default=[], metavar="EVAL", help="files (.jsonl, .json, .txt) or names (gsm8k)"
    )
    parser.add_argument("--eval-field", nargs="+", default=[], metavar="COLUMN", help="default: every text of a row")
    parser.add_argument("--ngram", type=int, default=13, metavar="N", help="words that must agree (default: 13)")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, metavar="W", help="default: every core")


def _clean_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", required=True, metavar="FOLDER", help="empty, or begun by the same command")
    parser.add_argument("--languages", default="en", metavar="A,B", help="to keep (default: en); off: all")
    parser.add_argument(
        "--rule", action="append", default=[], metavar="NAME=LIMIT", help="a quality rule; LIMIT or off"
    )
    parser.add_argument("--no-quality", action="store_true", help="switch every quality rule off")
    parser.add_argument(
        "--toxicity", default="0.8", metavar="P", help="most probability allowed (default: 0.8), or off"
    )
    parser.add_argument("--near", default="0.8", metavar="J", help="similarity of near copies (default: 0.8), or off")
    parser.add_argument("--keep-copies", action="store_true", help="keep exact copies")
    parser.add_argument("--drop-overlap", action="store_true", help="drop documents that share words with --eval")
    parser.add_argument("--vocab", type=int, metavar="N", help="train a BPE tokenizer on what is kept")
    parser.add_argument("--strict", action="store_true", help="stop at the first record that cannot be read")
    parser.add_argument("--restart", action="store_true", help="throw away what was begun in FOLDER")


def _number(name: str, text: str) -> float | None:
    if text == "off":
        return None
    try:
        return float(text)
    except ValueError as error:
        raise HoneError(f"{name} is {text!r}: give a number, or off") from error


def _rules(arguments: argparse.Namespace) -> dict[str, float | None]:
    from hone.data.corpus.quality import RULES

    limits: dict[str, float | None] = {rule.name: None if arguments.no_quality else rule.limit for rule in RULES}
    for text in arguments.rule:
        name, equals, limit = text.partition("=")
        if not equals or name not in limits:
            raise HoneError(f"no rule {text!r}: write NAME=LIMIT or NAME=off, with one of {', '.join(limits)}")
        limits[name] = _number(name, limit)
    return limits


def _input_settings(arguments: argparse.Namespace) -> dict[str, Any]:
    return {
        "column": arguments.column,
        "split": arguments.split,
        "evals": tuple(arguments.eval),
        "eval_fields": tuple(arguments.eval_field),
        "ngram": arguments.ngram,
    }


def _clean(arguments: argparse.Namespace) -> None:
    from hone.data.corpus.pipeline import clean
    from hone.data.corpus.report import show
    from hone.data.corpus.settings import CorpusSettings

    settings = CorpusSettings(
        **_input_settings(arguments),
        languages=() if arguments.languages == "off" else tuple(arguments.languages.split(",")),
        rules=_rules(arguments),
        toxicity=_number("--toxicity", arguments.toxicity),
        near=_number("--near", arguments.near),
        exact=not arguments.keep_copies,
        drop_overlap=arguments.drop_overlap,
        vocab=arguments.vocab,
        strict=arguments.strict,
    )
    out = arguments.out
    try:
        report = clean(arguments.sources, out, settings, workers=arguments.workers, restart=arguments.restart, say=say)
    except KeyboardInterrupt:
        say(f"what is done is kept in {out}: run the same command again to go on")
        raise
    print(show(report), end="")


def _overlap(arguments: argparse.Namespace) -> None:
    from hone.data.corpus.compare import compare
    from hone.data.corpus.report import show_overlap
    from hone.data.corpus.settings import CorpusSettings

    report = compare(arguments.sources, CorpusSettings(**_input_settings(arguments)), workers=arguments.workers)
    print(json.dumps(report, ensure_ascii=False) if arguments.json else show_overlap(report), end="")


COMMANDS = (
    Command(
        name="corpus",
        help="clean a pre-training corpus, or compare it with evaluation sets",
        options=_options,
        run=run_action,
    ),
)
