"""hone rewards test, calibrate: does a reward give 1 to every right answer and 0 to another row's? And a reward model's
scores, brought to zero mean and unit variance."""

import argparse
import json
import time
from collections import Counter
from typing import TYPE_CHECKING

from hone.commands.command import Command, add_actions, add_command, run_action
from hone.errors import HoneError

if TYPE_CHECKING:
    from hone.check.rewards import Miss, Proof
    from hone.data.rows.columns import Row
    from hone.types import Task

GOLD = ("answer", "canonical_solution", "code", "solution")  # columns of right answers; the first one present counts
CUT = 60  # characters of an answer that are shown


def _options(parser: argparse.ArgumentParser) -> None:
    actions = add_actions(parser)
    test = add_command(
        actions,
        "test",
        "prove that right answers score 1 and others 0",
        notes="Each row's own answer must get 1, and another row's 0; what does not is listed. Exit code 2 where there "
        "is any.",
        examples=("hone rewards test gsm8k:test", "hone rewards test problems.jsonl --reward rewards.py:score"),
    )
    test.add_argument("data", metavar="DATASET", help="a file of problems, or the name of a dataset, as in gsm8k:test")
    test.add_argument("--reward", default="math", metavar="NAME", help="verifier, or FILE.py:function (default: math)")
    test.add_argument("--gold", default="", metavar="COLUMN", help="where the right answers are (default: answer)")
    test.add_argument("--prompt", default="", metavar="COLUMN", help="where the questions are (default: prompt)")
    test.add_argument("--limit", type=int, default=0, metavar="N", help="the first N rows only")
    test.add_argument("--show", type=int, default=20, metavar="N", help="failures to list (default: 20)")
    test.add_argument(
        "--timeout", type=float, default=60.0, metavar="S", help="seconds an answer may take (default: 60)"
    )
    test.add_argument("--seed", type=int, default=0, metavar="N", help="of the answers' shuffling (default: 0)")
    test.add_argument("--json", action="store_true", help="one JSON object with every failure")
    test.set_defaults(action=_test)
    fit = add_command(
        actions,
        "calibrate",
        "give a reward model's scores zero mean and unit variance on data",
        notes="Mean and deviation are saved in the model's config.json and applied wherever it is read. Of preference "
        "pairs both completions count.",
        examples=("hone rewards calibrate runs/demo/reward/model runs/demo/data/preferences.jsonl",),
    )
    fit.add_argument("model", metavar="MODEL", help="folder or fetched name of a reward model")
    fit.add_argument("data", metavar="DATA", help="completions: prompt, completion; or prompt, chosen, rejected")
    fit.add_argument("--limit", type=int, default=0, metavar="N", help="the first N rows only")
    fit.add_argument("--json", action="store_true", help="one JSON object")
    fit.set_defaults(action=_calibrate)


def _calibrate(arguments: argparse.Namespace) -> None:
    from dataclasses import asdict

    from hone.inference.calibrate import calibrate

    calibration = calibrate(arguments.model, arguments.data, limit=arguments.limit)
    if arguments.json:
        print(json.dumps(asdict(calibration)))
    else:
        about = f"mean {calibration.mean:.4g}, standard deviation {calibration.std:.4g}"
        print(f"{arguments.model}: {about} over {calibration.rows} completions")


def _test(arguments: argparse.Namespace) -> None:
    from dataclasses import asdict

    from hone.check.rewards import prove
    from hone.launch import rewards

    if arguments.limit < 0 or arguments.show < 0:
        raise HoneError("--limit and --show count rows: give 0 or more")
    name = arguments.reward
    function = rewards.function_to_isolate(name, asked=True)
    isolated = rewards.isolate({name: function}, seconds=arguments.timeout) if function else {}
    tasks, golds, column, bad = _read(arguments.data, arguments.gold, asked=arguments.prompt, limit=arguments.limit)
    start = time.perf_counter()
    proof = prove(rewards.scorer(name, separate=isolated), tasks, golds=golds, bad=bad, seed=arguments.seed)
    seconds = time.perf_counter() - start
    if arguments.json:
        about = {"data": arguments.data, "reward": name, "column": column, "seconds": round(seconds, 3)}
        print(json.dumps({**about, **asdict(proof), "ok": not proof.misses}))
    else:
        _show(proof, arguments, seconds=seconds)
    if proof.misses:
        kinds = ", ".join(f"{number} {kind}" for kind, number in Counter(m.kind for m in proof.misses).items())
        raise HoneError(f"the reward {name} fails on rows of {arguments.data} ({kinds}): correct those, or the reward")


def _read(
    data: str, column: str, *, asked: str, limit: int
) -> "tuple[list[Task], list[str | None], str, dict[int, str]]":
    """The problems, their right answers, the column of these, and the faults of rows that are not problems."""
    from dataclasses import replace

    from hone.data.feed.locate import Reading
    from hone.launch import feeds

    renamed = {"prompt": asked} if asked else {}
    rows = feeds.load_rows(data, Reading(stream="never", columns=renamed))
    bad = dict[int, str]()
    tasks = [_task(row, n, bad) for n, row in enumerate(rows[: limit or None])]
    columns: list[dict[str, object]] = [{**t.extra, "answer": t.answer} for t in tasks]
    names = [column] if column else [name for name in GOLD if any(c.get(name) is not None for c in columns)]
    if not tasks:
        raise HoneError(f"{data} has no rows: give a file of problems")
    if len(bad) == len(tasks) and not asked and 'column "prompt" is missing' in bad[0]:
        present = ", ".join(sorted({name for row in rows for name in row}))
        raise HoneError(f"{data} has no column prompt: name that of the questions with --prompt COLUMN (of {present})")
    if len(bad) == len(tasks):
        raise HoneError(f"{data} row 1: {bad[0]}")
    if not names or not any(names[0] in c for c in columns):
        present = ", ".join(sorted({name for c in columns for name in c}))
        raise HoneError(f"{data} has no right answers: name their column with --gold COLUMN (there are: {present})")
    golds = [None if (value := c.get(names[0])) is None else str(value) for c in columns]
    if column:  # a verifier reads `answer`, and the answers are in another column
        tasks = [t if t.answer is not None else replace(t, answer=g) for t, g in zip(tasks, golds, strict=True)]
    return tasks, golds, names[0], bad


def _task(row: "Row", number: int, bad: dict[int, str]) -> "Task":
    from hone.data.rows.record import task_row
    from hone.types import Task

    try:
        return task_row(row, id=str(number + 1))
    except HoneError as error:
        bad[number] = str(error)
        return Task(prompt="")


def _show(proof: "Proof", arguments: argparse.Namespace, *, seconds: float) -> None:
    print(f"{arguments.data}: {proof.tasks} rows by {arguments.reward} in {seconds:.1f} s")
    print(f"{proof.gold} of {proof.tasks} right answers score 1")
    print(f"{proof.shuffled} of {proof.tried} answers of other rows score 0")
    for miss in proof.misses[: arguments.show]:
        print(f"  row {miss.row}: {_describe(miss)}")
    if len(proof.misses) > arguments.show:
        print(f"  and {len(proof.misses) - arguments.show} more: --show N or --json lists them")


def _describe(miss: "Miss") -> str:
    tried, value = f"{miss.answer[:CUT]!r}", miss.value
    if miss.kind == "gold":
        reason = f"; it said: {miss.reason}" if miss.reason else ""
        return f"its own answer {tried} scores {value:g} in every form{reason}"
    if miss.kind == "shuffled":
        return f"{tried} scores {value:g}, where {miss.gold[:CUT]!r} is right"
    return f"{tried} is invalid: {miss.reason}" if miss.kind == "invalid" else f"it cannot be tried: {miss.reason}"


COMMANDS = (
    Command(
        name="rewards",
        help="try a reward on a dataset's answers, calibrate a reward model",
        options=_options,
        run=run_action,
    ),
)
