"""hone eval: a model's marks on a file of problems."""

import argparse
from collections.abc import Mapping
from typing import Any

from hone.commands.command import Command


def _eval_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a model folder, or the name of a fetched model")
    parser.add_argument("data", metavar="DATA", help="a file of problems, or the name of a dataset, as in gsm8k:test")
    parser.add_argument("--limit", type=int, default=0, metavar="N", help="the first N problems only")
    parser.add_argument("--reward", default="math", help="verifier, or FILE.py:function (default: math)")
    parser.add_argument("--samples", type=int, default=1, metavar="K", help="samples a problem (default: 1)")
    parser.add_argument("--temperature", type=float, default=1.0, metavar="T", help="default: 1.0")
    parser.add_argument("--max-tokens", type=int, default=64, metavar="N", help="a completion (default: 64)")


def _eval(arguments: argparse.Namespace) -> None:
    from hone import runner

    result: Mapping[str, Any] = runner.evaluate(
        arguments.model,
        arguments.data,
        reward=arguments.reward,
        samples=arguments.samples,
        temperature=arguments.temperature,
        max_tokens=arguments.max_tokens,
        limit=arguments.limit,
    )
    width = max(map(len, result), default=0)
    for name, value in result.items():
        print(f"{name:<{width}}  {value:.4g}" if isinstance(value, float) else f"{name:<{width}}  {value}")


COMMANDS = (Command(name="eval", help="score a model on a file of problems", options=_eval_options, run=_eval),)
