"""A prepared run under examination: the rows, completions and batch that the checks share, each made once and small."""

from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from hone import build, feeds
from hone.algo.select import reward_of
from hone.data.chat import render_prompt
from hone.data.collate import collate, mismatched
from hone.data.convert import Grouper, Tasker
from hone.data.locate import Reading
from hone.errors import HoneError
from hone.job import Run
from hone.reward.score import Scorer as RewardScorer
from hone.reward.score import score
from hone.rollout.roller import Roller
from hone.train.step import annotate, credited, remember, weighed
from hone.types import Batch, Group, Outcome, Rollout, Task

ROWS, MANY = 64, 2000  # rows of the data that are looked at one by one: closely, and in passing
PROMPTS, SAMPLES, TOKENS = 4, 8, 64  # the most that is sampled


@dataclass
class Probe:
    """Nothing here moves the run: the source is a copy, and the sampler's requests are counted apart."""

    job: Run

    @cached_property
    def items(self) -> list[Any]:
        """The first rows in the order of training: tasks, or groups of an offline run; each once."""
        return copy(self.job.source).take(min(ROWS, len(self.job.source)))

    @cached_property
    def many(self) -> list[Any]:
        """As `items`, but enough of them that a rare fault is met."""
        return copy(self.job.source).take(min(MANY, len(self.job.source)))

    @property
    def tasks(self) -> list[Task]:
        return self.items if self.job.algo.online else []

    @property
    def rows(self) -> list[Rollout]:
        """Dataset rows; none online."""
        return [] if self.job.algo.online else [r for g in self.items for r in g]

    @cached_property
    def prompts(self) -> list[list[int]]:
        """The tokens of each task's prompt."""
        return [render_prompt(self.job.tokenizer, task.prompt) for task in self.tasks]

    @cached_property
    def raw(self) -> list[Any]:
        """The dataset as it is read, before anything of ours has touched it; less the bad rows that the run skips."""
        rows = feeds.load_rows(self.job.recipe.data, self.how)[0]
        return [row for row in rows if self._usable(row)] if self.how.skip_bad else rows

    def _usable(self, row: Any) -> bool:
        """Whether the run takes the row, whatever its length."""
        if isinstance(row, Task):
            return True
        tokenizer = self.job.tokenizer
        take = Tasker(tokenizer=tokenizer, skip_bad=True)
        if not self.job.algo.online:
            how = self.how
            plain = {"turns": how.turns, "shares": how.shares, "expected": how.shapes}
            take = Grouper(tokenizer=tokenizer, skip_bad=True, **plain)
        return take(row, "row") is not None

    @property
    def how(self) -> Reading:
        """How the run reads its data."""
        return feeds.reading(self.job.recipe, self.job.algo, self.job.tokenizer)

    @cached_property
    def groups(self) -> list[Group]:
        """A few completions of a few tasks, by the run's own sampler."""
        return self.sample(self.tasks[:PROMPTS])

    def sample(self, tasks: list[Task]) -> list[Group]:
        """The same tasks give the same completions as long as the weights are the same."""
        roller = self.job.roller
        assert roller is not None
        params = replace(roller.params, max_tokens=min(roller.params.max_tokens, TOKENS))
        size = max(min(roller.group, SAMPLES), self.job.algo.group)
        return Roller(roller.sampler, self.job.tokenizer, params, group=size)(tasks)

    @cached_property
    def scored(self) -> list[Group]:
        """The completions with their rewards."""
        return self._stepped(score(self.groups, self.reward))

    def _stepped(self, groups: list[Group]) -> list[Group]:
        """With step rewards, where the run has a process model."""
        return self.job.process(groups) if self.job.process else groups

    @property
    def reward(self) -> RewardScorer:
        assert self.job.reward is not None
        return self.job.reward

    @cached_property
    def stands_in(self) -> bool:
        """Whether these few rewards give nothing to learn from, so that made-up ones stand in for them."""
        if not self.job.algo.online or self.job.algo.teacher:
            return False
        try:
            values = [[value for r in g if (value := reward_of(r)) is not None] for g in self.scored]
        except HoneError:  # the reward's own checks say what is wrong with it
            return True
        compared = values if self.job.algo.group > 1 else [[value for group in values for value in group]]
        varied = any(len(set(v)) > 1 for v in compared)
        return not varied or not self.job.algo.select(self.scored)

    @cached_property
    def learned(self) -> list[Group]:
        """The groups that the learning checks train on."""
        if not self.job.algo.online:
            return self.items[: max(2, min(self.job.recipe.train.prompts, SAMPLES))]
        if not self.stands_in:
            return self.job.algo.select(self.scored)
        made = [
            [replace(r, outcome=Outcome(value=float((n + i) % 2 == 0))) for i, r in enumerate(g)]
            for n, g in enumerate(self.groups)
        ]
        return self.job.algo.select(self._stepped(made))

    @cached_property
    def plain_batch(self) -> Batch:
        """The rows as tensors, before any column is added."""
        return collate(self.learned)

    @cached_property
    def batch(self) -> Batch:
        """The rows with every column that the loss reads: what the loop gives to its update."""
        job, algo, learner = self.job, self.job.algo, self.job.learner
        context = job.policy.decoder.config.max_position_embeddings
        learner.begin(algo)
        others = None
        if "kl_baseline" in algo.needs:
            others = collate([[r] for r in mismatched([r for g in self.learned for r in g], max_tokens=context)])
        correct = build.correction(job.recipe) if algo.online else None
        declared = replace(algo, needs=algo.needs | {"old_logp"}) if correct else algo
        batch = annotate(self.plain_batch, declared, learner, mismatched=others)
        if algo.online:
            remember(learner, algo)
            batch = credited(batch, algo)
        return weighed(batch, algo, correct=correct)

    @property
    def about(self) -> str:
        """The rows of the batch, in words."""
        made = "; made-up rewards stand in, these gave no signal" if self.stands_in else ""
        return f"{len(self.plain_batch)} rows, {int(self.plain_batch.mask.sum())} trained tokens{made}"
