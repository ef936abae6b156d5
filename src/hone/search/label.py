"""Step labels by Monte Carlo: the share of K continuations from each step's end that verify (Wang et al. 2024)."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from hone.data.text.chat import encode_completion
from hone.data.text.tokenizer import Tokenizer
from hone.engine.params import SampleParams
from hone.errors import HoneError
from hone.reward.steps import Stepper
from hone.rollout.local import Sampler
from hone.types import Outcome, Rollout, Task

Prefix = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelledSolution:
    """A solution's steps with their labels, up to the first that could not be labelled, and what they cost."""

    steps: Sequence[str]
    labels: Sequence[float]
    requests: int = 0  # completions sampled for it
    tokens: int = 0  # in them
    invalid: int = 0  # of them without a verdict


@dataclass(frozen=True, slots=True)
class _Continuations:
    """The result of the continuations of one prefix."""

    owner: int  # the solution whose cost they count in
    label: float  # NaN where none has a verdict
    requests: int
    tokens: int
    invalid: int


@dataclass(frozen=True, kw_only=True)
class Labeller:
    """Labels the steps of solutions with `k` continuations from each step's end but the last one's.

    A solution's last step has the solution's own verdict. Equal prefixes of a problem are continued once.
    threshold: the least reward of a verified completion.
    """

    sampler: Sampler
    tokenizer: Tokenizer
    stepper: Stepper
    reward: Callable[[Sequence[Rollout]], list[Outcome]]
    params: SampleParams
    context: int  # the most tokens the sampler's model reads
    k: int = 8
    threshold: float = 1.0

    def __post_init__(self) -> None:
        if self.k < 1:
            raise HoneError(f"{self.k} continuations of a step: set k to 1 or more")

    def __call__(self, solutions: Sequence[Rollout], *, first_request: int = 0) -> list[LabelledSolution]:
        """Label the solutions, in order. Continuations are requests from `first_request` on."""
        cuts = [self.stepper.ends_and_texts(r) for r in solutions]
        owners: dict[Prefix, int] = {}
        for n, (r, (ends, _)) in enumerate(zip(solutions, cuts, strict=True)):
            for end in ends[:-1]:
                owners.setdefault(tuple(r.tokens[: end + 1]), n)
        results = self._continue(solutions, owners, first_request)
        verdicts = [self._share([outcome])[0] for outcome in self.reward(solutions)]
        labelled = list[LabelledSolution]()
        for n, (r, (ends, steps)) in enumerate(zip(solutions, cuts, strict=True)):
            beginnings = [results.get(tuple(r.tokens[: end + 1])) for end in ends[:-1]]
            labels = [math.nan if t is None else t.label for t in beginnings] + [verdicts[n]] * bool(ends)
            known = next((i for i, label in enumerate(labels) if math.isnan(label)), len(labels))
            own = [t for t in results.values() if t.owner == n]
            cost = {name: sum(getattr(t, name) for t in own) for name in ("requests", "tokens", "invalid")}
            labelled.append(LabelledSolution(steps=steps[:known], labels=labels[:known], **cost))
        return labelled

    def _continue(
        self, solutions: Sequence[Rollout], owners: dict[Prefix, int], first: int
    ) -> dict[Prefix, _Continuations]:
        prefixes = [prefix for prefix in owners if len(prefix) < self.context]
        groups = self.sampler.sample(prefixes, n=self.k, params=self.params, first_request=first)
        completions = [
            [self._completion(r, solutions[owners[p]]) for r in g] for p, g in zip(prefixes, groups, strict=True)
        ]
        outcomes = iter(self.reward([r for g in completions for r in g]))
        results = dict[Prefix, _Continuations]()
        for prefix, group in zip(prefixes, groups, strict=True):
            label, invalid = self._share([next(outcomes) for _ in group])
            results[prefix] = _Continuations(
                owners[prefix], label, len(group), sum(sum(r.mask) for r in group), invalid
            )
        return results

    def _completion(self, continued: Rollout, solution: Rollout) -> Rollout:
        """The continuation as a completion of the problem, which includes the prefix."""
        start = next(i for i, on in enumerate(solution.mask) if on)
        mask = [i >= start for i in range(len(continued.tokens))]
        return with_text(replace(continued, mask=mask, task=solution.task), self.tokenizer, self.params.stop_ids)

    def _share(self, outcomes: Sequence[Outcome]) -> tuple[float, int]:
        """The share of valid outcomes that verify, NaN if none is valid; and the number of invalid ones."""
        values = [outcome.value for outcome in outcomes if outcome.value is not None]
        right = sum(value >= self.threshold for value in values)
        return right / len(values) if values else math.nan, len(outcomes) - len(values)


def with_text(rollout: Rollout, tokenizer: Tokenizer, stop_ids: frozenset[int]) -> Rollout:
    """The rollout with the text of all tokens on its mask, less the stop token."""
    written = rollout.written()
    if written and written[-1] in stop_ids:
        written.pop()
    return replace(rollout, text=tokenizer.decode(written))


def encode_solution(task: Task, text: str, tokenizer: Tokenizer) -> Rollout:
    """A solution of the data, in tokens."""
    tokens, mask = encode_completion(tokenizer, task.prompt, text, tools=task.extra.get("tools"))
    return Rollout(tokens=tokens, mask=mask, task=task, text=text)


def share_invalid(labelled: Sequence[LabelledSolution]) -> float:
    """The share of continuations without a valid outcome."""
    return sum(f.invalid for f in labelled) / max(sum(f.requests for f in labelled), 1)
