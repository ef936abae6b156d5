"""Layouts: however the table is laid out, each token comes back to its cell."""

import pytest
import torch

from hone.errors import HoneError
from hone.model.layout import (
    block_causal,
    cells,
    first_fit_decreasing,
    hidden_states,
    lay_out,
    lines_of,
    scatter,
)
from hone.train.learner import micro_batches

torch.set_num_threads(1)


def test_first_fit_decreasing_by_hand():
    # longest first: 6 -> line 0; 5 -> line 1; 3 (row 0) -> line 1 (5+3=8); 2 -> line 0 (6+2=8); 3 (row 4) -> line 2
    assert first_fit_decreasing([3, 6, 2, 5, 3], 8) == ([1, 0, 0, 1, 2], [5, 0, 6, 0, 0])


def test_rows_without_tokens_take_no_room():
    assert first_fit_decreasing([0, 4, 0], 4) == ([0, 0, 0], [0, 0, 0])


def test_block_mask_by_hand():
    # two documents and an empty slot
    seen = block_causal(torch.tensor([[1, 1, 2, 2, 0]]))[0, 0].int().tolist()
    assert seen == [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 0, 0, 1]]


def test_padded_layout_compacts_and_trims(make_batch):
    batch = make_batch([[5, 6, 7], [8, 9]], place="left", extra=4, garbage=-100)
    lines = lay_out(batch.inputs, batch.real)
    assert lines.tokens.tolist() == [[5, 6, 7], [8, 9, 0]]
    assert lines.mask is None
    assert lines.positions is None


def test_packed_layout_restarts_positions(make_batch, monkeypatch):
    monkeypatch.setattr("hone.model.layout.LINE", 5)
    batch = make_batch([[5, 6], [1, 2, 3], [8, 9]], place="middle", extra=2)
    lines = lay_out(batch.inputs, batch.real, layout="packed")
    assert lines.tokens.tolist() == [[1, 2, 3, 5, 6], [8, 9, 0, 0, 0]]
    assert lines.positions is not None
    assert lines.positions.tolist() == [[0, 1, 2, 0, 1], [0, 1, 0, 0, 0]]


def test_a_packed_line_has_room_for_512_by_default(make_batch, rows):
    batch = make_batch(rows)
    assert lay_out(batch.inputs, batch.real, layout="packed").tokens.shape == (1, sum(map(len, rows)))


def test_each_token_comes_back_to_its_cell(make_batch, rows, monkeypatch):
    for layout, line in (("padded", 512), ("packed", 12), ("packed", 20)):
        monkeypatch.setattr("hone.model.layout.LINE", line)
        for place in ("left", "right", "middle", "both"):
            batch = make_batch(rows, place=place, extra=3)
            lines = lay_out(batch.inputs, batch.real, layout=layout)
            assert torch.equal(lines.spread(lines.tokens.double()), batch.inputs * batch.real.double())
            assert torch.equal(lines.gather(lines.tokens[..., None], cells(batch.mask))[:, 0], batch.inputs[batch.mask])


def test_scatter_is_the_inverse_of_gather(make_batch, rows):
    batch = make_batch(rows, place="both", extra=2)
    back = scatter(batch.inputs[batch.mask].double(), cells(batch.mask), batch.mask)
    assert torch.equal(back, torch.where(batch.mask, batch.inputs, 0).double())


def test_an_unknown_layout_is_named(make_batch, rows):
    batch = make_batch(rows)
    with pytest.raises(HoneError, match='"ragged": use one of padded, packed, shared'):
        lay_out(batch.inputs, batch.real, layout="ragged")


def test_a_packed_line_is_as_long_as_the_longest_row(make_batch, rows, monkeypatch):
    monkeypatch.setattr("hone.model.layout.LINE", 2)
    batch = make_batch(rows)
    lines = lay_out(batch.inputs, batch.real, layout="packed")
    assert lines.tokens.shape[1] == max(map(len, rows))


def test_a_packed_line_may_be_longer_than_the_context_but_a_row_may_not(make_decoder, make_batch, rows):
    batch = make_batch(rows)
    lines = lay_out(batch.inputs, batch.real, layout="packed")
    assert lines.tokens.shape[1] > 32
    hidden_states(make_decoder(max_position_embeddings=32), lines)
    with pytest.raises(HoneError, match="a row has 12 tokens, the model's context is 11"):
        hidden_states(make_decoder(max_position_embeddings=11), lines)


def test_a_batch_on_a_gpu_is_planned_from_its_copy_on_the_host(make_batch, make_decoder, rows):
    batch = make_batch(rows)
    assert batch.to("cpu").host_copy is None
    there = batch.to("meta")  # a device whose numbers nobody can read
    assert there.host.inputs is batch.inputs
    for index in (slice(1, 3), torch.tensor([2, 0])):
        some = there.rows(index)
        assert torch.equal(some.host.inputs, batch.inputs[index])
        assert some.mask.shape == batch.mask[index].shape
    laid = lines_of(there, make_decoder(), layout="shared")
    assert laid.tokens.is_meta
    assert laid.tokens.shape == lines_of(batch, make_decoder(), layout="shared").tokens.shape
    widths = [len(micro) for micro in micro_batches(there, rows=2)]
    assert widths == [len(micro) for micro in micro_batches(batch, rows=2)]
