"""Passes that are recorded and replayed: the same numbers, whatever changes between two of them."""

import gc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from fast_models import model
from torch import Tensor

from hone.model.backends.fused import cuda_graphs
from hone.model.backends.fused.graph_memory import pad_to_size
from hone.model.backends.registry import second_order
from hone.model.decoder import Decoder
from hone.model.layout import Lines, cells, hidden_states, lay_out_shared
from hone.model.lora import add_lora, use_adapter
from hone.model.policy import Policy, frozen_copy
from hone.model.rows import Rows, Tables, round_size
from hone.types import Batch

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def table(lengths: list[list[int]], *, seed: int = 0, device: str = "cpu") -> Batch:
    """Groups of rows of these lengths that begin with the same two tokens."""
    generator, width = torch.Generator().manual_seed(seed), max(n for group in lengths for n in group)
    flat = [(g, n) for g, group in enumerate(lengths) for n in group]
    tokens = torch.randint(0, 61, (len(flat), width + 1), generator=generator)
    for row, (g, _) in enumerate(flat):
        tokens[row, :2] = g
    real = torch.arange(width) < torch.tensor([n for _, n in flat])[:, None]
    group = torch.tensor([g for g, _ in flat])
    return Batch(inputs=tokens[:, :-1], targets=tokens[:, 1:], mask=real, real=real, group=group).to(device)


BATCH = [[5, 9, 7], [3, 4], [11, 2, 6]]
OTHER = [[6, 8, 6], [3, 5], [11, 2, 6]]  # as many tokens when it is rounded up


def lines(batch: Batch) -> Lines:
    return lay_out_shared(batch.inputs, batch.real, batch.group, kernels=batch.inputs.is_cuda)


def computed(decoder: Decoder, batch: Batch, *, graphs: bool) -> dict[str, Tensor]:
    """Hidden states and all gradients."""
    decoder.backends = ("fused", "graphs") if graphs else ("fused",)
    decoder.zero_grad()
    laid = lines(batch)
    hidden = laid.gather(hidden_states(decoder, laid), cells(batch.mask))
    weights = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    (hidden * weights.to(hidden)).sum().backward()
    found = {n: p.grad.clone() for n, p in decoder.named_parameters() if p.grad is not None}
    return {"": hidden.detach().clone(), **found}


def apart(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(((a[n] - b[n]).norm() / (1e-30 + a[n].norm())).item() for n in a)


def recordings(decoder: Decoder) -> int:
    return len(cuda_graphs._known[decoder].passes) if decoder in cuda_graphs._known else 0


def made(name: str, device: str) -> tuple[Decoder, float]:
    """The model, and how far two ways of computing may be apart in it."""
    return (model(name), 1e-12) if device == "cpu" else (model(name, torch.bfloat16).cuda(), 0.03)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["llama", "adapters"])
def test_a_pass_that_is_not_recorded_yet_gives_the_bits_of_its_replay(
    name: str, device: str, monkeypatch: pytest.MonkeyPatch
):
    """What is recorded depends on what came before, which a resumed run has forgotten."""
    decoder, _ = made(name, device)
    batch = table(BATCH, device=device)
    with monkeypatch.context() as patch:
        patch.setattr(cuda_graphs, "_recorded", lambda *_: None)
        early = computed(decoder, batch, graphs=True)
        laid = lines(batch)
        assert hidden_states(decoder, laid).shape[1] == round_size(laid.tokens.numel()) > laid.tokens.numel()
    replayed = computed(decoder, batch, graphs=True)
    assert recordings(decoder) == 1
    assert {n for n in early if not torch.equal(early[n], replayed[n])} == set()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["llama", "every option", "adapters"])
def test_a_replay_gives_what_the_pass_gives_on_every_batch_of_its_size(name: str, device: str):
    decoder, most = made(name, device)
    for lengths in (BATCH, OTHER, BATCH):
        batch = table(lengths, seed=sum(lengths[0]), device=device)
        plain = computed(decoder, batch, graphs=False)
        assert apart(plain, computed(decoder, batch, graphs=True)) < most
    assert recordings(decoder) == 1


@pytest.mark.parametrize("device", DEVICES)
def test_rows_of_one_length_that_share_nothing(device: str):
    decoder, most = made("llama", device)
    batch = table([[8], [8], [8]], device=device)
    plain = computed(decoder, batch, graphs=False)
    assert all(apart(plain, computed(decoder, batch, graphs=True)) < most for _ in range(2))
    assert recordings(decoder) == 1


@pytest.mark.parametrize("device", DEVICES)
def test_an_optimisers_step_and_weights_that_move_are_seen(device: str):
    decoder, most = made("llama", device)
    batch = table(BATCH, device=device)
    first = computed(decoder, batch, graphs=True)
    with torch.no_grad():
        for p in decoder.parameters():
            p.mul_(1.1)
    second = computed(decoder, batch, graphs=True)
    assert apart(second, computed(decoder, batch, graphs=False)) < most
    assert apart(first, second) > 0.01
    for p in decoder.parameters():
        p.data = p.data * 1.1
    assert apart(computed(decoder, batch, graphs=True), computed(decoder, batch, graphs=False)) < most


@pytest.mark.parametrize("device", DEVICES)
def test_gradients_of_two_passes_add_up(device: str):
    decoder, most = made("llama", device)
    decoder.backends = ("fused", "graphs")
    batches = [table(lengths, seed=i, device=device) for i, lengths in enumerate((BATCH, OTHER))]

    def gradient(*chosen: Batch) -> Tensor:
        decoder.zero_grad()
        for batch in chosen:
            hidden_states(decoder, lines(batch)).square().mean().backward()
        first: Any = decoder.model.layers[0]
        return first.mlp.down_proj.weight.grad.clone()

    one, other = (gradient(batch) for batch in batches)
    assert (one - other).norm() > 0.01 * one.norm()
    assert (gradient(*batches) - one - other).norm() < most * one.norm()
    assert recordings(decoder) == 1


@pytest.mark.parametrize("device", DEVICES)
def test_a_second_pass_before_the_firsts_gradient_is_computed_as_it_is(device: str):
    decoder, most = made("llama", device)
    decoder.backends = ("fused", "graphs")
    batch, other = table(BATCH, device=device), table(OTHER, device=device)
    computed(decoder, batch, graphs=True)

    def gradient(order: Callable[[list[Tensor]], list[Tensor]]) -> Tensor:
        decoder.zero_grad()
        both = [hidden_states(decoder, lines(b)) for b in (batch, other)]
        for h, b in zip(order(both), order([batch.inputs, other.inputs]), strict=True):  # pyright: ignore
            (h.square().mean() * float(b.sum())).backward()
        return decoder.model.norm.weight.grad.clone()  # pyright: ignore

    forth = gradient(lambda x: x)
    back = gradient(lambda x: x[::-1])
    assert (forth - back).norm() < most * forth.norm()


def test_a_pass_whose_gradient_nobody_asks_for_blocks_none():
    decoder, _ = made("llama", "cpu")
    decoder.backends = ("graphs",)
    laid = lines(table(BATCH))
    hidden = hidden_states(decoder, laid)
    graphs = cuda_graphs._known[decoder]
    assert graphs.busy()
    del hidden
    gc.collect()
    assert not graphs.busy()
    with torch.no_grad():
        hidden_states(decoder, laid)
    assert not graphs.busy()


def test_a_gradient_is_given_once():
    decoder, _ = made("llama", "cpu")
    decoder.backends = ("graphs",)
    out = hidden_states(decoder, lines(table(BATCH))).sum()
    out.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match=r"decoder\.backends"):
        out.backward()


def test_an_adapter_switched_off_is_another_recording():
    decoder, most = made("llama", "cpu")
    add_lora(decoder, rank=2, alpha=4.0, targets=("all-linear",))
    with torch.no_grad():
        for name, p in decoder.named_parameters():
            if "lora_B" in name:
                p.normal_()
    laid = lines(table(BATCH))

    def hidden(*, graphs: bool) -> Tensor:
        decoder.backends = ("graphs",) if graphs else ()
        return hidden_states(decoder, laid)[:, : laid.tokens.numel()]

    with torch.no_grad():
        on, plain_on = hidden(graphs=True), hidden(graphs=False)
        with use_adapter(decoder, None):
            off, plain_off = hidden(graphs=True), hidden(graphs=False)
    assert (on - off).norm() > 0.01 * on.norm()
    for replayed, plain in ((on, plain_on), (off, plain_off)):
        assert (replayed - plain).norm() < most * plain.norm()
    assert recordings(decoder) == 2


def test_a_copy_has_recordings_of_its_own():
    decoder, _ = made("llama", "cpu")
    policy = Policy(decoder)
    computed(decoder, table(BATCH), graphs=True)
    assert recordings(frozen_copy(policy).decoder) == 0


def test_few_sizes_are_kept_and_rare_ones_are_not_recorded(monkeypatch: pytest.MonkeyPatch):
    decoder, _ = made("llama", "cpu")
    monkeypatch.setattr(cuda_graphs, "SIZES", 2)
    for rows in (2, 4, 6, 8):
        computed(decoder, table([[50, 3]] * rows), graphs=True)
    assert recordings(decoder) == 2


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("sizes", [1, 2, 24])
def test_sizes_that_come_and_go_give_the_gradients_of_the_pass(
    sizes: int, device: str, monkeypatch: pytest.MonkeyPatch
):
    decoder, most = made("llama", device)
    monkeypatch.setattr(cuda_graphs, "SIZES", sizes)
    for rows in (2, 4, 6, 2, 8, 4, 2):
        batch = table([[50, 3]] * rows, seed=rows, device=device)
        plain = computed(decoder, batch, graphs=False)
        assert apart(plain, computed(decoder, batch, graphs=True)) < most
    assert recordings(decoder) == min(sizes, 4)


@pytest.mark.parametrize("device", DEVICES)
def test_gradients_are_recorded_again_when_passes_without_have_taken_all_places(
    device: str, monkeypatch: pytest.MonkeyPatch
):
    decoder, most = made("llama", device)
    monkeypatch.setattr(cuda_graphs, "SIZES", 2)
    batches = [table([[50, 3]] * rows, seed=rows, device=device) for rows in (2, 4, 6, 8)]
    computed(decoder, batches[0], graphs=True)
    with torch.no_grad():
        for batch in batches[1:3]:
            hidden_states(decoder, lines(batch))
    assert not any(key[1] for key in cuda_graphs._known[decoder].passes), "those with gradients are forgotten"
    for batch in (batches[3], batches[0]):
        plain = computed(decoder, batch, graphs=False)
        assert apart(plain, computed(decoder, batch, graphs=True)) < most


def test_layers_differentiated_twice_or_hooked_are_not_replayed():
    decoder, _ = made("llama", "cpu")
    decoder.backends = ("graphs",)
    laid = lines(table(BATCH))
    with second_order():
        hidden_states(decoder, laid)
    hook = decoder.model.layers[0].register_forward_pre_hook(lambda *_: None)
    hidden_states(decoder, laid)
    assert recordings(decoder) == 0
    hook.remove()
    hidden_states(decoder, laid)
    assert recordings(decoder) == 1


@pytest.mark.parametrize("window", [0, 4])
def test_rows_that_are_added_change_nothing(window: int):
    decoder, batch = model("llama"), table(BATCH)
    laid = lines(batch)
    assert isinstance(laid.mask, Rows)
    assert laid.positions is not None
    rows = replace(laid.mask, window=window)
    tokens, positions, more = pad_to_size(laid.tokens, laid.positions, rows)
    assert tokens.numel() == 64
    n = laid.tokens.numel()
    plain = decoder(laid.tokens, positions=laid.positions, mask=rows)
    again = decoder(tokens, positions=positions, mask=more)[:, :n]
    assert (again - plain).abs().max() < 1e-12
    spans, before = more.spans, rows.spans
    assert torch.equal(spans.start[: len(before.start)], before.start)
    assert spans.start[len(before.start) :].tolist() == [64]
    assert spans.prefix[len(before.prefix) :].tolist() == [n]
    assert spans.common[len(before.common) :].tolist() == [0]
    assert isinstance(more.by, Tables)
    assert more.by.cells[more.by.owner].tolist() == list(range(64))
