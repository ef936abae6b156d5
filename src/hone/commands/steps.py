"""hone label-steps: labels for each step of solutions, by continuing them."""

import argparse

from hone.commands.command import Command, show
from hone.log.progress import say


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="the model that continues: a folder, or a fetched name")
    parser.add_argument("data", metavar="DATA", help="problems; a column `completion` has their solutions")
    parser.add_argument("--out", required=True, metavar="FILE", help="JSON lines to write, or to go on with")
    parser.add_argument(
        "--reward", default="math", metavar="NAME", help="verifier, or FILE.py:function (default: math)"
    )
    parser.add_argument("--k", type=int, default=8, metavar="K", help="continuations of each step (default: 8)")
    parser.add_argument(
        "--samples", type=int, default=1, metavar="N", help="solutions a problem, where the data has none (default: 1)"
    )
    parser.add_argument("--separator", default="\\n", metavar="TEXT", help="what ends a step (default: \\n)")
    parser.add_argument("--threshold", type=float, default=1.0, metavar="R", help="a reward that is right (default: 1)")
    parser.add_argument("--temperature", type=float, default=1.0, metavar="T", help="default: 1.0")
    parser.add_argument("--max-tokens", type=int, default=256, metavar="N", help="a continuation (default: 256)")
    parser.add_argument("--limit", type=int, default=0, metavar="N", help="the first N problems only")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="default: 0")


def _run(arguments: argparse.Namespace) -> None:
    from hone.inference.defaults import Sampling
    from hone.inference.label import StepLabels, label_steps

    found = label_steps(
        arguments.model,
        arguments.data,
        arguments.out,
        reward=arguments.reward,
        labels=StepLabels(k=arguments.k, separator=arguments.separator, threshold=arguments.threshold),
        how=Sampling(
            samples=arguments.samples,
            temperature=arguments.temperature,
            max_tokens=arguments.max_tokens,
            seed=arguments.seed,
        ),
        limit=arguments.limit,
        say=say,
    )
    show({name: f"{value:.6g}" for name, value in found.items()})


COMMANDS = (
    Command(
        name="label-steps",
        help="label each step of solutions by the share of continuations that verify",
        options=_options,
        run=_run,
        notes="Killed, the same command goes on where it was.",
        examples=(
            "hone label-steps runs/demo/sft/model runs/demo/data/held_out.jsonl --out steps.jsonl --separator ' '",
        ),
    ),
)
