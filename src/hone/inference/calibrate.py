"""hone rewards calibrate: the mean and deviation of a reward model's scores on data, saved with the model."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hone.data.text.tokenizer import Tokenizer
from hone.errors import HoneError
from hone.launch import build, feeds
from hone.model.formats.cache import resolve
from hone.model.formats.folder import load_scorer
from hone.model.formats.hf_config import CONFIG
from hone.reward.learned.reward_model import RewardModel
from hone.storage.files import digest, read_json, write_atomically
from hone.storage.names import MANIFEST


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """How many completions were scored, and the mean and deviation of their raw scores."""

    rows: int
    mean: float
    std: float


def calibrate(model: str | Path, data: str | Sequence[Any], *, limit: int = 0) -> Calibration:
    """Save mean and deviation with the model, so that its scores of the data's completions are normalised.

    Both completions of a preference pair count. An earlier calibration is replaced. limit: rows; 0: all.
    """
    if limit < 0:
        raise HoneError(f"limit is {limit}: give a number of rows, or 0 for all")
    folder = resolve(model)
    scorer = load_scorer(folder)
    if scorer.kind != "reward":
        raise HoneError(f"{folder} is a {scorer.kind} model, whose scores are chances already: give a reward model")
    scorer.normalise(0.0, 1.0)
    tokenizer, (device, dtype) = Tokenizer.load(folder), build.device_and_dtype()
    scorer = scorer.eval().requires_grad_(False).to(device, dtype)
    groups = feeds.groups(data, tokenizer, context=scorer.decoder.config.max_position_embeddings)[: limit or None]
    rows = [rollout for group in groups for rollout in group]
    mean, std = RewardModel(score=scorer, pad_id=tokenizer.pad_id, device=device).mean_and_std(rows)
    _save(folder, kind=scorer.kind, mean=mean, std=std)
    return Calibration(rows=len(rows), mean=mean, std=std)


def _save(folder: Path, **made: str | float) -> None:
    """Write into config.json and, in a checkpoint, its new hash into the manifest."""
    config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    write_atomically(folder / CONFIG, json.dumps(config | {"hone": made}, indent=2) + "\n")
    if (folder / MANIFEST).is_file():
        manifest = read_json(folder / MANIFEST)
        if not isinstance(manifest, dict):
            raise HoneError(f"{folder / MANIFEST} is damaged: use an earlier checkpoint")
        write_atomically(folder / MANIFEST, json.dumps(manifest | {CONFIG: digest(folder / CONFIG)}, indent=1))
