"""Beam search over steps: prefixes are continued by one step, and a process model chooses which to keep."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hone.engine.params import SampleParams
from hone.errors import HoneError
from hone.reward.learned.process_model import ProcessModel
from hone.rollout.local import Sampler
from hone.types import Group, Rollout, Stop

OPEN = Stop.STRING  # the stop reason of a prefix that can be continued: it ended with a step


def rank_by_rating(group: Group, ratings: Sequence[float]) -> Group:
    """The rollouts by rating, highest first. Of two equal ones the earlier comes first."""
    if len(group) != len(ratings):
        raise ValueError(f"{len(group)} rollouts but {len(ratings)} ratings")
    return [group[i] for i in sorted(range(len(group)), key=lambda i: -ratings[i])]


@dataclass(kw_only=True)
class Beam:
    """Keeps `beams` prefixes of each prompt and continues each in `width` ways, until all have ended.

    The first step is sampled beams * width times, since there is one prefix. The sampler must read text
    (`LocalSampler(decode=...)`): a step ends with the separator. by: how the ratings of steps become one.
    """

    sampler: Sampler
    process: ProcessModel
    params: SampleParams  # max_tokens counts the whole completion
    beams: int = 4
    width: int = 4
    by: str = "min"
    requests: int = 0  # sampled so far; each has its own random numbers

    def __post_init__(self) -> None:
        if self.beams < 1 or self.width < 1:
            raise HoneError(f"{self.beams} beams of width {self.width}: both must be 1 or more")

    def __call__(self, prompts: Sequence[Sequence[int]]) -> list[Group]:
        """Completions of each prompt, at most `beams`, best first."""
        kept: list[Group] = [[Rollout(tokens=list(p), mask=[False] * len(p), stop=OPEN)] for p in prompts]
        width = self.beams * self.width
        while prefixes := [r for group in kept for r in group if r.stop is OPEN]:
            longer = iter(self._continue(prefixes, width))
            kept = [[x for r in group for x in (next(longer) if r.stop is OPEN else [r])] for group in kept]
            kept, width = self._best(list(map(_distinct, kept))), self.width
        return kept

    def _best(self, groups: list[Group]) -> list[Group]:
        ratings = iter(self.process.rate([r for group in groups for r in group], by=self.by))
        return [rank_by_rating(group, [next(ratings) for _ in group])[: self.beams] for group in groups]

    def _continue(self, prefixes: Group, width: int) -> list[Group]:
        """Each prefix with one more step, in `width` ways."""
        room = self.params.max_tokens - min(sum(r.mask) for r in prefixes)
        params = replace(self.params, max_tokens=room, stop=(self.process.stepper.separator,))
        prompts, first = [r.tokens for r in prefixes], self.requests
        groups = self.sampler.sample(prompts, n=width, params=params, first_request=first)
        self.requests += width * len(prefixes)
        return [[self._append_step(r, prefix) for r in group] for group, prefix in zip(groups, prefixes, strict=True)]

    def _append_step(self, step: Rollout, prefix: Rollout) -> Rollout:
        """The prefix with this step. A token that reaches into the next step is sampled anew with that one."""
        tokens, mask, stop = list(step.tokens), [*prefix.mask, *step.mask[len(prefix.mask) :]], step.stop
        excess = sum(mask) - self.params.max_tokens
        if excess > 0:  # the shortest prefix set the limit of the call
            tokens, mask, stop = tokens[:-excess], mask[:-excess], Stop.LENGTH
        stepper, length = self.process.stepper, len(tokens) - len(prefix.tokens)
        if stop is OPEN and length > 1 and not stepper.decode(tokens[len(prefix.tokens) :]).endswith(stepper.separator):
            tokens, mask = tokens[:-1], mask[:-1]
        if sum(mask) >= self.params.max_tokens and stop is OPEN:
            stop = Stop.LENGTH
        return Rollout(tokens=tokens, mask=mask, stop=stop, limit=self.params.max_tokens, version=step.version)


def _distinct(group: Group) -> Group:
    return list({tuple(r.tokens): r for r in group}.values())
