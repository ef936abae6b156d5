"""The run under examination: the rows, completions and batch that the checks share. Each is small and made once.

Checks that hold for any weights use only the first layers of a large model.
"""

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar, cast

import torch

from hone.algo.select import reward_of
from hone.data.collate import collate, mismatched_pairs
from hone.data.feed.locate import Reading
from hone.data.rows.convert import Grouper, Tasker
from hone.data.text.chat import render_prompt
from hone.dist import collect
from hone.errors import HoneError, count_noun
from hone.launch import build, feeds
from hone.launch.job import Run, make_learner
from hone.model.decoder import Decoder
from hone.model.formats.folder import EMBEDDING, HEAD, assemble
from hone.model.lora import plain_state
from hone.model.policy import Policy
from hone.model.scorer import Scorer
from hone.reward.score import RewardScorer, score
from hone.rollout.supply import Roller
from hone.train.annotate import annotate, keep_old_policy
from hone.train.update import assign_credit, weigh
from hone.types import Batch, Group, Outcome, Rollout, Stop, Task

LAYERS = 2  # a first one and a last one
TOKENS = 4096  # of the vocabulary, which is most of a small model's weights


def first_layers(job: Run) -> Run:
    """The run on the first layers and tokens of its model; the run itself where that cannot be built."""
    decoder, recipe = job.policy.decoder, job.recipe
    few = decoder.config.num_hidden_layers <= LAYERS
    if type(decoder) is not Decoder or few or recipe.lora.path or collect.world()[1] > 1:
        return job
    config = replace(
        decoder.config,
        num_hidden_layers=LAYERS,
        windows=decoder.config.windows[:LAYERS],
        vocab_size=min(TOKENS, decoder.config.vocab_size),
    )
    state = {name: x for name, x in plain_state(decoder).items() if _is_kept(name)}
    if config.tie_word_embeddings:  # the head is the embedding
        del state[HEAD]
    state |= {name: state[name][: config.vocab_size] for name in (HEAD, EMBEDDING) if name in state}
    copied = {name: x.to("cpu", torch.float32, copy=True) for name, x in state.items()}
    learner = make_learner(recipe, job.algo, assemble(config, copied))
    made = replace(job, policy=cast(Policy | Scorer, learner.policy), learner=learner)
    if isinstance(job.policy, Scorer) and isinstance(made.policy, Scorer):
        made.policy.separator = job.policy.separator
    return made


def with_small_ids(group: Group, tokens: int) -> Group:
    """The rows with token ids that a vocabulary of so many tokens has."""
    return [replace(r, tokens=[t % tokens for t in r.tokens]) for r in group]


def _is_kept(name: str) -> bool:
    _, layers, rest = name.partition(".layers.")
    return not layers or int(rest.partition(".")[0]) < LAYERS


ROWS, MANY = 64, 2000  # rows of the data that are checked one by one: thoroughly, and cheaply
LARGE = 30_000_000  # from so many weights on, a forward pass is slow
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """How much text the model is given at most."""

    prompts: int  # that are sampled from
    samples: int  # of each
    tokens: int  # of each
    groups: int  # that the learning checks train on
    length: int = 0  # tokens of each of their rows; 0: all


NORMAL_EXTENT = Extent(prompts=4, samples=8, tokens=64, groups=8)
SMALL_EXTENT = Extent(prompts=2, samples=4, tokens=8, groups=2, length=40)  # of a large model


@dataclass
class Probe:
    """What the checks read. The run does not advance: the source is a copy, and the sampler's requests count apart."""

    job: Run
    _made: dict[str, Any] = field(default_factory=dict[str, Any])

    def cached(self, name: str, make: Callable[[], T]) -> T:
        """A result that several checks read. The first of them makes it."""
        if name not in self._made:
            self._made[name] = make()
        return cast(T, self._made[name])

    @cached_property
    def large(self) -> bool:
        """Whether the model is so large that the checks use little text."""
        return sum(p.numel() for p in self.job.policy.decoder.parameters()) > LARGE

    @property
    def extent(self) -> Extent:
        return SMALL_EXTENT if self.large else NORMAL_EXTENT

    @cached_property
    def small(self) -> "Probe":
        """The same run on a part of a large model, for checks that hold for any weights; else the run itself."""
        job = first_layers(self.job) if self.large else self.job
        if job is self.job:
            return self
        size, length = job.policy.decoder.config.vocab_size, self.extent.length
        rows = (
            self.groups
            if self.job.algo.online
            else [cut_to_length(g, length) for g in self.items[: NORMAL_EXTENT.groups]]
        )
        made = {
            "training_groups": [with_small_ids(g, size) for g in self.training_groups],
            "rows": [with_small_ids(g, size) for g in rows],
        }
        return Probe(job, made)

    @property
    def table(self) -> Batch:
        """Rows for the check of layouts: the batch, or more rows where the model is a part of one."""
        return self.cached("table", lambda: collate(self._made["rows"]) if "rows" in self._made else self.batch)

    @cached_property
    def items(self) -> list[Any]:
        """The first rows in the order of training, each once: tasks, or groups of an offline run."""
        return copy(self.job.source).take(min(ROWS, len(self.job.source)))

    @cached_property
    def many_items(self) -> list[Any]:
        """As `items`, but enough rows to show a rare fault."""
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
        """The dataset as it is read, without the bad rows that the run skips."""
        rows = feeds.load_rows(self.job.recipe.data, self.reading)
        return [row for row in rows if self._usable(row)] if self.reading.skip_bad else rows

    def _usable(self, row: Any) -> bool:
        """Whether the run takes the row, whatever its length."""
        if isinstance(row, Task):
            return True
        tokenizer = self.job.tokenizer
        take = Tasker(tokenizer=tokenizer, skip_bad=True)
        if not self.job.algo.online:
            reading = self.reading
            plain = {"turns": reading.turns, "shares": reading.shares, "expected": reading.kinds}
            take = Grouper(tokenizer=tokenizer, skip_bad=True, **plain)
        return take(row, "row") is not None

    @property
    def reading(self) -> Reading:
        """How the run reads its data."""
        return feeds.reading(self.job.recipe, self.job.algo, self.job.tokenizer)

    @cached_property
    def sampled_tasks(self) -> list[Task]:
        """The tasks that completions are sampled for: the first; for a large model those with the shortest prompts."""
        tasks = self.tasks
        if self.large:
            shortest = sorted(range(len(tasks)), key=lambda i: len(self.prompts[i]))
            tasks = [tasks[i] for i in shortest]
        return tasks[: self.extent.prompts]

    @cached_property
    def groups(self) -> list[Group]:
        """A few completions of a few tasks, by the run's own sampler."""
        return self.sample(self.sampled_tasks)

    def sample(self, tasks: list[Task], *, fewer: int = 1, longest: bool = False) -> list[Group]:
        """Completions of the tasks. They are the same each time, while the weights are the same.

        fewer: divides the number of completions and tokens. longest: ignore the run's own limit of tokens.
        """
        roller = self.job.roller
        assert roller is not None
        most = self.extent.tokens // fewer
        params = replace(roller.params, max_tokens=most if longest else min(roller.params.max_tokens, most))
        size = max(min(roller.group, self.extent.samples // fewer), self.job.algo.group)
        return Roller(roller.sampler, self.job.tokenizer, params, group=size)(tasks)

    @cached_property
    def all_cut_off(self) -> bool:
        """Whether the check itself cut off every completion: their rewards are then not those of the run."""
        limit = self.job.roller.params.max_tokens if self.job.roller else 0
        rows = [r for g in self.groups for r in g]
        return limit > self.extent.tokens and all(r.stop is Stop.LENGTH for r in rows)

    @cached_property
    def scored(self) -> list[Group]:
        """The completions with their rewards."""
        return self._with_step_rewards(score(self.groups, self.reward))

    def _with_step_rewards(self, groups: list[Group]) -> list[Group]:
        """The groups with step rewards, if the run has a process model."""
        return self.job.process(groups) if self.job.process else groups

    @property
    def reward(self) -> RewardScorer:
        assert self.job.reward is not None
        return self.job.reward

    @cached_property
    def uses_made_up_rewards(self) -> bool:
        """Whether these few rewards give no signal. The learning checks then use made-up rewards."""
        if not self.job.algo.online or self.job.algo.teacher:
            return False
        try:
            values = [[value for r in g if (value := reward_of(r)) is not None] for g in self.scored]
        except HoneError:  # the reward's own checks say what is wrong with it
            return True
        compared = values if self.job.algo.group > 1 else [[value for group in values for value in group]]
        varied = any(len(set(v)) > 1 for v in compared)
        return not varied or not self.job.algo.select(self.scored)

    @property
    def training_groups(self) -> list[Group]:
        """The groups that the learning checks train on."""
        return self.cached("training_groups", self._training_groups)

    def _training_groups(self) -> list[Group]:
        groups = self._groups_to_train_on()
        if not self.large:
            return groups
        shortest = sorted(groups, key=lambda g: (not _varied(g), sum(len(r.tokens) for r in g)))
        if (
            self.job.algo.online and self.job.algo.unit == 1
        ):  # one prompt's samples will do for a loss that has no pairs
            return [_extremes(g) for g in shortest[:1]]
        return [cut_to_length(g, self.extent.length) for g in shortest[: self.extent.groups]]

    def _groups_to_train_on(self) -> list[Group]:
        if not self.job.algo.online:
            most = len(self.items) if self.large else self.extent.groups
            return self.items[: max(2, min(self.job.recipe.train.prompts, most))]
        if not self.uses_made_up_rewards:
            return self.job.algo.select(self.scored)
        made = [
            [replace(r, outcome=Outcome(value=float((n + i) % 2 == 0))) for i, r in enumerate(g)]
            for n, g in enumerate(self.groups)
        ]
        return self.job.algo.select(self._with_step_rewards(made))

    @cached_property
    def plain_batch(self) -> Batch:
        """The rows as tensors, before any column is added."""
        return collate(self.training_groups)

    @cached_property
    def batch(self) -> Batch:
        """The rows with every column that the loss reads: what the loop gives to its update."""
        job, algo, learner = self.job, self.job.algo, self.job.learner
        context = job.policy.decoder.config.max_position_embeddings
        learner.start_controls(algo)
        others = None
        if "kl_baseline" in algo.needs:
            others = collate(
                [[r] for r in mismatched_pairs([r for g in self.training_groups for r in g], max_tokens=context)]
            )
        correct = build.correction(job.recipe) if algo.online else None
        declared = replace(algo, needs=algo.needs | {"old_logp"}) if correct else algo
        batch = annotate(self.plain_batch, declared, learner, mismatched=others)
        if algo.online:
            keep_old_policy(learner, algo)
            batch = assign_credit(batch, algo)
        return weigh(batch, algo, correct=correct)

    @property
    def about(self) -> str:
        """The rows of the batch, in words."""
        made = "; made-up rewards stand in, these gave no signal" if self.uses_made_up_rewards else ""
        rows, tokens = len(self.plain_batch), int(self.plain_batch.mask.sum())
        return f"{count_noun(rows, 'row')}, {count_noun(tokens, 'trained token')}{made}"


def _varied(group: Group) -> bool:
    return len({reward_of(r) for r in group}) > 1


def _extremes(group: Group) -> Group:
    """The two rows of the lowest reward, and the row of the highest."""
    ranked = sorted(group, key=lambda r: reward_of(r) or 0.0)
    return [*ranked[:2], *ranked[2:][-1:]]


def cut_to_length(group: Group, length: int) -> Group:
    """Rows of a dataset cut to so many tokens, from a little before their trained part. Completions stay whole."""
    if not length or any(r.gen_logp for r in group):
        return group
    made = [_window(r, length) for r in group]
    alike = len({tuple(r.tokens) for r in made}) < len({tuple(r.tokens) for r in group})
    return group if alike else made  # without a difference a pair has nothing to learn from


def _window(row: Rollout, length: int) -> Rollout:
    first = list(row.mask).index(True) if any(row.mask) else 0
    at = slice(start := max(0, first - length // 4), start + length)
    labels = row.step_label[at]
    return replace(row, tokens=row.tokens[at], mask=row.mask[at], step_label=labels)


def last_tokens(row: Rollout, number: int) -> Rollout:
    """The last tokens of a row and their mask, without its other columns."""
    return Rollout(tokens=row.tokens[-number:], mask=row.mask[-number:])
