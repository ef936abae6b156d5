"""Loads folders of trained heads, Hone's or Hugging Face's, as rewards and as process models."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from hone.data.text.chat import encode_completion
from hone.data.text.tokenizer import Tokenizer, check_fits, check_same_tokens
from hone.errors import HoneError
from hone.model.formats.cache import resolve
from hone.model.formats.folder import load_scorer
from hone.model.scorer import Scorer
from hone.reward.learned.process_model import ProcessModel
from hone.reward.learned.reward_model import Ensemble, RewardModel
from hone.reward.steps import Stepper
from hone.types import Rollout

TOKENIZER = "tokenizer.json"


def reward_model(
    folders: Sequence[str], vocabulary: Tokenizer, *, how: str = "mean", k: float = 1.0, device: torch.device | str
) -> Callable[..., Any]:
    """One reward model, or several as an ensemble; `vocabulary` is the policy's."""
    members = [_member(resolve(folder), vocabulary, device) for folder in folders]
    return members[0] if len(members) == 1 else Ensemble(members=members, how=how, k=k)


def process_model(
    folders: Sequence[str],
    vocabulary: Tokenizer,
    *,
    separator: str = "",
    how: str = "mean",
    device: torch.device | str = "cpu",
) -> ProcessModel:
    """The process model of one folder or several. It reads the policy's own tokens.

    separator: what ends a step. Empty: what the model was trained on, or a line break where that is not known.
    """
    models = list[Scorer]()
    for folder in map(resolve, folders):
        scorer = load_scorer(folder)
        if scorer.kind != "step":
            raise HoneError(f"{folder} is a {scorer.kind} model: train one with algo=process_reward_model")
        if (other := _own_tokenizer(folder, vocabulary)) is not None:
            check_same_tokens(vocabulary, other, folder)
        check_fits(vocabulary, scorer.vocab_size)
        separator = _same_separator(folder, scorer.separator, separator)
        models.append(scorer.eval().requires_grad_(False).to(device))
    stepper = Stepper(decode=vocabulary.decode, stop_ids=vocabulary.stop_ids, separator=separator or "\n")
    return ProcessModel(models=models, stepper=stepper, pad_id=vocabulary.pad_id, how=how, device=device)


def _same_separator(folder: Path, own: str, wanted: str) -> str:
    """The separator that is known. Two different ones are refused: scores mean nothing at other steps."""
    if own and wanted and own != wanted:
        raise HoneError(f"{folder} was trained on steps that end with {own!r}, not {wanted!r}: leave the separator out")
    return own or wanted


def _member(folder: Path, vocabulary: Tokenizer, device: torch.device | str) -> RewardModel:
    scorer = load_scorer(folder)
    model = RewardModel(score=scorer.eval().requires_grad_(False).to(device), pad_id=vocabulary.pad_id, device=device)
    other = _own_tokenizer(folder, vocabulary)
    check_fits(other or vocabulary, scorer.vocab_size)
    if other is None:
        return model
    return replace(model, pad_id=other.pad_id, encode=Reencoder(other))


def _own_tokenizer(folder: Path, vocabulary: Tokenizer) -> Tokenizer | None:
    """The folder's tokenizer where its vocabulary is not the policy's, else None."""
    if not (folder / TOKENIZER).is_file():
        return None
    other = Tokenizer.load(folder)
    try:
        check_same_tokens(vocabulary, other, folder)
    except HoneError:
        return other
    return None


class Reencoder:
    """A rollout's prompt and text in another model's tokens and chat template."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    def __call__(self, rollout: Rollout) -> Rollout:
        if rollout.task is None:
            raise HoneError("a reward model with a vocabulary of its own reads the prompt's text: give rollouts a task")
        prompt, tools = rollout.task.prompt, rollout.task.extra.get("tools")
        if isinstance(prompt, str) and self.tokenizer.chat_template is not None:
            prompt = [{"role": "user", "content": prompt}]
        tokens, mask = encode_completion(self.tokenizer, prompt, rollout.text, tools=tools)
        return Rollout(tokens=tokens, mask=mask)
