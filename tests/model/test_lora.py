"""Adapters: where they start, what moves first, what they cost, and that off and merged mean what they say."""

import copy
import math

import pytest
import torch
from torch import nn

from hone.errors import HoneError
from hone.model.lora import (
    LoRALinear,
    ReferenceView,
    adapter_off,
    add_lora,
    effective_rank,
    load_lora_state,
    lora_parameters,
    lora_state,
    merge_lora,
    plain_state,
    update_ranks,
)
from hone.model.policy import Policy, SharedCritic, frozen_copy

torch.set_num_threads(1)
LOGP = frozenset({"logp"})
TOKENS = torch.arange(10)[None]
SEVEN = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def adapted(make_decoder, *, moved=True, **settings):
    decoder = make_decoder()
    add_lora(decoder, **{"rank": 3, "alpha": 6.0, "targets": ("all-linear",), **settings})
    if moved:
        g = torch.Generator().manual_seed(9)
        with torch.no_grad():
            for p in lora_parameters(decoder):
                p.add_(torch.randn(p.shape, generator=g, dtype=torch.float64) * 0.2)
    return decoder


def test_the_adapted_model_starts_exactly_at_the_base_model(make_decoder):
    assert torch.equal(adapted(make_decoder, moved=False)(TOKENS), make_decoder()(TOKENS))


def test_the_first_step_moves_only_b(make_decoder, make_batch, rows):
    decoder = adapted(make_decoder, moved=False)
    before = {name: p.detach().clone() for name, p in decoder.named_parameters()}
    optimizer = torch.optim.AdamW([p for p in decoder.parameters() if p.requires_grad], lr=0.1, weight_decay=0.0)
    batch = make_batch(rows)
    for step in range(2):
        optimizer.zero_grad()
        Policy(decoder)(batch, LOGP).logp.sum().backward()
        optimizer.step()
        moved = {name.rpartition(".")[2] for name, p in decoder.named_parameters() if not torch.equal(p, before[name])}
        assert moved == ({"lora_B"} if step == 0 else {"lora_A", "lora_B"})


def test_a_layer_by_hand():
    # W0 = [[1, 2]], A = [[3, 4]], B = [[5]], alpha 2, r 1: h = 1 + 2 + 2 * 5 * (3 + 4) = 73 on x = (1, 1)
    base = nn.Linear(2, 1, bias=False)
    layer = LoRALinear(base, rank=1, scale=2.0, generator=torch.Generator())
    with torch.no_grad():
        base.weight.copy_(torch.tensor([[1.0, 2.0]]))
        layer.lora_A.copy_(torch.tensor([[3.0, 4.0]]))
        layer.lora_B.copy_(torch.tensor([[5.0]]))
    assert layer(torch.ones(1, 2)).item() == 73.0
    assert layer.weight.tolist() == [[31.0, 42.0]]
    assert layer.update().tolist() == [[30.0, 40.0]]


@pytest.mark.parametrize(("rslora", "scale"), [(False, 16 / 4), (True, 16 / 2)])
def test_scale_is_alpha_over_r_or_over_its_root(rslora, scale, make_decoder):
    decoder = make_decoder()
    add_lora(decoder, rank=4, alpha=16.0, targets=("q_proj",), rslora=rslora)
    assert decoder.model.layers[0].self_attn.q_proj.scale == scale


def test_a_is_gaussian_with_variance_one_over_d_in():
    layer = LoRALinear(nn.Linear(400, 10), rank=200, scale=1.0, generator=torch.Generator().manual_seed(0))
    z = layer.lora_A.detach() * math.sqrt(400)
    assert abs(float(z.mean())) < 0.01
    assert abs(float(z.var()) - 1) < 0.02
    assert abs(float((z**4).mean()) - 3) < 0.1  # the fourth moment of a Gaussian; a uniform's is 1.8


def test_the_seed_decides_the_adapter(make_decoder):
    a, b, c = (lora_state(adapted(make_decoder, moved=False, seed=s)) for s in (1, 1, 2))
    assert all(torch.equal(a[n], b[n]) for n in a)
    assert not any(torch.equal(a[n], c[n]) for n in a if "lora_A" in n)
    first, second = (a[f"model.layers.{i}.self_attn.q_proj.lora_A.weight"] for i in (0, 1))
    assert not torch.equal(first, second)


def test_adding_adapters_leaves_the_global_random_state_alone(make_decoder):
    decoder = make_decoder()
    before = torch.get_rng_state()
    add_lora(decoder, rank=2, alpha=2.0)
    assert torch.equal(before, torch.get_rng_state())


def test_parameter_count_is_r_times_d_out_plus_d_in(make_decoder):
    decoder = adapted(make_decoder, targets=("q_proj", "k_proj", "down_proj"))
    # 2 layers, r 3: q 16 -> 16, k 16 -> 8 (two key-value heads of 4), down 24 -> 16
    expected = 2 * 3 * ((16 + 16) + (8 + 16) + (16 + 24))
    assert sum(p.numel() for p in lora_parameters(decoder)) == expected
    trainable = [p for p in decoder.parameters() if p.requires_grad]
    assert {id(p) for p in trainable} == {id(p) for p in lora_parameters(decoder)}


def numbers(d, rank):
    """Trained and frozen numbers of one square matrix, without its memory."""
    base = nn.Linear(d, d, bias=False, device="meta")
    layer = LoRALinear(base, rank=rank, scale=1.0, generator=torch.Generator())
    return layer.lora_A.numel() + layer.lora_B.numel(), base.weight.numel()


def test_the_checked_numbers_of_the_specification():
    trained, full = numbers(4096, 16)
    assert full / trained == 128
    trained = 80 * 6 * numbers(8192, 16)[0]
    assert trained == 125_829_120
    assert trained * 2 * 4 / 1e9 == pytest.approx(1.0, abs=0.01)  # Adam's two moments in float32, GB


def test_adapter_off_is_the_base_model_and_nests(make_decoder):
    decoder, base = adapted(make_decoder), make_decoder()(TOKENS)
    on = decoder(TOKENS)
    assert (on - base).abs().max() > 0.01
    with adapter_off(decoder):
        with adapter_off(decoder):
            assert torch.equal(decoder(TOKENS), base)
        assert torch.equal(decoder(TOKENS), base)
    assert torch.equal(decoder(TOKENS), on)


def test_adapters_come_back_after_an_error(make_decoder):
    decoder = adapted(make_decoder)
    on = decoder(TOKENS)
    with pytest.raises(RuntimeError), adapter_off(decoder):
        raise RuntimeError
    assert torch.equal(decoder(TOKENS), on)


def test_merging_gives_plain_layers_with_equal_outputs(make_decoder):
    decoder = adapted(make_decoder)
    before = decoder(TOKENS)
    merge_lora(decoder)
    torch.testing.assert_close(decoder(TOKENS), before, rtol=0, atol=1e-12)
    assert not any(isinstance(m, LoRALinear) for m in decoder.modules())
    assert set(decoder.state_dict()) == set(make_decoder().state_dict())


def test_plain_state_is_the_merged_one_and_changes_nothing(make_decoder):
    decoder = adapted(make_decoder)
    before = decoder(TOKENS)
    with adapter_off(decoder):  # what is saved does not depend on the switch
        state = plain_state(decoder)
    assert torch.equal(decoder(TOKENS), before)
    merge_lora(decoder)
    assert state.keys() == decoder.state_dict().keys()
    for name, x in decoder.state_dict().items():
        assert torch.equal(x, state[name])


def test_a_layer_keeps_its_bias():
    base = nn.Linear(3, 2)
    layer = LoRALinear(base, rank=1, scale=1.0, generator=torch.Generator())
    nn.init.normal_(layer.lora_B)
    x = torch.randn(4, 3)
    torch.testing.assert_close(layer(x), x @ layer.weight.T + base.bias)


def test_lora_state_moves_an_adapter_to_another_copy(make_decoder):
    decoder, other = adapted(make_decoder), adapted(make_decoder, moved=False, seed=5)
    state = lora_state(decoder)
    assert "model.layers.0.self_attn.q_proj.lora_A.weight" in state
    assert len(state) == 2 * 2 * 7
    load_lora_state(other, state)
    assert torch.equal(other(TOKENS), decoder(TOKENS))
    with pytest.raises(HoneError, match="rank and targets"):
        load_lora_state(adapted(make_decoder, rank=2), state)
    with pytest.raises(HoneError, match="on one side only"):
        load_lora_state(adapted(make_decoder, targets=("q_proj",)), state)


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        (("q_proj", "v_proj"), {"q_proj", "v_proj"}),
        (("all-linear",), SEVEN),
        ((r".*\.mlp\..*",), {"gate_proj", "up_proj", "down_proj"}),
        (("mlp.up_proj",), {"up_proj"}),
    ],
)
def test_targets_are_endings_or_expressions(targets, expected, make_decoder):
    names = add_lora(make_decoder(), rank=1, alpha=1.0, targets=targets)
    assert {n.rpartition(".")[2] for n in names} == expected
    assert len(names) == 2 * len(expected)


def test_one_layer_can_be_named(make_decoder):
    names = add_lora(make_decoder(), rank=1, alpha=1.0, targets=(r"model\.layers\.1\..*q_proj",))
    assert names == ["model.layers.1.self_attn.q_proj"]


def test_a_target_that_matches_nothing_lists_the_layers(make_decoder):
    decoder = make_decoder()
    with pytest.raises(HoneError) as error:
        add_lora(decoder, rank=1, alpha=1.0, targets=("q_proj", "query"))
    assert '"query"' in str(error.value)
    assert "model.layers.*.self_attn.q_proj" in str(error.value)
    assert "\n" not in str(error.value)
    assert all(p.requires_grad for p in decoder.parameters())  # refused before anything was changed
    # the end of a name means whole words: "proj" is no layer
    with pytest.raises(HoneError, match="matches no layer"):
        add_lora(decoder, rank=1, alpha=1.0, targets=("proj",))


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"rank": 0}, "at least 1"),
        ({"targets": ()}, "no lora targets"),
        ({"targets": ("(",)}, "no regular expression"),
        ({"targets": ("lm_head",)}, "tied to the embedding"),
    ],
)
def test_wrong_settings_name_the_remedy(wrong, match, make_decoder):
    with pytest.raises(HoneError, match=match):
        add_lora(make_decoder(), **{"rank": 2, "alpha": 2.0, "targets": ("q_proj",), **wrong})


def test_adapters_are_not_stacked(make_decoder):
    with pytest.raises(HoneError, match="already"):
        add_lora(adapted(make_decoder), rank=1, alpha=1.0)


@pytest.mark.parametrize("tie", [True, False])
def test_all_linear_leaves_the_vocabulary_head_alone(tie, make_decoder):
    decoder = make_decoder(tie_word_embeddings=tie)
    add_lora(decoder, rank=1, alpha=1.0, targets=("all-linear",))
    assert isinstance(decoder.lm_head, nn.Linear)
    assert (decoder.lm_head.weight is decoder.model.embed_tokens.weight) == tie


def test_an_untied_head_can_be_adapted_on_request(make_decoder, make_batch, rows):
    decoder = make_decoder(tie_word_embeddings=False)
    base = Policy(copy.deepcopy(decoder))
    add_lora(decoder, rank=2, alpha=4.0, targets=("lm_head",))
    policy, batch = Policy(decoder, chunk=5), make_batch(rows)
    nn.init.normal_(decoder.lm_head.lora_B)
    logp = policy(batch, LOGP).logp
    logits = decoder.lm_head(decoder(torch.tensor([rows[0]])))[0]
    torch.testing.assert_close(policy.log_distribution(make_batch(rows[:1])), logits[1:-1].log_softmax(-1))
    logp.sum().backward()
    assert decoder.lm_head.lora_A.grad.abs().sum() > 0
    view = ReferenceView(policy)
    torch.testing.assert_close(view(batch, LOGP).logp, base(batch, LOGP).logp, rtol=0, atol=1e-12)
    three = slice(0, 3)
    torch.testing.assert_close(view.log_rows(batch)(three), base.log_rows(batch)(three), rtol=0, atol=1e-12)


def test_the_reference_view_is_the_base_model_without_gradient_or_memory(make_decoder, make_batch, rows):
    base, batch = Policy(make_decoder(), temperature=0.7), make_batch(rows)
    critic = SharedCritic(16, zero=False).double()
    policy = Policy(adapted(make_decoder), critic=critic, temperature=0.7, chunk=4)
    view = ReferenceView(policy)
    fwd = view(batch, frozenset({"logp", "entropy"}))
    expected = base(batch, frozenset({"logp", "entropy"}))
    torch.testing.assert_close(fwd.logp, expected.logp, rtol=0, atol=1e-12)
    torch.testing.assert_close(fwd.entropy, expected.entropy, rtol=0, atol=1e-12)
    assert not fwd.logp.requires_grad
    torch.testing.assert_close(view.log_distribution(batch), base.log_distribution(batch), rtol=0, atol=1e-12)
    assert not view.log_distribution(batch).requires_grad


def test_kl_to_the_view_equals_kl_to_a_frozen_base_with_its_gradient(make_decoder, make_batch, rows):
    policy, batch = Policy(adapted(make_decoder), chunk=4), make_batch(rows)
    results = []
    for reference in (ReferenceView(policy), frozen_copy(Policy(make_decoder()))):
        policy.reference = reference
        kl = policy(batch, frozenset({"ref_kl"})).ref_kl
        results.append((kl, *torch.autograd.grad(kl.sum(), policy.actor_parameters())))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-11)
    assert results[0][0].abs().max() > 0.01


def test_a_view_needs_adapters(make_decoder):
    with pytest.raises(HoneError, match="frozen_copy"):
        ReferenceView(Policy(make_decoder()))


def test_actor_parameters_are_the_adapters(make_decoder):
    policy = Policy(adapted(make_decoder))
    assert {id(p) for p in policy.actor_parameters()} == {id(p) for p in lora_parameters(policy.decoder)}


def test_a_checkpointed_adapter_has_equal_gradients(make_decoder, make_batch, rows):
    grads = []
    for on in (False, True):
        policy = Policy(adapted(make_decoder), checkpoint_layers=on)
        policy(make_batch(rows), LOGP).logp.sum().backward()
        grads.append([p.grad for p in policy.actor_parameters()])
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_effective_rank_by_hand():
    assert effective_rank(torch.diag(torch.tensor([3.0, 1.0]))) == pytest.approx(1.6)  # 4^2 / (9 + 1)
    assert effective_rank(torch.eye(5)) == pytest.approx(5.0)
    assert effective_rank(torch.outer(torch.randn(4), torch.randn(6))) == pytest.approx(1.0)
    assert effective_rank(torch.zeros(3, 2)) == 0.0


def test_update_ranks_equal_those_of_the_full_matrices(make_decoder):
    decoder = adapted(make_decoder)
    ranks = update_ranks(decoder)
    assert len(ranks) == 14
    for name, rank in ranks.items():
        assert rank == pytest.approx(effective_rank(decoder.get_submodule(name).update()))
        assert 1 < rank <= 3
    assert set(update_ranks(adapted(make_decoder, moved=False)).values()) == {0.0}
