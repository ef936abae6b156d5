"""hone fetch: a model into the cache."""

import argparse

from hone.commands.command import Command
from hone.log.progress import say


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


COMMANDS = (
    Command(
        name="fetch",
        help="bring a model into the local cache",
        options=_fetch_options,
        run=_fetch,
        examples=("hone fetch smollm2-135m", "hone fetch FILE.gguf --to FOLDER"),
    ),
)
