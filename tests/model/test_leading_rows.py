"""Rows that begin alike read one row's memory: which row leads, until when, and that no number depends on it."""

import pytest
import torch

from hone.engine.params import SampleParams
from hone.engine.runner import PromptChunk, Seat
from hone.engine.runners.native.layers import NativeLayers, why_not_covered
from hone.engine.runners.native.runner import NativeRunner
from hone.engine.runners.torch.kv_cache import Slab
from hone.model.config import DecoderConfig
from hone.model.decoder import Decoder
from hone.rollout.local import LocalSampler

CONFIG = DecoderConfig(
    vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=4, head_dim=16, max_position_embeddings=96, initializer_range=0.3,
)  # fmt: skip


def leads(slab: Slab) -> list[tuple[int, int]]:
    return list(zip(slab.lead.tolist(), slab.common.tolist(), strict=True))


@pytest.fixture
def slab() -> Slab:
    return Slab(CONFIG, 6, 20, like=torch.zeros(0))


def test_copies_read_the_row_that_they_are_copies_of(slab: Slab):
    slab.copy(1, [1, 2, 3], 9)
    assert leads(slab) == [(0, 0), (1, 0), (1, 9), (1, 9), (4, 0), (5, 0)]
    slab.copy(2, [4], 7)  # of a copy: fewer columns of the first
    slab.copy(3, [5], 12)  # or no more of them than are the first one's
    assert leads(slab)[4:] == [(1, 7), (1, 9)]


def test_a_row_that_is_written_leads_no_more(slab: Slab):
    slab.copy(1, [2, 3], 9)
    slab.written([(1, 9)])  # it goes on after what they share
    assert leads(slab)[2:4] == [(1, 9), (1, 9)]
    slab.written([(2, 4)])  # one of them has other columns of its own
    assert leads(slab)[2:4] == [(2, 0), (1, 9)]
    slab.written([(1, 8)])
    assert leads(slab)[3] == (3, 0)


def test_a_row_that_is_copied_over_or_cleared_leads_no_more(slab: Slab):
    slab.copy(1, [2], 9)
    slab.copy(0, [1], 5)
    assert leads(slab)[:3] == [(0, 0), (0, 5), (2, 0)]
    slab.copy(1, [3], 5)
    assert leads(slab)[3] == (0, 5)
    slab.clear([0])
    assert all(common == 0 for _, common in leads(slab))
    slab.copy(4, [5], 3)
    slab.copy(5, [4], 3)  # back again: neither leads the other in a circle
    assert leads(slab)[4:] == [(5, 3), (5, 0)]


def made(kv_heads: int, head_dim: int) -> Decoder:
    config = {**vars_of(CONFIG), "num_key_value_heads": kv_heads, "head_dim": head_dim}
    torch.manual_seed(0)
    decoder = Decoder(DecoderConfig(**config))
    if why := why_not_covered(decoder):
        pytest.skip(why)
    return decoder


def vars_of(config: DecoderConfig) -> dict[str, object]:
    return {name: getattr(config, name) for name in config.__dataclass_fields__}


SHAPES = [(4, 16), (2, 16), (1, 16), (4, 32), (2, 64)]


@pytest.mark.parametrize(("kv_heads", "head_dim"), SHAPES)
def test_a_row_reads_the_leading_ones_memory_and_not_its_own_copy(kv_heads: int, head_dim: int):
    prompt = tuple(3 + i % 50 for i in range(37))
    written: list[list[float]] = [[], []]
    for spoilt in (0, 1):
        runner = NativeRunner(made(kv_heads, head_dim), max_rows=3, capacity=60)
        assert isinstance(runner.layers, NativeLayers)
        params = SampleParams(max_tokens=12, seed=5, stop_ids=frozenset())
        seats = tuple(Seat(random_id=i, row=i, blocks=(i,), params=params, limit=12) for i in range(3))
        part = PromptChunk(prompt=prompt, start=0, end=len(prompt), blocks=(0,), seats=seats)
        runner.prefill([part])
        assert runner.layers.slab.common.tolist() == [0, 37, 37]
        if spoilt:  # what it may read of another row: whole vectors of scores
            with torch.inference_mode():
                for x in runner.layers.slab.layers:
                    x[:, 1:, :, :32] = torch.nan
        for _ in range(11):
            done = runner.decode(3).read()
            written[spoilt] += [*done.token.tolist(), *done.logp.tolist()]
    assert written[0] == written[1]


@pytest.mark.parametrize(("kv_heads", "head_dim"), SHAPES)
def test_groups_write_the_same_as_rows_alone_while_rows_change_hands(kv_heads: int, head_dim: int):
    """Answers end early and their rows go to other prompts, of which some begin as one that is still written."""
    decoder = made(kv_heads, head_dim)
    draw = torch.Generator().manual_seed(0)
    prompts = [torch.randint(3, 64, (n,), generator=draw).tolist() for n in (40, 7, 18, 33, 16, 25)]
    prompts += [[*prompts[0][:35], 9, 8], [*prompts[3][:20], 5]]
    params = SampleParams(max_tokens=30, stop_ids=frozenset(range(3, 9)), seed=3)
    together = LocalSampler(decoder, max_rows=5).sample(prompts, n=4, params=params)
    wide = LocalSampler(decoder, max_rows=32).sample(prompts, n=4, params=params)
    assert [(r.tokens, r.gen_logp) for g in together for r in g] == [(r.tokens, r.gen_logp) for g in wide for r in g]
    lengths = {sum(r.mask) for g in together for r in g}
    assert len(lengths) > 5
    whole = NativeLayers(decoder, 1, 90)
    for group in together:  # and as a row that nobody shares anything with
        for rollout in group[:2]:
            tokens = torch.tensor(rollout.tokens)
            at = torch.arange(len(tokens))
            with torch.inference_mode():
                whole.renew()
                assert whole._covered()
                hidden = whole._pass(tokens, torch.zeros_like(at), at, at, apart=False)
                logp = whole.logits(hidden).double().log_softmax(-1)[at[:-1], tokens[1:]]
            mask = torch.tensor(rollout.mask[1:])
            assert torch.allclose(logp[mask], torch.tensor(rollout.gen_logp[1:]).double()[mask], atol=1e-5)
