"""A small model's vocabulary head on a CPU, by head.cpp: logits and their statistics in one pass over the positions.

Its numbers are those of the sampler (draw.cpp) to the bit.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from hone.model.backends.native.build import library
from hone.model.backends.native.calls import passed
from hone.model.vocab import rows as vocab_rows
from hone.model.vocab.distribution import HeadRows, Plan
from hone.model.vocab.rows import PLACE, Chunk

SMALL = 4 << 20  # bytes of a head that stays in a core's reach
STATS = frozenset({"logp", "entropy"})

stats = vocab_rows.stats  # of logits that another product gave


def covers(rows: HeadRows, plan: Plan) -> bool:
    """Whether head.cpp computes these statistics."""
    numbers = rows.hidden, rows.weight
    if any(not x.is_cpu or x.dtype != torch.float32 or not x.is_contiguous() for x in numbers):
        return False
    plainly = rows.temperature == 1 and rows.support is None and rows.finish is None and not plan.others
    if not plainly or not STATS.issuperset(plan.names) or len(plan.slices) > 1 or rows.weight.nbytes > SMALL:
        return False
    found = library()
    return not isinstance(found, str) and not rows.weight.shape[1] % found.hone_panel_float32()


def fill(rows: HeadRows, plan: Plan, table: Tensor, *, logits: Tensor | None) -> None:
    """Write the plan's numbers into the table; logits: receives them, [N, V]."""
    found = library()
    assert not isinstance(found, str)
    (N, D), V, panel = rows.hidden.shape, len(rows.weight), found.hone_panel_float32()
    space, targets = torch.empty(D * -(-V // panel) * panel + 64), plan.targets.long().contiguous()
    top, log, logp, entropy = (table[PLACE[name]] for name in ("top", "log", "logp", "entropy"))
    asked = entropy if "entropy" in plan.names else None
    found.hone_head(
        *map(passed, (rows.hidden, N, D, rows.weight, V, targets, top, log, logp, asked, logits)),
        *map(passed, (space, torch.get_num_threads())),
    )


def grad(chunk: Chunk, upstream: Mapping[str, Tensor]) -> None:
    """vocab_rows.grad, in one pass over the logits where only log-probs have a gradient."""
    x = chunk.logits
    alone = upstream.keys() == {"logp"} and not chunk.cut and chunk.temperature == 1
    plainly = alone and x.dtype == torch.float32 and x.is_contiguous()
    found = library() if plainly else ""  # which may compile it
    if isinstance(found, str):
        vocab_rows.grad(chunk, upstream)
        return
    (N, V), g = x.shape, upstream["logp"].contiguous()
    top, log = (chunk.table[PLACE[name]].contiguous() for name in ("top", "log"))
    targets = chunk.targets.long().contiguous()
    found.hone_head_grad(*map(passed, (x, N, V, targets, top, log, g, torch.get_num_threads())))
