"""From tasks to groups of rollouts: render the prompt, sample, decode. The request counter is its only state."""

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

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
        of = [task for g, task in zip(groups, tasks[mine], strict=True) for _ in g]
        finished = iter(self._finish([r for g in groups for r in g], of))
        return [list(islice(finished, len(g))) for g in groups]

    def stream(self, tasks: list[Task], mine: slice = slice(None)) -> Iterator[list[tuple[int, Rollout]]]:
        """The same, step by step: the rollouts that ended in it, numbered within this rank's part, group by group."""
        first, prompts = self._next(tasks, mine)
        steps = self.sampler.stream(prompts, n=self.group, params=self.params, first_request=first)
        tasks = tasks[mine]
        for ended in steps:
            numbers = [number for number, _ in ended]
            of = [tasks[number // self.group] for number in numbers]
            yield list(zip(numbers, self._finish([r for _, r in ended], of), strict=True))

    def _next(self, tasks: list[Task], mine: slice) -> tuple[int, list[list[int]]]:
        """The number of this rank's first request, and its prompts; the next call's come after all ranks' requests."""
        first = self.requests + mine.indices(len(tasks))[0] * self.group
        self.requests += len(tasks) * self.group
        prompts = [render_prompt(self.tokenizer, task.prompt, tools=task.extra.get("tools")) for task in tasks[mine]]
        return first, prompts

    def _finish(self, rollouts: list[Rollout], tasks: list[Task]) -> list[Rollout]:
        """Attach to each its task and the completion's text, without the stop token or stop string."""
        if not all(math.isfinite(sum(r.gen_logp)) for r in rollouts):
            raise HoneError(LOST)
        texts = self.tokenizer.decode_all(map(self._written, rollouts))
        return [
            replace(r, task=task, text=r.text if r.stop is Stop.STRING else text)
            for r, task, text in zip(rollouts, tasks, texts, strict=True)
        ]

    def _written(self, rollout: Rollout) -> list[int]:
        """Its completion's tokens that are text; none where a stop string has ended the text that is known."""
        if rollout.stop is Stop.STRING:
            return []
        written = rollout.written()
        return written[:-1] if written and written[-1] in self.params.stop_ids else written

    def state(self) -> dict[str, int]:
        """What a checkpoint holds."""
        return {"requests": self.requests}

    def load(self, state: dict[str, int]) -> None:
        """Go on where `state` was taken."""
        self.requests = state["requests"]
