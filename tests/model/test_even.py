"""Rows of about one length attended to in one table: the numbers and gradients of rows attended to one by one."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from apart import started
from fast_models import model
from test_varlen import inputs, with_gradients
from torch import Tensor

from hone.model import even
from hone.model.decoder import Decoder
from hone.model.even import Even, picked, summed
from hone.model.forward import cells, hidden_states
from hone.model.ragged import Rows
from hone.model.shared import lay_out_shared, lines_of
from hone.model.twice import twice_differentiable
from hone.types import Batch

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
ROWS = {
    "a group": ([9, 8, 7, 9], [0, 0, 0, 0], 4),
    "two groups, between each other": ([9, 8, 7, 9, 9], [0, 1, 0, 1, 1], 3),
    "nothing in common": ([9, 8, 7], [0, 1, 2], 2),
    "a row that is another's beginning": ([8, 7, 8], [0, 0, 0], 7),
    "one row twice": ([5, 5, 5], [0, 0, 1], 5),
    "many rows": ([40 - n % 7 for n in range(70)], [n // 7 for n in range(70)], 20),
}


@pytest.fixture(autouse=True)
def any_number_of_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(even, "COPIES", 1e9)


def batch_of(lengths: list[int], group: list[int], common: int, device: str = "cpu") -> Batch:
    """Rows of a group begin with the same tokens."""
    B, W = len(lengths), max(lengths)
    tokens = torch.randint(1, 61, (B, W + 1), generator=torch.Generator().manual_seed(B))
    for row, g in enumerate(group):
        tokens[row, :common] = tokens[group.index(g), :common]
    real = torch.arange(W) < torch.tensor(lengths)[:, None]
    batch = Batch(inputs=tokens[:, :-1], targets=tokens[:, 1:], mask=real, real=real, group=torch.tensor(group))
    return batch.to(device)


def rows_of(name: str) -> tuple[Rows, Rows]:
    """As tables of different widths, and as one."""
    batch = batch_of(*ROWS[name])
    plain, table = (lay_out_shared(batch.inputs, batch.real, batch.group, evenly=way).mask for way in (False, True))
    assert isinstance(plain, Rows)
    assert isinstance(table, Rows)
    return plain, table


@pytest.mark.parametrize("name", ROWS)
def test_one_table_gives_what_rows_give(name: str):
    plain, even = rows_of(name)
    assert isinstance(even.spans, Even)
    given = inputs(len(plain.owner))
    for a, b in zip(with_gradients(plain, given), with_gradients(even, given), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ROWS)
def test_every_cell_and_token_is_named(name: str):
    spans, plain = rows_of(name)[1].spans, rows_of(name)[0]
    assert isinstance(spans, Even)
    n, W = spans.shape
    lengths, U = ROWS[name][0], len(plain.owner)
    assert n - len(lengths) <= len(lengths) / 32
    assert W - max(lengths) <= max(lengths) / 8
    table = spans.cells.view(n, W)
    assert (table >= 0).sum(-1).tolist() == lengths + [0] * (n - len(lengths))
    assert torch.equal(spans.source[spans.owner], torch.arange(U, dtype=torch.int32))
    assert (spans.source >= 0).sum() == U
    at = spans.cells[spans.order[: sum(lengths)]]
    assert torch.equal(at, at.sort().values)
    assert torch.equal(torch.bincount(at, minlength=U).cumsum(0), spans.begin[1:].long())


@pytest.mark.parametrize(
    ("prompt", "answer", "table"), [(16, 64, True), (64, 64, True), (256, 64, False), (1_000, 64, False)]
)
def test_answers_to_long_prompts_are_no_table(prompt: int, answer: int, table: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(even, "COPIES", 1.5)
    batch = batch_of([prompt + 64] * 16, [n // 8 for n in range(16)], prompt)
    mask = lay_out_shared(batch.inputs, batch.real, batch.group, evenly=True).mask
    assert isinstance(mask, Rows)
    assert isinstance(mask.spans, Even) == table


def test_rows_of_many_lengths_are_no_table():
    batch = batch_of([40, 3, 2, 1], [0, 1, 2, 3], 1)
    mask = lay_out_shared(batch.inputs, batch.real, batch.group, evenly=True).mask
    assert isinstance(mask, Rows)
    assert not isinstance(mask.spans, Even)


def test_gradients_by_finite_differences():
    _, even = rows_of("two groups, between each other")
    spans = even.spans
    assert isinstance(spans, Even)
    q, k, v = (x[0].transpose(0, 1).detach().requires_grad_() for x in inputs(len(spans.owner)))
    attend = torch.autograd.gradcheck(lambda *x: spans.attend(*x, shares_keys=True), (q, k, v))
    assert attend


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("name", ["llama", "normed heads", "adapters with biases"])
def test_a_decoder_that_attends_in_one_table_gives_the_same(name: str, graphs: bool, device: str):
    found: list[dict[str, Tensor]] = []
    for way in (False, True):
        decoder = model(name, torch.float64 if device == "cpu" else torch.bfloat16).to(device)
        decoder.even_rows, decoder.fast_layers, decoder.graphs = way, True, graphs
        batch = batch_of(*ROWS["many rows"], device)
        found.append(computed(decoder, batch, even=way))
        if graphs:  # replayed on other rows of the same size, and again on these
            computed(decoder, batch_of(*ROWS["many rows"][:2], 19, device), even=way)
            again = computed(decoder, batch, even=way)
            assert all(distance(found[-1][n], x) <= (0 if device == "cpu" else 0.02) for n, x in again.items())
    assert all(distance(found[0][n], x) < (1e-12 if device == "cpu" else 0.05) for n, x in found[1].items())


def computed(decoder: Decoder, batch: Batch, *, even: bool) -> dict[str, Tensor]:
    """Hidden states and all gradients."""
    decoder.zero_grad()
    laid = lines_of(batch, decoder, layout="shared")
    assert isinstance(laid.mask, Rows)
    assert isinstance(laid.mask.spans, Even) == even
    hidden = laid.gather(hidden_states(decoder, laid), cells(batch.mask))
    weights = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    (hidden * weights.to(hidden)).sum().backward()
    return {"": hidden.detach().clone()} | {
        n: p.grad.clone() for n, p in decoder.named_parameters() if p.grad is not None
    }


def distance(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / a.double().norm())


def test_windows_and_fixed_orders_are_attended_to_row_by_row():
    batch = batch_of(*ROWS["a group"])
    decoder = model("every option")
    decoder.even_rows = True
    mask = lines_of(batch, decoder, layout="shared").mask
    assert isinstance(mask, Rows)
    assert not isinstance(mask.spans, Even), "it has a window"
    decoder = model("llama")
    mask = lines_of(batch, decoder, layout="shared").mask
    assert isinstance(mask, Rows)
    assert not isinstance(mask.spans, Even), "on a CPU nobody asked for it"


@pytest.mark.gpu
@pytest.mark.parametrize("fixed", [False, True])
def test_on_a_gpu_a_fixed_order_of_sums_is_kept(fixed: bool):
    batch, decoder = batch_of(*ROWS["a group"], "cuda"), model("llama", torch.bfloat16).cuda()
    torch.use_deterministic_algorithms(fixed)
    try:
        mask = lines_of(batch, decoder, layout="shared").mask
    finally:
        torch.use_deterministic_algorithms(False)
    assert isinstance(mask, Rows)
    assert isinstance(mask.spans, Even) != fixed


def test_tokens_that_fill_a_list_up_take_part_in_nothing():
    _, even = rows_of("a group")
    assert isinstance(even.spans, Even)
    U = len(even.spans.owner)
    given = inputs(U + 5)
    longer = replace(even, spans=even.spans.filled(5))
    out, *gradients = with_gradients(longer, given)
    assert not out[0, U:].any()
    assert not any(g[0, :, U:].any() for g in gradients)
    short = [x[:, :, :U].detach().requires_grad_() for x in given]
    assert torch.equal(out[:, :U], even.attend(*short, shares_keys=True))


KERNELS = """
import interpreted, torch
from test_even import rows_of, ROWS
from hone.model import even
from hone.model import elementwise, turning
even.COPIES = 1e9
from hone.model.kernels.gather import pick_lines, sum_lines

def turned(spans, H=3, K=2, E=8):
    U, A = len(spans.owner), H + 2 * K
    y, cos, sin = torch.randn(U, A, E), torch.randn(U, E), torch.randn(U, E)
    for x in (cos, sin):
        x[:, E // 2 :] = x[:, : E // 2]
    grads = [torch.randn(*spans.shape, h, E) for h in (H, K, K)]
    for x in grads:
        x.view(-1, x[0, 0].numel())[spans.cells < 0] = 0
    grads[0].view(-1, H * E)[spans.source < 0] = 0
    plain = [turning.turned_into(y.clone(), cos, sin, spans, heads=H + K), turning.turned_back(*grads, cos, sin, spans)]
    kernels = turning.has_kernels, elementwise.has_kernels
    turning.has_kernels = elementwise.has_kernels = lambda x: True
    there = [turning.turned_into(y.clone(), cos, sin, spans, heads=H + K), turning.turned_back(*grads, cos, sin, spans)]
    turning.has_kernels, elementwise.has_kernels = kernels
    for a, b in zip(plain, there):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)

for name in ROWS:
    spans = rows_of(name)[1].spans
    x = torch.randn(len(spans.cells), 300)[:, :200]
    for index in (spans.owner, spans.filled(3).owner):
        y = torch.full((len(index), 200), 7.0)
        pick_lines[(-(-len(index) // 8),)](x, index, y, len(index), 300, 200, BL=8, BW=64)
        assert torch.equal(y, even.picked(x, index))
    begin = spans.filled(3).begin
    y = torch.full((len(begin) - 1, 200), 7.0)
    sum_lines[(-(-len(y) // 8), 4)](x, spans.order, begin, y, len(y), 300, 200, BL=8, BW=64)
    torch.testing.assert_close(y, even.summed(x, spans.order, begin), rtol=0, atol=1e-5)
    turned(spans.filled(3))
"""


def test_the_kernels_give_what_torch_gives():
    pytest.importorskip("triton", reason="Triton is not installed")
    started("-c", KERNELS, cwd=Path(__file__).parent)


def test_lines_by_hand():
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    assert picked(x, torch.tensor([2, -1, 0])).tolist() == [[5.0, 6.0], [0.0, 0.0], [1.0, 2.0]]
    order, begin = torch.tensor([1, 0, 2, 2]), torch.tensor([0, 1, 1, 4])
    assert summed(x, order, begin).tolist() == [[3.0, 4.0], [0.0, 0.0], [11.0, 14.0]]


@pytest.mark.parametrize("name", ROWS)
def test_where_gradients_are_differentiated_again_the_table_is_attended_to_plainly(name: str):
    plain, even = rows_of(name)
    given = inputs(len(even.spans.owner))  # pyright: ignore[reportAttributeAccessIssue]
    with twice_differentiable():
        out = even.attend(*given, shares_keys=True)
        first = torch.autograd.grad(out.square().sum(), given, create_graph=True)
        second = torch.autograd.grad(torch.stack([g.square().sum() for g in first]).sum(), given)
        exact = plain.attend(*given, shares_keys=True)
        truth = torch.autograd.grad(exact.square().sum(), given, create_graph=True)
        again = torch.autograd.grad(torch.stack([g.square().sum() for g in truth]).sum(), given)
    for a, b in zip([out, *first, *second], [exact, *truth, *again], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
