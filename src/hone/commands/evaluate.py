"""hone eval, label-steps: a model on a file of problems, and labels for the steps of solutions."""

import argparse

from hone.commands.command import Command, show
from hone.errors import HoneError
from hone.log.progress import say

EVAL_NOTES = """\
Temperature, top_p, top_k and length are taken from the model's generation_config.json where you give none; the first
line says what they are and where they came from. With several samples, pass@k is the chance that one of k is right, and
maj@K the share of problems whose commonest answer is."""


def _eval_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a model folder, or the name of a fetched model")
    parser.add_argument("data", metavar="DATA", help="a file of problems, or the name of a dataset, as in gsm8k:test")
    parser.add_argument("--limit", type=int, default=0, metavar="N", help="the first N problems only")
    parser.add_argument(
        "--reward", default="math", metavar="NAME", help="verifier, or FILE.py:function (default: math)"
    )
    parser.add_argument(
        "--samples", type=int, default=1, metavar="K", help="samples a problem, for pass@k and maj@K (default: 1)"
    )
    parser.add_argument(
        "--temperature", type=float, metavar="T", help="default: the model's; else 0 for one sample, 1 for several"
    )
    parser.add_argument(
        "--max-tokens", type=int, default=None, metavar="N", help="a completion (default: the model's, else up to 1024)"
    )
    parser.add_argument("--judge", default="", metavar="FOLDER", help="a reward or process model that chooses one of K")
    parser.add_argument(
        "--by", default="min", metavar="HOW", help="a process model's steps: min, last, mean or product (default: min)"
    )
    parser.add_argument("--beams", type=int, default=0, metavar="B", help="search by steps: keep B of K at each step")
    parser.add_argument(
        "--separator", default="", metavar="TEXT", help="what ends a step (default: the process model's own, or \\n)"
    )


def _evaluate_ranked(arguments: argparse.Namespace) -> dict[str, float]:
    from hone.inference.defaults import Sampling
    from hone.inference.rank import Rank, evaluate_ranked

    return evaluate_ranked(
        arguments.model,
        arguments.data,
        Rank(judge=arguments.judge, by=arguments.by, separator=arguments.separator, beams=arguments.beams),
        reward=arguments.reward,
        how=Sampling(samples=arguments.samples, temperature=arguments.temperature, max_tokens=arguments.max_tokens),
        limit=arguments.limit,
        say=say,
    )


def _eval(arguments: argparse.Namespace) -> None:
    if arguments.samples < 1:
        raise HoneError(f"n is {arguments.samples} with --samples {arguments.samples}: set n to 1 or more")
    if arguments.max_tokens is not None and arguments.max_tokens < 1:
        raise HoneError(f"max_tokens is {arguments.max_tokens}: set it to 1 or more, or leave --max-tokens out")
    arguments.max_tokens = arguments.max_tokens or 0  # 0: the model's own
    result = _evaluate_ranked(arguments) if arguments.judge else _evaluate_samples(arguments)
    show({name: f"{value:.4g}" for name, value in result.items()})


def _evaluate_samples(arguments: argparse.Namespace) -> dict[str, float]:
    from hone.inference.evaluate import evaluate

    return evaluate(
        arguments.model,
        arguments.data,
        reward=arguments.reward,
        samples=arguments.samples,
        temperature=arguments.temperature,
        max_tokens=arguments.max_tokens,
        limit=arguments.limit,
    )


def _label_options(parser: argparse.ArgumentParser) -> None:
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


def _label(arguments: argparse.Namespace) -> None:
    from hone.inference.defaults import Sampling
    from hone.inference.label import StepLabels, label_steps

    metrics = label_steps(
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
    show({name: f"{value:.6g}" for name, value in metrics.items()})


COMMANDS = (
    Command(
        name="eval",
        help="score a model on a file of problems",
        options=_eval_options,
        run=_eval,
        notes=EVAL_NOTES,
        examples=(
            "hone eval runs/demo/grpo/model runs/demo/data/held_out.jsonl --samples 8",
            "hone eval smollm2-135m gsm8k:test --limit 20",
            "hone eval smollm2-135m gsm8k:test --limit 20 --samples 8 --temperature 0.7 --max-tokens 256",
        ),
    ),
    Command(
        name="label-steps",
        help="label each step of solutions by the share of continuations that verify",
        options=_label_options,
        run=_label,
        notes="Killed, the same command goes on where it was.",
        examples=(
            "hone label-steps runs/demo/sft/model runs/demo/data/held_out.jsonl --out steps.jsonl --separator ' '",
        ),
    ),
)
