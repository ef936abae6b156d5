"""Readable samples: a few rollouts a step show what the numbers mean."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hone.log.sinks import append, drop_torn_line, finite
from hone.types import Group, Rollout, Task


def pick(groups: Sequence[Group], k: int = 3, seed: int = 0) -> list[Rollout]:
    """The best and the worst valid rollout, an invalid one, then random ones up to k, none twice.

    The same seed picks the same ones.
    """
    rollouts = [rollout for group in groups for rollout in group]
    scored = [i for i, rollout in enumerate(rollouts) if _reward(rollout) is not None]
    chosen: list[int] = []
    if scored:
        best = max(scored, key=lambda i: _reward(rollouts[i]) or 0.0)
        worst = min(scored, key=lambda i: _reward(rollouts[i]) or 0.0)
        chosen = list(dict.fromkeys((best, worst)))[: max(k, 0)]
    draw = random.Random(seed)
    bad = [i for i, rollout in enumerate(rollouts) if rollout.outcome is not None and not rollout.outcome.valid]
    chosen += draw.sample(bad, 1) if bad and len(chosen) < k else []
    rest = [i for i in range(len(rollouts)) if i not in chosen]
    chosen += draw.sample(rest, min(max(k - len(chosen), 0), len(rest)))
    return [rollouts[i] for i in chosen]


def record(step: int, rollout: Rollout) -> dict[str, Any]:
    """One rollout as JSON for a reader; reward null means invalid (see reason) or not scored."""
    parts = rollout.outcome.parts if rollout.outcome else {}
    reason = rollout.outcome.reason if rollout.outcome else ""
    return {
        "step": step,
        "prompt": prompt_text(rollout.task),
        "completion": rollout.text,
        "reward": _reward(rollout),
        "parts": {name: finite(value) for name, value in parts.items()},
        **({"reason": reason} if reason else {}),
        "stop": str(rollout.stop),
        "length": sum(map(bool, rollout.mask)),
    }


def write(path: str | Path, step: int, rollouts: Sequence[Rollout]) -> None:
    """Appends the rollouts to samples.jsonl; on resume `sinks.truncate_after` drops later ones."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    drop_torn_line(path)
    for rollout in rollouts:
        append(path, record(step, rollout))


def prompt_text(task: Task | None) -> str:
    """The prompt as a person reads it: messages become "role: content" lines."""
    if task is None:
        return ""
    if isinstance(task.prompt, str):
        return task.prompt
    return "\n".join(f"{message['role']}: {message.get('content', '')}" for message in task.prompt)


def _reward(rollout: Rollout) -> float | None:
    value = rollout.outcome.value if rollout.outcome else None
    return None if value is None else finite(value)
