"""Rollouts as a checkpoint holds them: a few long tensors, and the rest as JSON."""

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hone.reward.outcome import finite
from hone.types import Group, Outcome, Rollout, Stop, Task


def pack_rollouts(groups: Sequence[Group]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Rollouts as a few long tensors, and the rest as JSON; tasks are left out, for the feed gives them again."""
    rows = [r for g in groups for r in g]
    kinds = {"tokens": torch.int64, "mask": torch.bool, "gen_logp": torch.float64, "raw_logp": torch.float64}
    kinds |= {"support_size": torch.int32, "support": torch.int32}
    tensors = {
        name: torch.tensor([x for r in rows for x in getattr(r, name)], dtype=kind) for name, kind in kinds.items()
    }
    about = [
        {
            "length": len(r.tokens),
            "stop": r.stop.value,
            "limit": r.limit,
            "version": r.version,
            "text": r.text,
            "outcome": _outcome_to_json(r.outcome),
            "support": len(r.support),
        }
        for r in rows
    ]
    return tensors, {"groups": [len(g) for g in groups], "rows": about}


def _outcome_to_json(outcome: Outcome | None) -> dict[str, Any] | None:
    if outcome is None:
        return None
    parts, added = (
        {name: x if isinstance(x, int | float) else float(x) for name, x in numbers.items()}
        for numbers in (outcome.parts, outcome.added)
    )
    return {"value": outcome.value, "parts": parts, "added": added, "reason": outcome.reason}


def unpack_rollouts(tensors: Mapping[str, Tensor], about: Mapping[str, Any], tasks: Sequence[Task]) -> list[Group]:
    """What `packed` was given, each group with its task."""
    if len(about["rows"]) != sum(about["groups"]):
        raise ValueError("groups and rows do not agree")
    rows = _rows(tensors, about["rows"])
    return [[replace(next(rows), task=task) for _ in range(n)] for n, task in zip(about["groups"], tasks, strict=True)]


def _rows(tensors: Mapping[str, Tensor], rows: Sequence[Mapping[str, Any]]) -> Iterator[Rollout]:
    columns = {name: x.tolist() for name, x in tensors.items()}
    counts = ("length", "limit", "version", "support")
    start = sized = kept = 0
    for row in rows:
        if any(type(row[name]) is not int or not 0 <= row[name] < 2**63 for name in counts):
            raise ValueError("a count is none")
        part, ids = slice(start, start + row["length"]), slice(kept, kept + row["support"])
        sizes = slice(sized, sized + (row["length"] if row["support"] else 0))
        start, sized, kept = part.stop, sizes.stop, ids.stop
        yield Rollout(
            tokens=array("q", columns["tokens"][part]),
            mask=tuple(columns["mask"][part]),
            gen_logp=array("d", columns["gen_logp"][part]),
            raw_logp=array("d", columns["raw_logp"][part]),
            support_size=array("i", columns["support_size"][sizes]) if row["support"] else (),
            support=array("i", columns["support"][ids]) if row["support"] else (),
            stop=Stop(row["stop"]),
            limit=row["limit"],
            version=row["version"],
            text=_text(row["text"]),
            outcome=None if row["outcome"] is None else _outcome_from_json(row["outcome"]),
        )


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"a text is {type(value).__name__}")
    return value


def _outcome_from_json(plain: Mapping[str, Any]) -> Outcome:
    """What `_plain` was given."""
    numbers = [
        *plain["parts"].values(),
        *plain["added"].values(),
        *([] if plain["value"] is None else [plain["value"]]),
    ]
    if not all(isinstance(x, int | float) and not isinstance(x, bool) and finite(x) is not None for x in numbers):
        raise ValueError("a reward is no number")
    return Outcome(**{**plain, "reason": _text(plain["reason"])})
