"""hone eval --judge: a learned reward chooses among completions, or among steps in a beam search."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hone.data.text.chat import render_prompt
from hone.errors import HoneError
from hone.inference.defaults import Sampling
from hone.inference.evaluate import warn_of_invalid, with_votes
from hone.inference.problems import Problems, Say
from hone.launch.measure import summarise
from hone.model.formats.cache import resolve
from hone.model.formats.folder import load_scorer
from hone.reward.learned.load import process_model, reward_model
from hone.reward.learned.process_model import ProcessModel, aggregate
from hone.reward.score import as_scorer, score
from hone.reward.steps import read_separator
from hone.search.beam import Beam, rank_by_rating
from hone.search.label import with_text
from hone.types import Group, Rollout, Task

LOWEST = -1e30  # the rating of a completion that the judge could not rate


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """How completions are chosen. beams=0: among whole completions."""

    judge: str  # the folder of a reward or process model; several with commas
    by: str = "min"  # how the scores of a process model's steps are summed up
    separator: str = ""  # what ends a step; empty: what the process model was trained on, or \\n
    beams: int = 0  # beginnings that are kept at each step, each continued in samples / beams ways

    def __post_init__(self) -> None:
        aggregate(self.by)  # refused before anything is loaded
        if self.judge.startswith("judge:") or self.judge.endswith((".yaml", ".yml")):
            file = self.judge.removeprefix("judge:")
            raise HoneError(
                f"{file} is a judge in YAML, which is a reward: use --reward judge:{file}; "
                "--judge takes the folder of a reward or process model"
            )


def evaluate_ranked(
    model: str | Path,
    data: str | Sequence[Any],
    rank: Rank,
    *,
    reward: Any = "math",
    how: Sampling | None = None,
    limit: int = 0,
    say: Say = lambda text: None,
) -> dict[str, float]:
    """As `evaluate`, with the mean reward of the chosen completions first."""
    how = how or Sampling()
    problems = Problems(model, data, how, limit=limit)
    say(str(problems.resolved))
    process, rate = _judge(rank, problems)
    search = _beam(rank, problems, process) if rank.beams else None
    verify, groups, chosen = problems.reward(reward), list[Group](), list[Group]()
    for first, tasks in problems.parts():
        made = problems.completions(tasks, first) if search is None else _search(search, tasks, problems)
        scored = score(made, verify)
        ratings = iter(rate([r for g in scored for r in g]))
        groups += scored
        chosen += [rank_by_rating(g, [next(ratings) for _ in g])[:1] for g in scored]
        say(f"{len(groups)} of {len(problems.tasks)} problems")
    found, best, name = summarise(groups), summarise(chosen), "beam" if search else f"best_of_{how.samples}"
    found = with_votes(found, groups, say)
    warn_of_invalid(groups, say)
    if advice := problems.advice(found):
        say(advice)
    return {name: best["reward"], f"{name}_error": best["reward_error"], **found}


Rate = Callable[[list[Rollout]], Sequence[float]]


def _judge(rank: Rank, problems: Problems) -> tuple[ProcessModel | None, Rate]:
    """The process model, if the judge is one, and a function that rates rollouts."""
    folders = rank.judge.split(",")
    if load_scorer(resolve(folders[0])).kind == "step":
        separator = read_separator(rank.separator)
        process = process_model(folders, problems.tokenizer, separator=separator, device=problems.model.device)
        return process, lambda rollouts: process.rate(rollouts, by=rank.by)
    judge = as_scorer(reward_model(folders, problems.tokenizer, device=problems.model.device))
    return None, lambda rollouts: [LOWEST if o.value is None else o.value for o in judge(rollouts)]


def _beam(rank: Rank, problems: Problems, process: ProcessModel | None) -> Beam:
    if process is None:
        raise HoneError(f"{rank.judge} scores whole completions: beams need a process model, or leave them out")
    if problems.samples < rank.beams:
        raise HoneError(f"{rank.beams} beams of {problems.samples} samples: set --samples to a multiple of --beams")
    width = problems.samples // rank.beams
    return Beam(
        sampler=problems.sampler, process=process, params=problems.params, beams=rank.beams, width=width, by=rank.by
    )


def _search(search: Beam, tasks: list[Task], problems: Problems) -> list[Group]:
    prompts = [render_prompt(problems.tokenizer, task.prompt, tools=task.extra.get("tools")) for task in tasks]
    stop_ids = problems.params.stop_ids
    return [
        [with_text(replace(r, task=task), problems.tokenizer, stop_ids) for r in group]
        for group, task in zip(search(prompts), tasks, strict=True)
    ]
