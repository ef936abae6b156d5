"""From sampled tokens and rewards to advantages and old log-probs, by TRL's own code: only the sampler is replaced."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from tests.parity import peer, rows


def score(trainer: Any, rewards: Sequence[float | None], **changed: Any) -> dict[str, Tensor]:
    """TRL's table of the eight rows with these rewards; None is a reward function that gave no answer."""
    found = rows.draw(share=rows.GROUP)
    prompts = [row.prompt for row in found]
    written = [row.completion for row in found]

    def give(**_: Any) -> list[float | None]:
        return list(rewards)

    changed = {
        "reward_funcs": [give],
        "reward_func_names": ["given"],
        "_tokenize_prompts": lambda _: (prompts, None, {}),
        "_generate_single_turn": lambda *_: (written, None) if isinstance(trainer, peer.trl.GRPOTrainer) else written,
        **changed,
    }
    with peer.settings(trainer, **changed):
        return trainer._generate_and_score_completions([{"prompt": "w1"} for _ in found])
