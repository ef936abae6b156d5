"""From tasks to groups of rollouts: render the prompt, sample, decode. The request counter is its only state."""

import math
from collections.abc import Iterator
from dataclasses import replace

from hone.data.chat import render_prompt
from hone.data.tokenizer import Tokenizer
from hone.errors import HoneError
from hone.rollout.protocol import SampleParams, Sampler
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
        first, prompts = self._next(tasks, mine)
        groups = self.sampler.sample(prompts, n=self.group, params=self.params, first_request=first)
        return [[self._finish(r, task) for r in g] for g, task in zip(groups, tasks[mine], strict=True)]

    def stream(self, tasks: list[Task], mine: slice = slice(None)) -> Iterator[list[tuple[int, Rollout]]]:
        """The same, step by step: the rollouts that ended in it, numbered within this rank's part, group by group."""
        first, prompts = self._next(tasks, mine)
        steps = self.sampler.stream(prompts, n=self.group, params=self.params, first_request=first)
        tasks = tasks[mine]
        for ended in steps:
            yield [(number, self._finish(r, tasks[number // self.group])) for number, r in ended]

    def _next(self, tasks: list[Task], mine: slice) -> tuple[int, list[list[int]]]:
        """The number of this rank's first request, and its prompts; the next call's come after all ranks' requests."""
        first = self.requests + mine.indices(len(tasks))[0] * self.group
        self.requests += len(tasks) * self.group
        prompts = [render_prompt(self.tokenizer, task.prompt, tools=task.extra.get("tools")) for task in tasks[mine]]
        return first, prompts

    def _finish(self, rollout: Rollout, task: Task) -> Rollout:
        """Attach the task and the completion's text, without the stop token or stop string."""
        if not math.isfinite(sum(rollout.gen_logp)):
            raise HoneError(LOST)
        if rollout.stop is Stop.STRING:
            return replace(rollout, task=task)
        written = [t for t, m in zip(rollout.tokens, rollout.mask, strict=True) if m]
        if written and written[-1] in self.params.stop_ids:
            written.pop()
        return replace(rollout, task=task, text=self.tokenizer.decode(written))

    def state(self) -> dict[str, int]:
        """What a checkpoint holds."""
        return {"requests": self.requests}

    def load(self, state: dict[str, int]) -> None:
        """Go on where `state` was taken."""
        self.requests = state["requests"]
