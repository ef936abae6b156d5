"""Rows of different lengths that share tokens: the spans name the same keys and queries as the tables do."""

from pathlib import Path
from typing import Any

import pytest
import torch
from apart import started
from fast_models import fed
from torch import Tensor

from hone.model import varlen
from hone.model.ragged import Rows
from hone.model.shared import lay_out_shared

HEADS, KEYS, SIZE = 4, 2, 8


def slow(
    q: Tensor, k: Tensor, v: Tensor, queries: Tensor, keys: Tensor, most_q: int, most_k: int, **how: Any
) -> Tensor:
    """What torch says its kernel computes: each row apart, causal from the end, looking back window_size[0] keys."""
    assert how.pop("enable_gqa")
    back, ahead = how.pop("window_size")
    assert not how
    assert ahead == 0
    out: list[Tensor] = []
    for a, b, c, d in zip(queries[:-1], queries[1:], keys[:-1], keys[1:], strict=True):
        n, m = int(b - a), int(d - c)
        assert n <= most_q
        assert m <= most_k
        far = torch.arange(n)[:, None] + (m - n) - torch.arange(m)
        seen = (far >= 0) & ((far <= back) | (back < 0))
        kk, vv = (x[c:d].repeat_interleave(HEADS // KEYS, 1) for x in (k, v))
        score = torch.einsum("qhe,khe->hqk", q[a:b], kk) * SIZE**-0.5
        weights = score.masked_fill(~seen, float("-inf")).softmax(-1)
        out.append(torch.einsum("hqk,khe->qhe", weights, vv))
    return torch.cat(out)


def inputs(tokens: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(1, n, tokens, SIZE, generator=generator, dtype=dtype).requires_grad_() for n in (HEADS, KEYS, KEYS)
    ]


def with_gradients(rows: Rows, given: list[Tensor]) -> list[Tensor]:
    out = rows.attend(*given, shares_keys=True)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    return [out.detach(), *torch.autograd.grad((out * weights.to(out)).sum(), given)]


def rows_of(lengths: list[int], group: list[int], common: int) -> Rows:
    """Rows of a group begin with the same tokens."""
    B, W = len(lengths), max(lengths)
    tokens = torch.arange(B * W).view(B, W) + 1
    for row, g in enumerate(group):
        tokens[row, :common] = tokens[group.index(g), :common]
    lines = lay_out_shared(tokens, torch.arange(W) < torch.tensor(lengths)[:, None], torch.tensor(group))
    assert isinstance(lines.mask, Rows)
    return lines.mask


CASES = {
    "groups": rows_of([9, 7, 4, 9, 8], [0, 0, 1, 1, 0], 4),
    "nothing in common": rows_of([9, 7, 3], [0, 1, 2], 2),
    "a row that is another's beginning": rows_of([6, 4, 6], [0, 0, 0], 4),
    "an empty row": rows_of([5, 0, 5], [0, 0, 1], 2),
    "one row twice": rows_of([5, 5, 3], [0, 0, 1], 5),
}


@pytest.mark.parametrize("window", [0, 1, 3])
@pytest.mark.parametrize("name", CASES)
def test_spans_give_what_tables_give(name: str, window: int, monkeypatch: pytest.MonkeyPatch):
    rows = CASES[name]
    rows = Rows(cells=rows.cells, shapes=rows.shapes, owner=rows.owner, spans=rows.spans, window=window)
    given = inputs(len(rows.owner))
    tables = with_gradients(rows, given)
    monkeypatch.setattr(varlen, "usable", lambda q: True)
    monkeypatch.setattr(varlen, "_kernel", lambda: (slow, True))
    for a, b in zip(tables, with_gradients(rows, given), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_a_sum_over_cells_is_the_gathers_gradient():
    spans = CASES["groups"].spans
    x = torch.randn(len(spans.begin) - 1, 3, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: varlen.gathered(x, spans), (x,))
    assert spans.shares
    assert not CASES["nothing in common"].spans.shares


KERNEL = """
import interpreted, torch
from test_varlen import CASES
from hone.model.kernels.gather import sum_lines
for rows in CASES.values():
    spans = rows.spans
    dy, tokens = torch.randn(len(spans.cells), 700), len(spans.begin) - 1
    dx = torch.empty(tokens, 700)
    sum_lines[(-(-tokens // 8), 11)](dy, spans.order, spans.begin, dx, tokens, 700, 700, BL=8, BW=64)
    torch.testing.assert_close(dx, torch.zeros(tokens, 700).index_add_(0, spans.cells, dy), rtol=0, atol=1e-5)
"""


def test_the_kernel_adds_what_torch_adds():
    pytest.importorskip("triton", reason="Triton is not installed")
    started("-c", KERNEL, cwd=Path(__file__).parent)


def test_lists_of_the_shared_layout_have_spans():
    mask = fed("shared")["mask"]
    assert mask.spans.queries[-1] == len(mask.owner)
    assert mask.spans.most_keys == 11


@pytest.mark.gpu
@pytest.mark.parametrize("window", [0, 3])
@pytest.mark.parametrize("name", CASES)
def test_on_a_gpu_torchs_kernel_gives_what_tables_give(name: str, window: int):
    rows = CASES[name]
    exact = Rows(cells=rows.cells, shapes=rows.shapes, owner=rows.owner, spans=rows.spans, window=window)
    given = inputs(len(rows.owner))
    truth = with_gradients(exact, given)
    fields = {f: getattr(exact.spans, f) for f in varlen.Spans.__slots__}
    spans = varlen.Spans(**{f: x.cuda() if isinstance(x, Tensor) else x for f, x in fields.items()})
    there = Rows(cells=exact.cells.cuda(), shapes=exact.shapes, owner=exact.owner.cuda(), spans=spans, window=window)
    half = [x.detach().cuda().to(torch.bfloat16).requires_grad_() for x in given]
    out = there.attend(*half, shares_keys=True)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64).cuda()
    found = [out.detach(), *torch.autograd.grad((out * weights.to(out)).sum(), half)]
    for a, b in zip(truth, found, strict=True):
        assert (a - b.cpu().double()).norm() < 0.02 * a.norm()
