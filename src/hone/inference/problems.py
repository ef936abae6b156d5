"""A model and the problems it works on: what `hone eval` and `hone label-steps` go through."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hone.engine.params import SampleParams
from hone.errors import HoneError
from hone.inference.defaults import Sampling, resolve_sampling, too_short
from hone.inference.model import Model, load
from hone.launch import build, feeds, rewards
from hone.launch.measure import SEED_OFFSET
from hone.reward.score import RewardScorer
from hone.rollout.supply import Roller
from hone.types import Group, Task

AT_ONCE = 32  # problems that are worked on together
Say = Callable[[str], None]


class Problems:
    """Problems, the model that solves them, and how it samples."""

    def __init__(
        self, model: str | Path | Model, data: str | Path | Iterable[Any], how: Sampling, *, limit: int = 0
    ) -> None:
        if limit < 0:
            raise HoneError(f"limit is {limit}: give a number of problems, or 0 for all")
        data = str(data) if isinstance(data, Path) else data
        data = data if isinstance(data, str | Sequence) else list(data)  # it is read more than once
        self.model = model if isinstance(model, Model) else load(model)
        self.tokenizer, self.sampler, self.context = self.model.tokenizer, self.model.sampler, self.model.context
        self.tasks: list[Task] = feeds.tasks(data, self.tokenizer, max_tokens=self.context - 1)[: limit or None]
        self.resolved = resolve_sampling(how, self.model.folder, context=self.context)
        how = self.resolved.sampling
        spec = build.SampleSpec(
            max_tokens=how.max_tokens, temperature=how.temperature or 0.0, top_k=how.top_k, top_p=how.top_p
        )
        plain = build.sample_params(spec, self.tokenizer, seed=how.seed)
        # other numbers than in training
        self.params: SampleParams = replace(plain, seed=(how.seed + SEED_OFFSET) % 2**64)
        self.samples = how.samples

    def reward(self, spec: Any) -> RewardScorer:
        """What scores completions."""
        if not (isinstance(spec, str | Mapping) or callable(spec)):
            raise HoneError(f"reward is {spec!r:.60}: give a verifier's name, a function, or names with weights")
        return rewards.scorer(spec, self.tokenizer, device=self.model.device)

    def advice(self, found: Mapping[str, float]) -> str:
        """What to set otherwise; "" if nothing."""
        return too_short(found["truncated"], self.resolved, context=self.context)

    def parts(self, done: int = 0) -> Iterator[tuple[int, list[Task]]]:
        """The problems from number `done` on, some at a time, with the number of the first."""
        for first in range(done, len(self.tasks), AT_ONCE):
            yield first, self.tasks[first : first + AT_ONCE]

    def completions(self, tasks: list[Task], first: int) -> list[Group]:
        """`samples` completions of each. Requests are numbered by the problem: a restart draws the same numbers."""
        roller = Roller(self.sampler, self.tokenizer, self.params, group=self.samples)
        roller.requests = first * self.samples
        with self.model.lock:
            return roller(tasks)
