"""A model, its tokenizer, its sampler and the problems it is given."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hone import build, feeds, rewards
from hone.measure import APART
from hone.reward.score import Scorer
from hone.rollout.local import LocalSampler
from hone.rollout.protocol import SampleParams
from hone.rollout.roller import Roller
from hone.types import Group, Task

AT_ONCE = 32  # problems that are worked on together
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How a model writes."""

    samples: int = 8
    temperature: float = 1.0
    max_tokens: int = 64
    seed: int = 0


class Desk:
    """All that is loaded to work on problems."""

    def __init__(self, model: str | Path, data: str | Sequence[Any], how: Sampling, *, limit: int = 0) -> None:
        self.tokenizer, self.decoder = build.loaded(model)
        self.context = self.decoder.config.max_position_embeddings
        self.tasks: list[Task] = feeds.tasks(data, self.tokenizer, room=self.context - 1)[: limit or None]
        spec = build.SampleSpec(max_tokens=how.max_tokens, temperature=how.temperature)
        plain = build.sample_params(spec, self.tokenizer, seed=how.seed)
        self.params: SampleParams = replace(plain, seed=(how.seed + APART) % 2**64)  # other numbers than in training
        # it reads text, so that a step can end what it writes
        self.sampler = LocalSampler(self.decoder, pad_id=self.tokenizer.pad_id, decode=self.tokenizer.decode)
        self.samples = how.samples

    def reward(self, spec: Any) -> Scorer:
        """What scores completions."""
        return rewards.scorer(spec, self.tokenizer, device=self.decoder.device)

    def parts(self, done: int = 0) -> Iterator[tuple[int, list[Task]]]:
        """The problems from number `done` on, some at a time, with the number of the first."""
        for first in range(done, len(self.tasks), AT_ONCE):
            yield first, self.tasks[first : first + AT_ONCE]

    def completions(self, tasks: list[Task], first: int) -> list[Group]:
        """`samples` of each; requests are numbered by the problem, so that a restart repeats none and misses none."""
        roller = Roller(self.sampler, self.tokenizer, self.params, group=self.samples)
        roller.requests = first * self.samples
        return roller(tasks)
