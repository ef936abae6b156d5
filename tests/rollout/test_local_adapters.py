"""Adapters by request: rows of several adapters in one call are what each gives alone."""

from functools import partial

import pytest
import torch

from hone.engine.params import SampleParams
from hone.errors import HoneError
from hone.model.config import DecoderConfig
from hone.model.decoder import Decoder
from hone.model.lora import add_lora, lora_parameters, use_adapter
from hone.rollout.local import LocalSampler

torch.set_num_threads(1)

VOCAB = 23
PARAMS = SampleParams(max_tokens=9, stop_ids=frozenset({0, 1}), temperature=0.9, seed=5)
PROMPTS = [[3, 4], [5, 6, 7, 8, 9], [3, 4], [2], [5, 6, 7, 8, 9], [11, 12, 13]]
MIXED = ["one", None, "two", "one", "two", None]


def base() -> Decoder:
    config = DecoderConfig(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=32, initializer_range=0.3,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Decoder(config).double()


def add(decoder: Decoder, name: str, seed: int) -> Decoder:
    add_lora(decoder, name=name, rank=2, alpha=8.0, targets=("all-linear",), seed=seed)
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in lora_parameters(decoder):
            p.copy_(torch.randn(p.shape, generator=g, dtype=torch.float64) * 0.4)
    return decoder


@pytest.fixture
def both() -> Decoder:
    return add(add(base(), "one", 1), "two", 2)


def sampler(decoder: Decoder, **settings) -> LocalSampler:
    return LocalSampler(decoder, switch=partial(use_adapter, decoder), **settings)


@pytest.mark.parametrize("max_rows", [512, 3])
def test_rows_of_several_adapters_are_what_each_gives_alone(both, max_rows):
    alone = {"one": add(base(), "one", 1), "two": add(base(), "two", 2), None: base()}
    groups = sampler(both, max_rows=max_rows).sample(PROMPTS, n=2, params=PARAMS, first_request=40, adapter=MIXED)
    for i, (prompt, name, group) in enumerate(zip(PROMPTS, MIXED, groups, strict=True)):
        expected = LocalSampler(alone[name]).sample([prompt], n=2, params=PARAMS, first_request=40 + 2 * i)[0]
        assert [r.tokens for r in group] == [r.tokens for r in expected]
        for got, other in zip(group, expected, strict=True):
            assert list(got.gen_logp) == pytest.approx(list(other.gen_logp), abs=1e-12)
    # the same prompt with the same numbers, under another adapter, is another completion
    swapped = sampler(both).sample(PROMPTS, n=2, params=PARAMS, first_request=40, adapter=[*MIXED[1:], MIXED[0]])
    assert [r.tokens for g in swapped for r in g] != [r.tokens for g in groups for r in g]


def test_rows_side_by_side_are_the_same_bits(both):
    # each adapter's prompts one after the other: the waves are those of separate calls
    names = ["two", "two", "two", None, None, None]
    together = sampler(both).sample(PROMPTS, n=2, params=PARAMS, adapter=names)
    first = sampler(both).sample(PROMPTS[:3], n=2, params=PARAMS, adapter="two")
    second = sampler(both).sample(PROMPTS[3:], n=2, params=PARAMS, first_request=6, adapter=[None] * 3)
    assert together == [*first, *second]


def test_one_name_is_for_every_prompt_and_none_for_the_weights_as_they_are(both):
    def same(left, right):
        return [r.tokens for g in left for r in g] == [r.tokens for g in right for r in g]

    by_name = sampler(both).sample(PROMPTS, n=1, params=PARAMS, adapter="one")
    with use_adapter(both, "one"):
        assert same(sampler(both).sample(PROMPTS, n=1, params=PARAMS), by_name)
        # a request is obeyed whatever is on, and what was on is on again
        plain = sampler(both).sample(PROMPTS, n=1, params=PARAMS, adapter=[None] * 6)
        assert same(plain, LocalSampler(base()).sample(PROMPTS, n=1, params=PARAMS))
        assert same(sampler(both).sample(PROMPTS, n=1, params=PARAMS), by_name)
    now = sampler(both).sample(PROMPTS, n=1, params=PARAMS)
    assert same(now, sampler(both).sample(PROMPTS, n=1, params=PARAMS, adapter="two"))
    assert not same(now, by_name)


@pytest.mark.parametrize(
    ("adapter", "match"),
    [("three", "use one of one, two"), (["one"], "1 adapters for 6 prompts"), (["one"] * 5 + ["x"], "use one of")],
)
def test_wrong_requests_name_the_remedy(both, adapter, match):
    passes = []
    both.register_forward_hook(lambda *_: passes.append(1))
    with pytest.raises(HoneError, match=match):
        sampler(both).sample(PROMPTS, n=1, params=PARAMS, adapter=adapter)
    assert passes == []  # before anything is sampled
    expected = sampler(both).sample(PROMPTS, n=1, params=PARAMS, adapter="two")
    assert [r.tokens for g in sampler(both).sample(PROMPTS, n=1, params=PARAMS) for r in g] == [
        r.tokens for g in expected for r in g
    ]  # still the selected one


def test_a_sampler_without_adapters_says_so():
    with pytest.raises(HoneError, match="given no adapters"):
        LocalSampler(base()).sample(PROMPTS, n=1, params=PARAMS, adapter="one")
