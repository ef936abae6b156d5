"""A model read over a whole batch without gradients, in slices that fit into memory."""

from dataclasses import fields
from functools import partial

import torch
from torch import Tensor

from hone.dist import collect
from hone.model.layout.forward import run_passes
from hone.train import memory
from hone.types import ABSENT, Batch, Forward, Model


@torch.no_grad()
def evaluate(model: Model, batch: Batch, want: frozenset[str], *, rows: int) -> Forward:
    """The forward pass of the whole batch, in slices, without gradients."""
    # a rank without rows still gets columns, of no rows; and a pass may need every rank to put a layer together
    number = collect.most(-(-max(len(batch), 1) // rows))
    slices = [slice(i * rows, (i + 1) * rows) for i in range(number)]
    if number > 1 and collect.world()[1] == 1:
        passes = [partial(_passed, model, batch.rows(at), want) for at in slices]
        each = run_passes(passes, batch.mask.device, _tensors)
    else:
        each = [_passed(model, batch.rows(at), want) for at in slices]
    parts = [part for made in each for part in made]
    columns = {f.name: [getattr(p, f.name) for p in parts] for f in fields(Forward)}
    return Forward(**{name: torch.cat(xs) for name, xs in columns.items() if xs[0] is not ABSENT})


def _tensors(parts: list[Forward]) -> list[Tensor]:
    return [x for part in parts for f in fields(part) if (x := getattr(part, f.name)) is not ABSENT]


def _passed(model: Model, batch: Batch, want: frozenset[str]) -> list[Forward]:
    """One pass, or two over half the rows where memory runs out."""
    try:
        return [model(batch, want)]
    except (RuntimeError, MemoryError) as error:
        # ranks may share each layer: all have to make as many passes
        if not memory.ran_out(error) or len(batch) < 2 or collect.world()[1] > 1:
            raise
    memory.release()
    half = len(batch) // 2
    return [x for part in (slice(half), slice(half, None)) for x in _passed(model, batch.rows(part), want)]
