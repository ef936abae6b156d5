"""hone label-steps: a file of solutions with a label for each step.

Lines are appended as problems are finished. After a kill the work goes on from the file.
"""

import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from hone.errors import HoneError
from hone.inference.defaults import Sampling
from hone.inference.problems import Problems, Say
from hone.log import sinks
from hone.reward.steps import Stepper, read_separator
from hone.search.label import LabelledSolution, Labeller, encode_solution, share_invalid
from hone.storage.textfile import read_text
from hone.types import Group, Task

Row = dict[str, Any]


class Ledger:
    """A file of JSON lines, beside the settings that made them. To go on with the file, the settings must be the same.

    whole: the column that marks the last row of a problem. Rows after the last such row are removed.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any], *, whole: str) -> None:
        self.path = path
        self._check(dict(settings))
        self.rows = self._finished(whole)

    def append(self, rows: Sequence[Row]) -> None:
        """Write the rows. They are on disk when it returns."""
        with self.path.open("ab", buffering=0) as file:
            file.write(b"".join(map(sinks.line, rows)))
            os.fsync(file.fileno())
        self.rows += rows

    def _check(self, settings: Row) -> None:
        about = self.path.with_name(self.path.name + ".settings.json")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if not self.path.exists():
            about.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
            return
        try:
            before = json.loads(read_text(about))
            if not isinstance(before, dict):
                raise ValueError("it holds no settings")
        except (OSError, ValueError, RecursionError) as error:
            raise HoneError(
                f"{self.path} is there, but {about.name} is not there or is damaged: choose another --out, or remove it"
            ) from error
        wrong = sorted(name for name in {**before, **settings} if before.get(name) != settings.get(name))
        if wrong:
            name = wrong[0]
            raise HoneError(
                f"{self.path} was begun with {name} {before.get(name)!r}, not {settings.get(name)!r}: "
                "use the same settings, or choose another --out"
            )

    def _finished(self, whole: str) -> list[Row]:
        """The rows of finished problems. The others are removed from the file."""
        rows = sinks.read(self.path)
        while rows and not rows[-1].get(whole):
            rows.pop()
        if self.path.exists():
            sinks.rewrite(self.path, rows)
        return rows


GIVEN = "completion"  # the column that has a solution already
WHOLE = "whole"  # the column that marks the last row of a problem
SINGLE_STEPS = 0.9  # if so many solutions have one step, the separator is probably wrong
FIRST_CONTINUATION = 2**62  # number of the first: continuations draw other random numbers than solutions


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLabels:
    """How steps are labelled."""

    k: int = 8  # continuations of a step
    separator: str = "\\n"  # what ends one
    threshold: float = 1.0  # from this reward on a completion counts as right
    max_invalid: float = 0.2  # stop when more than this share of the continuations has no verdict


def _sampling_settings(how: Sampling) -> dict[str, Any]:
    """The settings of sampling that the labels depend on."""
    return {name: getattr(how, name) for name in ("samples", "temperature", "max_tokens", "seed")}


def label_steps(
    model: str | Path,
    data: str | Sequence[Any],
    out: str | Path,
    *,
    reward: Any = "math",
    labels: StepLabels | None = None,
    how: Sampling | None = None,
    limit: int = 0,
    say: Say = lambda text: None,
) -> dict[str, float]:
    """Rows of prompt, steps and step_labels in `out`, a solution each, and what they cost.

    Solutions are the data's column `completion`, or the model's own, `how.samples` for each problem.
    """
    spec, how = labels or StepLabels(), how or Sampling(samples=1, temperature=1.0, max_tokens=256)
    problems = Problems(model, data, how, limit=limit)
    named = {"model": str(model), "data": data if isinstance(data, str) else f"{len(data)} rows", "reward": str(reward)}
    ledger = Ledger(Path(out), asdict(spec) | _sampling_settings(how) | named, whole=WHOLE)
    labeller = _labeller(problems, spec, reward)
    done, requests = (ledger.rows[-1]["problem"] + 1, ledger.rows[-1]["requests"]) if ledger.rows else (0, 0)
    if done:
        there, n = f"{len(ledger.rows)} rows are there", len(problems.tasks)
        say(f"{there}: {'all problems are labelled' if done >= n else f'going on with problem {done + 1} of {n}'}")
    for first, tasks in problems.parts(done):
        start = time.perf_counter()
        solutions = _solutions(problems, tasks, first)
        found = labeller([r for g in solutions for r in g], first_request=FIRST_CONTINUATION + requests)
        if (share := share_invalid(found)) > spec.max_invalid:
            raise HoneError(f"{share:.0%} of the continuations have no verdict: mend the reward or the data's answers")
        rows, requests = _rows(solutions, found, first, requests)
        seconds = (time.perf_counter() - start) / max(len(rows), 1)
        more = {"step_end": labeller.stepper.separator, "seconds": round(seconds, 4)}
        ledger.append([row | more for row in rows])
        say(f"{first + len(tasks)} of {len(problems.tasks)} problems")
        if first == done and (warning := _separator_warning(rows, labeller.stepper.separator)):
            say(warning)
    return report(ledger.rows)


def _separator_warning(rows: Sequence[Row], separator: str) -> str:
    """A warning if the separator hardly ever separates steps, else ""."""
    ones = sum(len(row["step_labels"]) == 1 for row in rows)
    if not rows or ones < SINGLE_STEPS * len(rows):
        return ""
    return f"warning: {ones} of {len(rows)} solutions have one step: if {separator!r} does not end one, set --separator"


def _labeller(problems: Problems, spec: StepLabels, reward: Any) -> Labeller:
    vocabulary = problems.tokenizer
    separator = read_separator(spec.separator)
    return Labeller(
        sampler=problems.sampler,
        tokenizer=vocabulary,
        stepper=Stepper(decode=vocabulary.decode, stop_ids=vocabulary.stop_ids, separator=separator),
        reward=problems.reward(reward),
        params=problems.params,
        context=problems.context,
        k=spec.k,
        threshold=spec.threshold,
    )


def _solutions(problems: Problems, tasks: list[Task], first: int) -> list[Group]:
    """The solutions of each problem: the data's own, or sampled ones."""
    bare = [task for task in tasks if GIVEN not in task.extra]
    if bare and len(bare) < len(tasks):
        raise HoneError(f"{len(bare)} of {len(tasks)} problems have no {GIVEN}: give each one, or none")
    if bare:
        return problems.completions(tasks, first)
    own = [replace(task, extra={k: v for k, v in task.extra.items() if k != GIVEN}) for task in tasks]
    return [[encode_solution(b, str(a.extra[GIVEN]), problems.tokenizer)] for a, b in zip(tasks, own, strict=True)]


def _rows(solutions: list[Group], found: list[LabelledSolution], first: int, requests: int) -> tuple[list[Row], int]:
    """The rows as training reads them. A step keeps its separator, so nothing is put between steps."""
    rows, each = list[Row](), iter(found)
    for number, group in enumerate(solutions, start=first):
        mine = [next(each) for _ in group]
        requests += sum(f.requests for f in mine)
        before = len(rows)
        for solution, f in zip(group, mine, strict=True):
            if not f.steps or solution.task is None:
                continue
            tools = {"tools": solution.task.extra["tools"]} if "tools" in solution.task.extra else {}
            rows.append(
                {
                    "prompt": solution.task.prompt,
                    "steps": list(f.steps),
                    "step_labels": list(f.labels),
                    "separator": "",
                    **tools,
                    "problem": number,
                    "requests": requests,  # sampled up to this problem
                    "tokens": f.tokens + sum(solution.mask) * bool(solution.gen_logp),
                }
            )
        if len(rows) > before:
            rows[-1][WHOLE] = True
    return rows, requests


def report(rows: Sequence[Row]) -> dict[str, float]:
    """The metrics of the rows."""
    labels = [label for row in rows for label in row["step_labels"]]
    return {
        "rows": float(len(rows)),
        "steps": float(len(labels)),
        "mean label": sum(labels) / max(len(labels), 1),
        "tokens sampled": float(sum(row["tokens"] for row in rows)),
        "seconds": sum(row["seconds"] for row in rows),
    }
