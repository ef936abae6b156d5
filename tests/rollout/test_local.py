"""The in-process sampler against Hugging Face, against a plain forward pass, and against itself in other batches."""

import copy as copies
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from each import each

from hone.engine import schedule
from hone.engine.params import SampleParams
from hone.engine.runners.torch.runner import TorchRunner
from hone.errors import HoneError
from hone.model.config import DecoderConfig
from hone.model.decoder import Decoder
from hone.model.formats.foreign import ForeignCache
from hone.model.lora import add_lora, lora_parameters, select_adapter, use_adapter
from hone.rollout.local import LocalSampler
from hone.types import Group, Rollout, Stop

torch.set_num_threads(1)

VOCAB, CONTEXT = 23, 48


def decoder(*, dtype: torch.dtype = torch.float64, **changes: Any) -> Decoder:
    """A random model whose next-token distributions are far from uniform, and from each other."""
    torch.manual_seed(0)
    shape: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    shape |= {"num_key_value_heads": 2, "max_position_embeddings": CONTEXT, "initializer_range": 0.3}
    return Decoder(DecoderConfig(vocab_size=VOCAB, **(shape | changes))).to(dtype)


def params(max_tokens: int = 12, *, stop_ids: Sequence[int] = (), **settings: Any) -> SampleParams:
    return SampleParams(max_tokens=max_tokens, stop_ids=frozenset(stop_ids), **settings)


def ragged(count: int = 6) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(VOCAB, (1 + (5 * i) % 9,), generator=generator).tolist() for i in range(count)]


def completion(rollout: Rollout) -> list[int]:
    return [token for token, trained in zip(rollout.tokens, rollout.mask, strict=True) if trained]


def flat(groups: list[Group]) -> list[Rollout]:
    return [rollout for group in groups for rollout in group]


def plain_logp(model: Decoder, rollout: Rollout, temperature: float) -> list[float]:
    """log softmax(logits / T) of each written token, from one forward pass over the row: no cache, no padding."""
    tokens = torch.tensor([list(rollout.tokens)])
    with torch.no_grad():
        logp = (model.lm_head(model(tokens[:, :-1])) / temperature).log_softmax(-1)
    picked = logp.gather(-1, tokens[:, 1:, None]).flatten().tolist()
    return [p if trained else 0.0 for p, trained in zip([0.0, *picked], rollout.mask, strict=True)]


def test_greedy_is_what_transformers_generates():
    from transformers import LlamaConfig, LlamaForCausalLM

    model = decoder(dtype=torch.float32)
    config = LlamaConfig(**vars(model.config), bos_token_id=None, eos_token_id=None, pad_token_id=None)
    reference = LlamaForCausalLM(config)
    reference.load_state_dict(model.state_dict())
    reference.eval()
    prompts = ragged()
    rollouts = flat(LocalSampler(model).sample(prompts, n=1, params=params(20, temperature=0.0)))
    for prompt, rollout in zip(prompts, rollouts, strict=True):
        expected = reference.generate(torch.tensor([prompt]), max_new_tokens=20, do_sample=False)  # pyright: ignore
        assert list(rollout.tokens) == expected[0].tolist()
    assert len({tuple(completion(r)) for r in rollouts}) > 3  # the model is not stuck on one answer


@each(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-10)])
@each("temperature", [0.7, 1.0, 1.6])
@each("prompts", [ragged(), [[1, 2, 3], [4, 5, 6]]])
def test_gen_logp_is_that_of_a_plain_forward_pass(
    dtype: torch.dtype, tolerance: float, temperature: float, prompts: list[list[int]]
):
    model = decoder(dtype=dtype)
    # four stop ids of 23 end rows at different times, so the batch is compacted several times
    settings = params(24, temperature=temperature, stop_ids=[0, 5, 9, 11])
    rollouts = flat(LocalSampler(model).sample(prompts, n=8, params=settings))
    assert len({len(completion(r)) for r in rollouts}) > 5
    for rollout in rollouts:
        assert rollout.gen_logp == pytest.approx(plain_logp(model, rollout, temperature), abs=tolerance)


def test_greedy_gen_logp_is_untempered():
    model = decoder()
    for rollout in flat(LocalSampler(model).sample(ragged(), n=1, params=params(temperature=0.0))):
        assert rollout.gen_logp == pytest.approx(plain_logp(model, rollout, 1.0), abs=1e-10)


def test_truncated_gen_logp_is_renormalised_on_the_support():
    model = decoder()
    rollout = LocalSampler(model).sample([[1, 2]], n=1, params=params(1, top_k=3))[0][0]
    with torch.no_grad():
        top = model.lm_head(model(torch.tensor([[1, 2]])))[0, -1].softmax(-1).topk(3)
    place = top.indices.tolist().index(rollout.tokens[-1])
    assert rollout.gen_logp[-1] == pytest.approx((top.values[place] / top.values.sum()).log().item(), abs=1e-12)


def test_pairs_of_tokens_come_with_their_exact_probability():
    # the second token depends on the cache of the first: the chi-square of the joint distribution sees both
    model, size = decoder(initializer_range=0.15), 4096
    rollouts = LocalSampler(model).sample([[3, 1]], n=size, params=params(2, temperature=0.8))[0]
    with torch.no_grad():
        first = (model.lm_head(model(torch.tensor([[3, 1]])))[0, -1] / 0.8).softmax(-1)
        rows = torch.tensor([[3, 1, token] for token in range(VOCAB)])
        joint = first[:, None] * (model.lm_head(model(rows))[:, -1] / 0.8).softmax(-1)
    index = torch.tensor([r.tokens[-2] * VOCAB + r.tokens[-1] for r in rollouts])
    seen, expected = torch.bincount(index, minlength=VOCAB**2).double(), joint.flatten() * size
    common = expected >= 5
    seen = torch.cat([seen[common], seen[~common].sum()[None]])
    expected = torch.cat([expected[common], expected[~common].sum()[None]])
    freedom = len(expected) - 1
    assert freedom > 50
    chi_square = ((seen - expected) ** 2 / expected).sum().item()
    assert chi_square < freedom + 4 * math.sqrt(2 * freedom) + 8  # mean + 4 deviations, and the skew


@pytest.mark.parametrize("max_rows", [1, 3, 7, 48])
def test_completion_does_not_depend_on_the_wave(max_rows: int):
    model, settings = decoder(), params(stop_ids=[0, 5], seed=11)
    expected = LocalSampler(model).sample(ragged(), n=8, params=settings)
    groups = LocalSampler(model, max_rows=max_rows).sample(ragged(), n=8, params=settings)
    for rollout, other in zip(flat(groups), flat(expected), strict=True):
        assert rollout.tokens == other.tokens
        assert rollout.gen_logp == pytest.approx(other.gen_logp, abs=1e-10)
        assert (rollout.stop, rollout.limit) == (other.stop, other.limit)


def test_completion_does_not_depend_on_the_company_or_its_order():
    sampler, settings, prompts = LocalSampler(decoder()), params(stop_ids=[0, 5], seed=11), ragged()
    together = sampler.sample(prompts, n=2, params=settings, first_request=100)
    for i in reversed(range(len(prompts))):
        alone = sampler.sample([prompts[i]], n=2, params=settings, first_request=100 + 2 * i)[0]
        assert [r.tokens for r in alone] == [r.tokens for r in together[i]]
        second = sampler.sample([prompts[i]], n=1, params=settings, first_request=101 + 2 * i)[0][0]
        assert second.tokens == together[i][1].tokens


def test_invariant_rollouts_are_the_same_bits_in_any_company():
    model, settings, prompts = decoder(dtype=torch.float32), params(30, stop_ids=[0, 5], seed=11), ragged()
    together = LocalSampler(model, invariant=True).sample(prompts, n=4, params=settings)
    assert LocalSampler(model, invariant=True, max_rows=3).sample(prompts, n=4, params=settings) == together
    alone = LocalSampler(model, invariant=True)
    assert [alone.sample([p], n=4, params=settings, first_request=4 * i)[0] for i, p in enumerate(prompts)] == together


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_completion_does_not_depend_on_compaction(share: float, monkeypatch: pytest.MonkeyPatch):
    sampler, settings = LocalSampler(decoder()), params(30, stop_ids=[0, 5])
    expected = sampler.sample(ragged(), n=8, params=settings)
    monkeypatch.setattr(schedule, "COMPACT_BELOW", share)
    for rollout, other in zip(flat(sampler.sample(ragged(), n=8, params=settings)), flat(expected), strict=True):
        assert rollout.tokens == other.tokens
        assert rollout.gen_logp == pytest.approx(other.gen_logp, abs=1e-10)


@pytest.mark.parametrize("prompts", [ragged(), [[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]]])
def test_completion_does_not_depend_on_how_prompts_are_cut_for_prefill(
    prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
):
    sampler = LocalSampler(decoder())
    expected = sampler.sample(prompts, n=2, params=params())
    monkeypatch.setattr(TorchRunner, "prefill_tokens", 2 * len(prompts))
    for rollout, other in zip(flat(sampler.sample(prompts, n=2, params=params())), flat(expected), strict=True):
        assert rollout.tokens == other.tokens
        assert rollout.gen_logp == pytest.approx(other.gen_logp, abs=1e-10)


def test_longer_limit_only_extends_a_completion():
    sampler = LocalSampler(decoder())
    short = flat(sampler.sample(ragged(), n=2, params=params(5, stop_ids=[0])))
    long = flat(sampler.sample(ragged(), n=2, params=params(15, stop_ids=[0])))
    assert all(completion(b)[: len(completion(a))] == completion(a) for a, b in zip(short, long, strict=True))


def test_samples_of_a_prompt_and_requests_and_seeds_differ():
    sampler = LocalSampler(decoder(initializer_range=0.1))
    group = sampler.sample([[1, 2]], n=8, params=params())[0]
    assert len({tuple(r.tokens) for r in group}) == 8
    later = sampler.sample([[1, 2]], n=8, params=params(), first_request=8)[0]
    assert not {tuple(r.tokens) for r in group} & {tuple(r.tokens) for r in later}
    seeded = sampler.sample([[1, 2]], n=8, params=params(seed=1))[0]
    assert not {tuple(r.tokens) for r in group} & {tuple(r.tokens) for r in seeded}
    assert [r.tokens for r in sampler.sample([[1, 2]], n=8, params=params())[0]] == [r.tokens for r in group]


def test_any_stop_token_ends_a_row_and_is_trained_on():
    stops = [0, 5, 9, 11]
    rollouts = flat(LocalSampler(decoder()).sample(ragged(), n=8, params=params(10, stop_ids=stops)))
    assert {r.tokens[-1] for r in rollouts if r.stop is Stop.TOKEN} == set(stops)
    assert any(r.stop is Stop.LENGTH for r in rollouts)
    for rollout in rollouts:
        written = completion(rollout)
        assert not set(written[:-1]) & set(stops)
        assert (written[-1] in stops) == (rollout.stop is Stop.TOKEN)
        assert len(written) == 10 or rollout.stop is Stop.TOKEN
        assert rollout.limit == 10


def test_stop_as_the_first_token_is_a_completion_of_one():
    everything = range(VOCAB)
    for rollout in flat(LocalSampler(decoder()).sample(ragged(), n=2, params=params(stop_ids=everything))):
        assert len(completion(rollout)) == 1
        assert rollout.stop is Stop.TOKEN


def test_stop_token_at_the_limit_is_a_stop_and_not_a_cut():
    rollouts = flat(LocalSampler(decoder()).sample(ragged(), n=8, params=params(1, stop_ids=[0, 5, 9, 11])))
    assert {len(completion(r)) for r in rollouts} == {1}
    assert {r.stop for r in rollouts} == {Stop.TOKEN, Stop.LENGTH}
    assert all((r.tokens[-1] in (0, 5, 9, 11)) == (r.stop is Stop.TOKEN) for r in rollouts)


def test_prompt_tokens_are_kept_unmasked_with_zero_logp():
    for prompt, group in zip(ragged(), LocalSampler(decoder()).sample(ragged(), n=2, params=params()), strict=True):
        for rollout in group:
            assert list(rollout.tokens[: len(prompt)]) == prompt
            assert not any(rollout.mask[: len(prompt)])
            assert list(rollout.gen_logp[: len(prompt)]) == [0.0] * len(prompt)
            assert all(rollout.mask[len(prompt) :])
            assert all(type(token) is int for token in rollout.tokens)


@pytest.mark.parametrize("share", [0.0, 1.0], ids=["full rows wait", "full rows are dropped"])
def test_limit_shrinks_to_what_fits_the_context(share: float, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(schedule, "COMPACT_BELOW", share)
    model, prompts = decoder(), [[1] * (CONTEXT - 1), [2] * (CONTEXT - 5), [3]]
    for rollout, limit in zip(
        flat(LocalSampler(model).sample(prompts, n=1, params=params(30))), (1, 5, 30), strict=True
    ):
        assert rollout.limit == limit == len(completion(rollout))
        assert rollout.stop is Stop.LENGTH
        assert rollout.gen_logp == pytest.approx(plain_logp(model, rollout, 1.0), abs=1e-10)


def test_empty_list_of_prompts_gives_no_groups():
    assert LocalSampler(decoder()).sample([], n=4, params=params()) == []


@pytest.mark.parametrize(
    ("prompts", "settings", "words"),
    [
        ([[1], []], {}, ["prompt 1 has 0 tokens", str(CONTEXT)]),
        ([[1], [1] * CONTEXT], {}, [f"prompt 1 has {CONTEXT} tokens", f"context is {CONTEXT}", "shorten"]),
        ([[1], [2], [3, VOCAB]], {}, ["prompt 2", str(VOCAB), "tokenizer does not fit the model"]),
        ([[-1]], {}, ["prompt 0 has token -1", "tokenizer does not fit the model"]),
        ([[1]], {"stop_ids": [VOCAB]}, [f"stop id {VOCAB}", "tokenizer does not fit the model"]),
    ],
)
def test_what_cannot_be_sampled_is_refused_by_name(
    prompts: list[list[int]], settings: dict[str, Any], words: list[str]
):
    with pytest.raises(HoneError) as error:
        LocalSampler(decoder()).sample(prompts, n=1, params=params(**settings))
    assert all(word in str(error.value) for word in words)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"n": 0}, "n is 0"),
        ({"n": 1, "first_request": -1}, "first_request -1"),
        ({"n": 1.5}, "n is 1.5: set it to a whole number"),
        ({"n": "2"}, "n is '2': set it to a whole number"),
        ({"n": 1, "first_request": 0.5}, "first_request is 0.5: set it to a whole number"),
    ],
)
def test_impossible_counts_are_refused(changes: dict[str, Any], says: str):
    with pytest.raises(HoneError, match=says):
        LocalSampler(decoder()).sample([[1]], params=params(), **changes)


def test_impossible_sizes_are_refused():
    with pytest.raises(HoneError, match="kv_memory is -1: set it to 1 or more"):
        LocalSampler(decoder(), kv_memory=-1)
    with pytest.raises(HoneError, match=r"kv_memory is 1\.5: set it to a whole number"):
        LocalSampler(decoder(), kv_memory=1.5)  # type: ignore[arg-type]
    with pytest.raises(HoneError, match="max_rows is 0"):
        LocalSampler(decoder(), max_rows=0)


def test_diverged_model_is_an_error_and_not_a_completion():
    model = decoder()
    with torch.no_grad():
        model.model.norm.weight.fill_(math.nan)
    with pytest.raises(HoneError, match="not finite"):
        LocalSampler(model).sample([[1]], n=2, params=params())


def test_an_interrupted_call_leaves_a_sampler_that_works():
    model, seen = decoder(), []
    sampler = LocalSampler(model)
    expected = sampler.sample(ragged(), n=4, params=params())

    def interrupt(*_: Any) -> None:
        seen.append(1)
        if len(seen) == 5:
            raise KeyboardInterrupt

    hook = model.model.embed_tokens.register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        sampler.sample(ragged(), n=4, params=params())
    hook.remove()
    assert sampler.sample(ragged(), n=4, params=params()) == expected


def test_each_module_gets_its_own_mode_back():
    model = decoder().train()
    model.model.layers[1].eval()
    before = [module.training for module in model.modules()]
    LocalSampler(model).sample(ragged(), n=1, params=params())
    assert [module.training for module in model.modules()] == before
    with torch.no_grad():
        model.model.norm.weight.fill_(math.nan)
    with pytest.raises(HoneError):
        LocalSampler(model).sample([[1]], n=1, params=params())
    assert [module.training for module in model.modules()] == before


def test_model_is_in_eval_mode_while_sampling():
    model, modes = decoder().train(), []
    model.model.embed_tokens.register_forward_hook(lambda module, *_: modes.append(module.training))
    LocalSampler(model).sample([[1]], n=1, params=params(3))
    assert modes == [False] * 3


def test_version_is_recorded():
    sampler = LocalSampler(decoder())
    assert sampler.sample([[1]], n=1, params=params())[0][0].version == 0
    sampler.publish(7)
    assert sampler.version == 7
    assert [r.version for r in flat(sampler.sample(ragged(), n=2, params=params()))] == [7] * 12


def test_weights_changed_in_place_are_sampled_next():
    model = decoder()
    sampler = LocalSampler(model)
    before = sampler.sample([[1, 2]], n=4, params=params())[0]
    loss = model.lm_head(model(torch.tensor([[1, 2, 3]]))).logsumexp(-1).sum()
    loss.backward()  # what was sampled under inference mode must not get in the way of training
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.5 * parameter.grad.sign()  # pyright: ignore
    after = sampler.sample([[1, 2]], n=4, params=params())[0]
    assert [r.tokens for r in before] != [r.tokens for r in after]
    for rollout in after:
        assert rollout.gen_logp == pytest.approx(plain_logp(model, rollout, 1.0), abs=1e-10)


def test_repeated_prompts_are_separate_requests():
    sampler = LocalSampler(decoder(initializer_range=0.1))
    groups = sampler.sample([[1, 2], [1, 2]], n=2, params=params())
    assert len({tuple(r.tokens) for r in flat(groups)}) == 4


def test_raw_logp_is_without_temperature_or_truncation():
    model = decoder()
    settings = params(temperature=0.6, top_k=4, stop_ids=[0])
    for rollout in flat(LocalSampler(model).sample(ragged(), n=3, params=settings)):
        assert rollout.raw_logp == pytest.approx(plain_logp(model, rollout, 1.0), abs=1e-10)
        assert list(rollout.raw_logp) != pytest.approx(list(rollout.gen_logp), abs=1e-3)


def nudge(model: Decoder) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.2)


def test_a_copy_follows_the_learner_when_it_is_published():
    model = decoder()
    shared, apart = LocalSampler(model), LocalSampler(model, copy=True)
    assert apart.decoder is not model
    before = shared.sample(ragged(), n=2, params=params())
    assert apart.sample(ragged(), n=2, params=params()) == before
    nudge(model)
    assert apart.sample(ragged(), n=2, params=params()) == before
    after = shared.sample(ragged(), n=2, params=params())
    assert after != before
    for sampler in (shared, apart):
        sampler.publish(3)
    assert apart.sample(ragged(), n=2, params=params()) == shared.sample(ragged(), n=2, params=params())
    assert [r.tokens for r in flat(apart.sample(ragged(), n=2, params=params()))] == [r.tokens for r in flat(after)]
    assert [p.requires_grad for p in model.parameters()] == [True] * len(list(model.parameters()))


def test_a_copy_switches_its_own_adapters():
    model = decoder()
    add_lora(model, name="one", rank=2, alpha=64.0)
    with torch.no_grad():
        for p in lora_parameters(model):
            p.normal_()
    apart = LocalSampler(model, copy=True, switch=partial(use_adapter, model))
    shared = LocalSampler(model, switch=partial(use_adapter, model))
    names = ["one", None, "one", None, "one", None]
    expected = shared.sample(ragged(), n=2, params=params(), adapter=names)
    with use_adapter(model, None):  # what the learner does meanwhile is its own affair
        assert apart.sample(ragged(), n=2, params=params(), adapter=names) == expected
    with pytest.raises(HoneError, match=r"partial\(use_adapter, decoder\)"):
        LocalSampler(model, copy=True, switch=lambda name: use_adapter(model, name))
    add_lora(model, name="two", rank=2, alpha=64.0)
    with pytest.raises(HoneError, match="make the sampler anew"):
        apart.publish(1)


def randomised(model: Decoder, name: str) -> None:
    """An adapter that changes what the model says."""
    add_lora(model, name=name, rank=2, alpha=64.0)
    with torch.no_grad():
        for p in lora_parameters(model):
            p.normal_()


def test_a_copy_has_the_adapter_on_that_the_learner_has_when_it_is_published():
    model = decoder()
    for name in ("one", "two"):
        randomised(model, name)
    apart, shared = LocalSampler(model, copy=True), LocalSampler(model)
    for name in ("one", "two"):
        select_adapter(model, name)
        apart.publish(1)
        shared.publish(1)
        assert apart.sample(ragged(), n=2, params=params()) == shared.sample(ragged(), n=2, params=params())
    with use_adapter(model, None):
        apart.publish(2)
        shared.publish(2)
        expected = shared.sample(ragged(), n=2, params=params())
    assert apart.sample(ragged(), n=2, params=params()) == expected


def memory_of(sampler: LocalSampler) -> tuple[int, int] | None:
    runner = sampler._runner
    return None if runner is None else (runner.max_rows, runner.capacity)


def test_memory_is_kept_while_it_fits_and_given_back_when_asked():
    sampler = LocalSampler(decoder(max_position_embeddings=500), max_rows=20)
    assert memory_of(sampler) is None
    expected = sampler.sample(ragged(), n=2, params=params())
    first = sampler._runner
    assert memory_of(sampler) == (12, 64)
    sampler.sample(ragged(), n=1, params=params(30))
    assert sampler._runner is first
    sampler.sample([[1] * 60], n=50, params=params())  # longer, and more than there may be rows
    assert memory_of(sampler) == (20, 128)
    assert sampler.sample(ragged(), n=2, params=params()) == expected  # more room changes nothing
    sampler.release()
    assert memory_of(sampler) is None
    assert sampler.sample(ragged(), n=2, params=params()) == expected
    sampler.sample([[1] * 499], n=1, params=params())
    assert memory_of(sampler) == (12, 500)  # never more than the context


def test_with_little_memory_fewer_rows_run_at_a_time():
    model = decoder()
    expected = LocalSampler(model).sample(ragged(), n=4, params=params())
    column = 2 * 2 * 2 * model.config.head_dim * 8  # keys and values, layers, heads, bytes of a float64
    few = LocalSampler(model, kv_memory=3 * 49 * column)
    for got, other in zip(flat(few.sample(ragged(), n=4, params=params())), flat(expected), strict=True):
        assert got.tokens == other.tokens
    assert memory_of(few) == (3, 48)
    runner = few._runner
    few.sample(ragged(), n=4, params=params())
    assert few._runner is runner  # it asked for 24, and does not ask again
    invariant = LocalSampler(model, invariant=True, kv_memory=4 * 49 * column)
    invariant.sample(ragged(), n=4, params=params())
    assert isinstance(invariant._runner, TorchRunner)
    assert invariant._runner.layers.slab.nbytes == 3 * 64 * column  # its columns come in blocks
    with pytest.raises(HoneError, match="keys and values of one sequence of 48 tokens take"):
        LocalSampler(model, kv_memory=48 * column).sample([[1]], n=1, params=params(47))


def test_a_prompt_of_another_call_is_not_taken_for_one_of_this():
    model = decoder(max_position_embeddings=200)
    sampler, prompt = LocalSampler(model), [3, 1, 4, 1, 5] * 12
    sampler.sample([prompt], n=2, params=params())
    nudge(model)
    got = sampler.sample([prompt], n=2, params=params())
    assert got == LocalSampler(model).sample([prompt], n=2, params=params())


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float64)])
def test_a_model_in_another_precision_is_sampled_next(dtypes: tuple[torch.dtype, torch.dtype]):
    model = decoder(dtype=dtypes[0])
    sampler = LocalSampler(model)
    sampler.sample(ragged(), n=2, params=params())
    model.to(dtypes[1])
    got = sampler.sample(ragged(), n=2, params=params())
    assert got == LocalSampler(model).sample(ragged(), n=2, params=params())


def test_an_adapter_added_after_a_call_is_sampled_with_memory_made_for_it():
    model = decoder()
    sampler = LocalSampler(model)
    before = sampler.sample(ragged(), n=2, params=params())
    first = sampler._runner
    randomised(model, "one")
    got = sampler.sample(ragged(), n=2, params=params())
    assert sampler._runner is not first
    assert got != before
    assert got == LocalSampler(model).sample(ragged(), n=2, params=params())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_training_step_between_two_calls_is_sampled_and_not_disturbed(dtype: torch.dtype):
    states = list[dict[str, torch.Tensor]]()
    for samples in (False, True):
        model, tokens = decoder(dtype=dtype), torch.arange(8)[None]
        sampler, optimizer = LocalSampler(model), torch.optim.AdamW(model.parameters(), lr=0.05)
        for _ in range(3):
            loss = model.logits(model(tokens)).float().logsumexp(-1).sum()
            if samples:  # the weights are laid out anew between the forward and the backward pass
                sampler.sample(ragged(), n=2, params=params())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        states.append(model.state_dict())
        if samples:
            got = sampler.sample(ragged(), n=2, params=params())
            assert got == LocalSampler(copies.deepcopy(model)).sample(ragged(), n=2, params=params())
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def letters(tokens: Sequence[int]) -> str:
    return "".join(chr(97 + t) for t in tokens)


def test_stop_strings_end_a_rollout_and_its_text():
    model = decoder()
    whole = flat(LocalSampler(model).sample(ragged(), n=8, params=params(20, stop_ids=[0])))
    text = letters(completion(whole[0]))
    stops = (text[2:4], text[1:3] + "!")
    sampler = LocalSampler(model, decode=letters)
    rollouts = flat(sampler.sample(ragged(), n=8, params=params(20, stop_ids=[0], stop=stops)))
    assert rollouts[0].stop is Stop.STRING
    for rollout, other in zip(rollouts, whole, strict=True):
        text = letters(completion(other))
        at = text.find(stops[0])
        if at < 0:
            assert (rollout.tokens, rollout.stop, rollout.text) == (other.tokens, other.stop, "")
        else:
            assert letters(completion(rollout)) == text[: at + 2]
            assert (rollout.stop, rollout.text, rollout.limit) == (Stop.STRING, text[:at], 20)
    with pytest.raises(HoneError, match=r"decode=tokenizer\.decode"):
        LocalSampler(model).sample([[1]], n=1, params=params(stop=("a",)))


def test_models_without_a_runner_are_sampled_in_static_batches():
    class Other(Decoder):
        """As a model of transformers whose cache cannot choose rows."""

        takes_rows = False

        def new_cache(self, rows: int, capacity: int) -> ForeignCache:
            return ForeignCache(None)

        def forward(self, tokens: torch.Tensor, *, cache: ForeignCache) -> torch.Tensor:  # type: ignore[override]
            cache.tokens = torch.cat([cache.tokens.long(), tokens], dim=1) if cache.length else tokens
            cache.length += tokens.shape[1]
            return super().forward(cache.tokens)

    model = decoder()
    other = Other(model.config).double()
    other.load_state_dict(model.state_dict())
    settings = params(20, stop_ids=[0, 5], temperature=0.8, repetition_penalty=1.2, seed=4)
    stop = letters(completion(LocalSampler(model).sample(ragged(), n=1, params=settings)[2][0]))[:2]
    for max_rows, stops in ((512, ()), (3, ()), (5, (stop,))):
        told = replace(settings, stop=stops)
        expected = flat(LocalSampler(model, decode=letters).sample(ragged(), n=4, params=told))
        batches = LocalSampler(other, max_rows=max_rows, decode=letters)
        for got, rollout in zip(flat(batches.sample(ragged(), n=4, params=told)), expected, strict=True):
            same = [(r.tokens, r.mask, r.stop, r.limit, r.text) for r in (got, rollout)]
            assert same[0] == same[1]
            assert got.gen_logp == pytest.approx(rollout.gen_logp, abs=1e-10)
            assert got.raw_logp == pytest.approx(rollout.raw_logp, abs=1e-10)
    assert any(r.stop is Stop.STRING for r in expected)
    assert batches._runner is None


def test_a_prompt_that_is_text_is_refused():
    with pytest.raises(HoneError, match="prompt 0 is text: give token ids"):
        LocalSampler(decoder()).sample(["Hello"], n=1, params=params())  # type: ignore[list-item]


@pytest.mark.parametrize("prompts", [[1, 2, 3], [[1.5, 2.0]], [["1"]], [None], [torch.tensor([1.0, 2.0])]])
def test_prompts_that_are_not_lists_of_whole_numbers_are_refused(prompts: Any):
    """Floats reached the C++ runner, which read their bits as tokens and took the process down."""
    with pytest.raises(HoneError, match="prompt 0 is not a list of whole numbers: give token ids"):
        LocalSampler(decoder()).sample(prompts, n=1, params=params())


@pytest.mark.parametrize("kind", [tuple, np.array, torch.tensor])
def test_prompts_can_be_arrays(kind: Any):
    sampler, prompts = LocalSampler(decoder()), ragged()
    expected = sampler.sample(prompts, n=1, params=params())
    assert sampler.sample([kind(prompt) for prompt in prompts], n=1, params=params()) == expected
