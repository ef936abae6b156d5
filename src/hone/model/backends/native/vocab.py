"""A small model's vocabulary head on a CPU, by head.cpp: logits and their statistics in one pass over the positions.

Its log-probs equal the sampler's (draw.cpp) to the bit.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from hone.model.kernels.cpp.library import argument, library
from hone.model.vocab.distribution import ROW_OF, Chunk, HeadRows, Plan, VocabBackend

SMALL = 4 << 20  # bytes of a head that stays in a core's cache
STATS = frozenset({"logp", "entropy"})


class NativeVocab(VocabBackend):
    """Statistics from hidden states by head.cpp. Those of logits that exist already are computed in plain torch."""

    name, priority = "native", 1

    def covers(self, logits: Tensor) -> str | None:
        return None if logits.is_cpu else f"logits on {logits.device}"

    def covers_head(self, rows: HeadRows, plan: Plan) -> str | None:
        """The reason why head.cpp cannot compute these statistics, or None if it can."""
        numbers = rows.hidden, rows.weight
        if any(not x.is_cpu or x.dtype != torch.float32 or not x.is_contiguous() for x in numbers):
            return "hidden states or head that are not float32 in one piece on a CPU"
        plainly = rows.temperature == 1 and rows.support is None and rows.finish is None and not plan.others
        if not plainly or not STATS.issuperset(plan.names):
            return "another distribution than softmax(logits), or one to compare with"
        if len(plan.slices) > 1 or rows.weight.nbytes > SMALL:
            return f"several chunks, or a head of more than {SMALL} bytes"
        found = library()
        if isinstance(found, str):
            return found
        panel = found.hone_panel_float32()
        return f"hidden states of no multiple of {panel} numbers" if rows.weight.shape[1] % panel else None

    def head_stats(self, rows: HeadRows, plan: Plan, table: Tensor, *, logits: Tensor | None) -> None:
        head_stats(rows, plan, table, logits=logits)

    def grad(self, chunk: Chunk, upstream: Mapping[str, Tensor]) -> None:
        """In one pass over the logits where only log-probs have a gradient."""
        x = chunk.logits
        alone = upstream.keys() == {"logp"} and not chunk.cut and chunk.temperature == 1
        plainly = alone and x.dtype == torch.float32 and x.is_contiguous()
        found = library() if plainly else ""  # the call may compile it
        if isinstance(found, str):
            super().grad(chunk, upstream)
            return
        (N, V), g = x.shape, upstream["logp"].contiguous()
        top, log = (chunk.table[ROW_OF[name]].contiguous() for name in ("top", "log"))
        targets = chunk.targets.long().contiguous()
        found.hone_head_grad(*map(argument, (x, N, V, targets, top, log, g, torch.get_num_threads())))


def head_stats(rows: HeadRows, plan: Plan, table: Tensor, *, logits: Tensor | None) -> None:
    """Write the plan's numbers into the table; logits: receives them, [N, V]."""
    found = library()
    assert not isinstance(found, str)
    (N, D), V, panel = rows.hidden.shape, len(rows.weight), found.hone_panel_float32()
    space, targets = torch.empty(D * -(-V // panel) * panel + 64), plan.targets.long().contiguous()
    top, log, logp, entropy = (table[ROW_OF[name]] for name in ("top", "log", "logp", "entropy"))
    asked = entropy if "entropy" in plan.names else None
    found.hone_head(
        *map(argument, (rows.hidden, N, D, rows.weight, V, targets, top, log, logp, asked, logits)),
        *map(argument, (space, torch.get_num_threads())),
    )
