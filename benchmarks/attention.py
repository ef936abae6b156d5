"""The learner's attention on a GPU beside torch's: forward and backward, microseconds a layer, in bfloat16.

python -m benchmarks.attention [--quick]

Peers: cuDNN's kernels, which take rows of one length and add in no fixed order, over a table with prompts copied and
short rows filled up; and torch's for rows of different lengths (`varlen_attn`), with its own deterministic sums, over
keys and values copied row by row. Neither is charged for making the table or the copies.
"""

import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.form import Row, main, note, say
from benchmarks.replayed import microseconds
from hone.model.backends.fused import shared_attention
from hone.model.layout import move_record
from hone.model.rows import GroupedRows, make_tiles, offsets

Times = tuple[float, float]  # forward, backward
Heads = tuple[Tensor, Tensor, Tensor]  # queries, keys, values
SPELL = 0.05  # seconds of replays


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Groups of rows that share a prompt; lengths of answers are drawn from a range."""

    name: str
    groups: int
    group: int
    prompt: int
    answer: tuple[int, int]
    heads: tuple[int, int, int]  # queries, keys, size

    def rows(self) -> GroupedRows:
        n = self.groups * self.group
        lengths = self.prompt + np.random.default_rng(0).integers(self.answer[0], self.answer[1] + 1, n)
        first = np.arange(n) // self.group * self.group
        return GroupedRows(lengths, first, np.where(first == np.arange(n), 0, self.prompt))


SMALL, HALF, LARGE = (9, 3, 64), (14, 2, 64), (32, 8, 128)
CASES = (
    Case(name="135M, 32 x 8 answers of 256 after 64", groups=32, group=8, prompt=64, answer=(256, 256), heads=SMALL),
    Case(name="135M, 32 x 8 answers of 20 to 492", groups=32, group=8, prompt=64, answer=(20, 492), heads=SMALL),
    Case(name="135M, 16 x 1,024", groups=16, group=1, prompt=0, answer=(1_024, 1_024), heads=SMALL),
    Case(name="0.5B, 16 x 1,024", groups=16, group=1, prompt=0, answer=(1_024, 1_024), heads=HALF),
    Case(name="135M, 2 x 8,192", groups=2, group=1, prompt=0, answer=(8_192, 8_192), heads=SMALL),
    Case(name="heads of 128, 16 x 1,024", groups=16, group=1, prompt=0, answer=(1_024, 1_024), heads=LARGE),
    Case(name="heads of 128, 2 x 8,192", groups=2, group=1, prompt=0, answer=(8_192, 8_192), heads=LARGE),
)


def drawn(tokens: int, heads: tuple[int, int, int]) -> Heads:
    """Queries, keys and values side by side, as a product leaves them, [tokens, heads, size] each."""
    H, K, E = heads
    q, k, v = torch.randn(tokens, H + 2 * K, E, device="cuda", dtype=torch.bfloat16).split([H, K, K], 1)
    return q, k, v


def timed(forward: Callable[[], Tensor], given: Heads) -> Times:
    """Microseconds of a replayed forward pass, and of a whole one less that."""
    dout = torch.randn_like(forward())
    with torch.no_grad():
        alone = replayed(forward)
    return alone, replayed(lambda: torch.autograd.grad(forward(), given, dout)) - alone


def replayed(call: Callable[[], object]) -> float:
    """Microseconds of one, among as many as take a spell."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):  # the launch that compiles is not recorded
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return microseconds(graph, max(3, round(1e6 * SPELL / microseconds(graph, 3))))


def ours(case: Case) -> Times:
    rows = case.rows()
    given, (spans, tiles) = leaves(*drawn(rows.tokens, case.heads)), make_tiles(rows)
    spans, tiles = (move_record(x, torch.device("cuda")) for x in (spans, tiles))
    return timed(lambda: shared_attention.attend(*given, spans, tiles), given)


def by_table(case: Case) -> Times:
    """cuDNN's"""
    rows = case.rows()
    n, W = len(rows.lengths), int(rows.lengths.max())
    q, k, v = (x.unflatten(0, (n, W)).transpose(1, 2) for x in drawn(n * W, case.heads))
    given = leaves(q, k, v)
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return timed(lambda: F.scaled_dot_product_attention(*given, is_causal=True, enable_gqa=True), given)


def by_offsets(case: Case) -> Times:
    """torch's for rows of different lengths, in one order"""
    from torch.nn.attention.varlen import varlen_attn

    rows = case.rows()
    q, _, _ = drawn(rows.tokens, case.heads)
    _, k, v = drawn(int(rows.lengths.sum()), case.heads)
    given = leaves(q, k, v)
    queries, keys = (torch.from_numpy(x.astype(np.int32)).cuda() for x in (rows.start, offsets(rows.lengths)))
    sizes = queries, keys, int(rows.own.max()), int(rows.lengths.max())
    how: dict[str, Any] = {"window_size": (-1, 0)}
    if "enable_gqa" in inspect.signature(varlen_attn).parameters:
        how["enable_gqa"] = True
    mode = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("error")
    torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore
    try:
        return timed(lambda: cast(Tensor, varlen_attn(*given, *sizes, **how)), given)
    finally:
        torch.set_deterministic_debug_mode(mode)


def leaves(q: Tensor, k: Tensor, v: Tensor) -> Heads:
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    return q, k, v


def measure(quick: bool) -> Iterator[Row]:
    """Case by case; quick: answers that share a prompt alone."""
    if not torch.cuda.is_available():
        sys.exit("attention: there is no GPU here; `python -m benchmarks.learner` measures a CPU")
    for case in CASES[: 2 if quick else None]:
        found = {side.__name__: side(case) for side in (ours, by_table, by_offsets)}
        say(f"{case.name}: " + ", ".join(f"{name} {a:.0f} + {b:.0f} us" for name, (a, b) in found.items()))
        for i, what in enumerate(("forward", "backward")):
            for peer in ("by_table", "by_offsets"):
                yield note(f"{case.name}, {what}, {peer}", found["ours"][i], unit="us", peer=found[peer][i])


if __name__ == "__main__":
    raise SystemExit(main(measure, __doc__ or ""))
