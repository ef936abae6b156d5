"""On a CPU sampler and learner of a small model, both C++, compute the same hidden states and log-probs to the bit."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from each import each
from torch import Tensor

from hone.data.collate import collate
from hone.engine.params import SampleParams
from hone.engine.runners.native.layers import NativeLayers, why_not_covered
from hone.engine.runners.torch.kv_cache import RowChunk
from hone.model.config import DecoderConfig
from hone.model.decoder import Decoder, same_bits_as_sampler
from hone.model.kernels.cpp.library import library
from hone.model.policy import Policy
from hone.rollout.local import LocalSampler
from hone.types import Batch

pytestmark = pytest.mark.skipif(isinstance(library(), str), reason="there is no C++ compiler")
Shape = tuple[int, int, int]  # E dimensions of a head, H heads of queries, K of keys
# K that divides a vector's lanes lies by column where a head is one vector (decode.cpp); 3 and 6 do not divide them
SHAPES: list[Shape] = [
    (16, 8, 8), (16, 4, 4), (16, 6, 2), (16, 2, 1), (16, 6, 3), (16, 12, 6),
    (32, 4, 4), (32, 4, 2), (32, 3, 3), (48, 2, 2), (64, 2, 2), (64, 2, 1), (64, 3, 3), (80, 2, 2), (128, 2, 1),
]  # fmt: skip
VOCABS = [10, 61, 64, 1100]  # below a panel of products, not of whole ones, of whole ones, more than a block of weights
PROMPTS = [[3, 4, 5, 6, 7] * 5, [9, 8], [1], [2, 3] * 8, [7] * 31, [5, 1, 4]]  # enough for two threads to share
LOGP, BOTH = frozenset({"logp"}), frozenset({"logp", "entropy"})


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def made(shape: Shape, vocab: int = 61) -> Decoder:
    """Weights and gains of which none is a round number, of a shape that C++ samples and learns."""
    E, H, K = shape
    config = DecoderConfig(
        vocab_size=vocab, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=H,
        num_key_value_heads=K, head_dim=E, max_position_embeddings=128, initializer_range=0.2,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        decoder = Decoder(config)
        with torch.no_grad():
            for p in decoder.parameters():
                p.add_(torch.randn_like(p), alpha=0.05)
    if why := why_not_covered(decoder):
        pytest.skip(why)
    assert same_bits_as_sampler(Policy(decoder))
    return decoder


def written(decoder: Decoder, *, group: int, stops: int = 0) -> Batch:
    """What the sampler wrote; stops: tokens that end a row."""
    params = SampleParams(max_tokens=24, stop_ids=frozenset(range(stops)), seed=1)
    batch = collate(LocalSampler(decoder, max_rows=16).sample(PROMPTS, n=group, params=params))
    assert len(batch.gen_logp[batch.mask].unique()) > 0.5 * batch.mask.sum(), "numbers that tell mistakes apart"
    return batch


def read(decoder: Decoder, batch: Batch, *, rows: int | None = None, want: frozenset[str] = LOGP) -> Tensor:
    """The policy's log-probs, so many rows at a time."""
    step = rows or len(batch)
    parts = [Policy(decoder)(batch.rows(slice(i, i + step)), want).logp for i in range(0, len(batch), step)]
    return torch.cat(parts).detach()


def same(logp: Tensor, batch: Batch) -> bool:
    return torch.equal(logp[batch.mask], batch.gen_logp[batch.mask])


def same_as_sampled(shape: Shape, vocab: int = 61, group: int = 8) -> None:
    """With gradients and without, whatever else is asked for; rows of all lengths."""
    decoder = made(shape, vocab)
    batch = written(decoder, group=group, stops=1 + vocab // 20)
    assert group == 1 or len(batch.mask.sum(-1).unique()) > 3, "rows that stop early"
    for want in (LOGP, BOTH):
        assert same(read(decoder, batch, want=want), batch)
        with torch.no_grad():
            assert same(read(decoder, batch, want=want), batch)


@each("vocab", VOCABS)
@each("shape", SHAPES, ids=str)
def test_the_learner_s_log_probs_are_the_sampler_s(shape: Shape, vocab: int):
    same_as_sampled(shape, vocab)


@pytest.mark.parametrize("group", [1, 8])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_so_they_are_for_any_threads_and_groups(shape: Shape, group: int, threads: int):
    same_as_sampled(shape, group=group)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@torch.no_grad()
def test_hidden_states_are_the_same_read_at_once_and_token_by_token(shape: Shape, threads: int):
    decoder, B, T, first = made(shape), 4, 37, 5
    tokens = torch.randint(0, 61, (B, T), generator=torch.Generator().manual_seed(0))
    learned = decoder(tokens)
    layers = NativeLayers(decoder, B, 64)
    prompts = [RowChunk(row=i, start=0, tokens=tuple(tokens[i, :first].tolist())) for i in range(B)]
    assert torch.equal(layers.read(prompts), learned[:, first - 1])
    for t in range(first, T):
        at = torch.full((B,), t)
        assert torch.equal(layers.step(tokens[:, t], at, at, columns=t + 1, even=True), learned[:, t]), t


@pytest.mark.parametrize("layout", ["padded", "shared"])
def test_any_layout_has_the_same_bits(layout: str, threads: int):
    decoder = made((16, 6, 2))
    batch = written(decoder, group=8)
    assert same(Policy(decoder, layout=layout)(batch, LOGP).logp.detach(), batch)


@each("rows", [1, 3, 5])
@each("shape", [(16, 6, 2), (16, 6, 3), (32, 4, 4), (64, 2, 1)], ids=str)
def test_any_micro_batch_of_one_thread_has_the_same_bits(shape: Shape, rows: int):
    decoder = made(shape)
    batch = written(decoder, group=8, stops=3)
    assert same(read(decoder, batch, rows=rows), batch)


@pytest.mark.parametrize("rows", [2, 4, 6])
def test_any_micro_batch_that_two_threads_can_share_has_the_same_bits(rows: int, threads: int):
    decoder = made((16, 6, 2))
    batch = written(decoder, group=4)
    alone = replace(batch, group=torch.arange(len(batch)))  # a group stays with a thread
    assert same(read(decoder, alone, rows=rows), batch)


def test_torch_s_own_layers_have_others():
    # or the comparisons above would hold whatever the order of additions
    decoder = made((16, 6, 2))
    batch = written(decoder, group=8)
    decoder.backends = ()
    plain = read(decoder, batch)
    assert not same(plain, batch)
    torch.testing.assert_close(plain[batch.mask], batch.gen_logp[batch.mask], rtol=0, atol=1e-4)
