"""From tasks to groups of rollouts: render the prompt, sample, decode. The request counter is its only state."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice

import numpy as np

from hone.data.text.chat import render_prompts
from hone.data.text.tokenizer import Tokenizer
from hone.engine.params import SampleParams, Sampler
from hone.errors import HoneError
from hone.types import Group, Rollout, Stop, Task

LOST = (
    "the sampler gave a log-prob that is not finite: go on from the last checkpoint, and where it comes again from an "
    "earlier one with a lower optim.lr"
)


class Roller:
    """Samples `group` completions of each task. Sampled tokens are kept as they are, never re-tokenised."""

    def __init__(self, sampler: Sampler, tokenizer: Tokenizer, params: SampleParams, *, group: int) -> None:
        self.sampler, self.tokenizer, self.params, self.group = sampler, tokenizer, params, group
        self.requests = 0  # each request draws its own random numbers

    def __call__(self, tasks: list[Task], mine: slice = slice(None)) -> list[Group]:
        """Groups for this rank's part of the tasks; requests are numbered over all, so ranks change no sample."""
        return self.told(self.sampled(tasks, mine), tasks[mine])

    def sampled(self, tasks: list[Task], mine: slice = slice(None)) -> list[Group]:
        """The same, before they are told their tasks and texts."""
        first, prompts = self._next(tasks, mine)
        return self.sampler.sample(prompts, n=self.group, params=self.params, first_request=first)

    def stream(self, tasks: list[Task], mine: slice = slice(None)) -> Iterator[list[tuple[int, Rollout]]]:
        """As `sampled`, step by step: the rollouts that ended in it, numbered within this rank's part."""
        first, prompts = self._next(tasks, mine)
        yield from self.sampler.stream(prompts, n=self.group, params=self.params, first_request=first)

    def told(self, groups: Sequence[Group], tasks: Sequence[Task]) -> list[Group]:
        """Each group's rollouts with their task and the completion's text, without the stop token or stop string."""
        rollouts = [r for g in groups for r in g]
        of = [task for g, task in zip(groups, tasks, strict=True) for _ in g]
        if rollouts and not np.isfinite(np.concatenate([r.gen_logp for r in rollouts])).all():
            raise HoneError(LOST)
        texts = self.tokenizer.decode_all(map(self._written, rollouts))
        told = iter(
            r.having(task=task, text=r.text if r.stop is Stop.STRING else text)
            for r, task, text in zip(rollouts, of, texts, strict=True)
        )
        return [list(islice(told, len(g))) for g in groups]

    def _next(self, tasks: list[Task], mine: slice) -> tuple[int, list[list[int]]]:
        """The number of this rank's first request, and its prompts; the next call's come after all ranks' requests."""
        first = self.requests + mine.indices(len(tasks))[0] * self.group
        self.requests += len(tasks) * self.group
        return first, render_prompts(self.tokenizer, [(task.prompt, task.extra.get("tools")) for task in tasks[mine]])

    def _written(self, rollout: Rollout) -> Sequence[int]:
        """Its completion's tokens that are text; none where a stop string has ended the text that is known."""
        written = rollout.completion()
        if rollout.stop is Stop.STRING:
            return written[:0]
        return written[:-1] if len(written) and written[-1] in self.params.stop_ids else written

    def state(self) -> dict[str, int]:
        """What a checkpoint holds."""
        return {"requests": self.requests}

    def load(self, state: dict[str, int]) -> None:
        """Go on where `state` was taken."""
        requests = state.get("requests") if isinstance(state, Mapping) else None
        if type(requests) is not int or not 0 <= requests < 2**63:
            raise HoneError(f"cannot resume: {requests!r} is no number of requests: resume from another checkpoint")
        self.requests = requests
