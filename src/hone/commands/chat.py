"""hone chat: talk with a model in the terminal."""

import argparse
import secrets

from hone.commands.command import Command
from hone.commands.serve import add_model_options


def _chat_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a model folder, or the name of a fetched model")
    parser.add_argument("--adapter", default="", metavar="FOLDER", help="with this LoRA adapter on")
    parser.add_argument("--system", default="", metavar="TEXT", help="the system message")
    parser.add_argument("--temperature", type=float, default=0.7, metavar="T", help="0: greedy (default: 0.7)")
    parser.add_argument("--top-p", type=float, default=1.0, metavar="P", help="default: 1, everything")
    parser.add_argument("--seed", type=int, default=None, metavar="N", help="for the same answers again")
    parser.add_argument("--max-tokens", type=int, default=512, metavar="N", help="an answer (default: 512)")
    add_model_options(parser)


def _chat(arguments: argparse.Namespace) -> None:
    from hone.engine.params import SampleParams
    from hone.serve.chat import Conversation, Terminal
    from hone.serve.load import load

    adapters = {"adapter": arguments.adapter} if arguments.adapter else {}
    settings = SampleParams(
        max_tokens=arguments.max_tokens,
        temperature=arguments.temperature,
        top_p=arguments.top_p,
        stop_ids=frozenset(),
        seed=secrets.randbits(64) if arguments.seed is None else arguments.seed,
    )
    loaded = load(
        arguments.model,
        adapters=adapters,
        max_rows=1,
        device=arguments.device,
        dtype=arguments.dtype,
        int8=arguments.int8,
        invariant=arguments.invariant,
    )
    conversation = Conversation(loaded, settings, adapter=loaded.adapters.get("adapter"))
    Terminal(conversation, system=arguments.system).run()


COMMANDS = (
    Command(
        name="chat",
        help="talk with a model in the terminal",
        options=_chat_options,
        run=_chat,
        examples=(
            'hone chat smollm2-135m --system "Be brief."',
            'echo "What is 2 + 2?" | hone chat smollm2-135m --temperature 0',
        ),
    ),
)
