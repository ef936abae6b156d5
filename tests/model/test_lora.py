"""Adapters: where they start, what moves first, what they cost, and that off and merged mean what they say."""

import copy
import math

import pytest
import torch
from torch import nn

from hone.errors import HoneError
from hone.model.lora import (
    Adapter,
    LoRALinear,
    adapter_names,
    adapter_off,
    add_lora,
    lora_parameters,
    lora_state,
    merge_lora,
    plain_state,
    select_adapter,
    use_adapter,
)
from hone.model.policy import Policy, ReferenceView, SharedCritic, frozen_copy

torch.set_num_threads(1)
LOGP = frozenset({"logp"})
TOKENS = torch.arange(10)[None]
SEVEN = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def adapted(make_decoder, *, moved=True, qkv_bias=False, **settings):
    decoder = make_decoder(qkv_bias=qkv_bias)
    add_lora(decoder, **{"rank": 3, "alpha": 6.0, "targets": ("all-linear",), **settings})
    if moved:
        move(decoder)
    return decoder


def move(decoder, seed=9):
    """The selected adapter away from its start."""
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in lora_parameters(decoder):
            p.add_(torch.randn(p.shape, generator=g, dtype=torch.float64) * 0.2)


def layer_of(base, *, rank=1, alpha=1.0, seed=0):
    """A layer with one adapter, on."""
    layer = LoRALinear(base)
    layer.adapters["default"] = Adapter(base, rank=rank, alpha=alpha, generator=torch.Generator().manual_seed(seed))
    layer.selected = "default"
    return layer, layer.adapters["default"]


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
    layer, adapter = layer_of(base, alpha=2.0)
    with torch.no_grad():
        base.weight.copy_(torch.tensor([[1.0, 2.0]]))
        adapter.lora_A.copy_(torch.tensor([[3.0, 4.0]]))
        adapter.lora_B.copy_(torch.tensor([[5.0]]))
    assert layer(torch.ones(1, 2)).item() == 73.0
    assert layer.weight.tolist() == [[31.0, 42.0]]
    assert adapter.update().tolist() == [[30.0, 40.0]]


@pytest.mark.parametrize(("rslora", "scale"), [(False, 16 / 4), (True, 16 / 2)])
def test_scale_is_alpha_over_r_or_over_its_root(rslora, scale, make_decoder):
    decoder = make_decoder()
    add_lora(decoder, rank=4, alpha=16.0, targets=("q_proj",), rslora=rslora)
    assert decoder.model.layers[0].self_attn.q_proj.adapter.scale == scale


def test_a_is_gaussian_with_variance_one_over_d_in():
    _, adapter = layer_of(nn.Linear(400, 10), rank=200)
    z = adapter.lora_A.detach() * math.sqrt(400)
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
    _, adapter = layer_of(base, rank=rank)
    return adapter.lora_A.numel() + adapter.lora_B.numel(), base.weight.numel()


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


def test_plain_state_is_that_of_the_merged_model_and_changes_nothing(make_decoder):
    decoder = adapted(make_decoder, qkv_bias=True)
    before = decoder(TOKENS)
    state = plain_state(decoder)
    assert torch.equal(decoder(TOKENS), before)
    with adapter_off(decoder):  # what is on now is what is saved
        assert torch.equal(
            plain_state(decoder)["model.layers.0.self_attn.q_proj.weight"],
            decoder.model.layers[0].self_attn.q_proj.base.weight,
        )
    merge_lora(decoder)
    assert list(state) == list(decoder.state_dict())
    for name, x in decoder.state_dict().items():
        assert torch.equal(x, state[name])


def test_a_layer_keeps_its_bias():
    base = nn.Linear(3, 2)
    layer, adapter = layer_of(base)
    nn.init.normal_(adapter.lora_B)
    x = torch.randn(4, 3)
    torch.testing.assert_close(layer(x), x @ layer.weight.T + base.bias)


def test_lora_state_is_the_adapter_alone_by_name(make_decoder):
    decoder = adapted(make_decoder)
    state = lora_state(decoder)
    assert len(state) == 2 * 2 * 7
    layer = decoder.get_submodule("model.layers.0.self_attn.q_proj")
    assert torch.equal(state["model.layers.0.self_attn.q_proj.lora_A.weight"], layer.adapter.lora_A)
    assert torch.equal(state["model.layers.0.self_attn.q_proj.lora_B.weight"], layer.adapter.lora_B)


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


def test_a_name_is_given_once(make_decoder):
    decoder = adapted(make_decoder)
    with pytest.raises(HoneError, match='"default" already'):
        add_lora(decoder, rank=1, alpha=1.0)
    for name in ("", "a.b", "keys", "training"):  # a parameter's name, and nn.ModuleDict, could not hold them
        with pytest.raises(HoneError, match="cannot be named"):
            add_lora(decoder, name=name, rank=1, alpha=1.0)
    assert adapter_names(decoder) == ["default"]


def two(make_decoder):
    """One decoder with "one" on every layer and "two" on q and v alone, and a decoder for each."""
    settings = {"one": {"targets": ("all-linear",), "rank": 3}, "two": {"targets": ("q_proj", "v_proj"), "rank": 2}}
    both, alone = make_decoder(), {}
    for seed, (name, setting) in enumerate(settings.items()):
        alone[name] = make_decoder()
        for decoder in (both, alone[name]):
            add_lora(decoder, name=name, alpha=4.0, seed=seed, **setting)
            move(decoder, seed)
    return both, alone


def test_each_adapter_of_a_decoder_is_what_it_is_alone(make_decoder):
    both, alone = two(make_decoder)
    assert adapter_names(both) == ["one", "two"]
    assert torch.equal(both(TOKENS), alone["two"](TOKENS))  # the last one added is on
    for name in ("one", "two", "one"):
        with use_adapter(both, name):
            assert torch.equal(both(TOKENS), alone[name](TOKENS))
            with use_adapter(both, None):
                assert torch.equal(both(TOKENS), make_decoder()(TOKENS))
            assert torch.equal(both(TOKENS), alone[name](TOKENS))
            state = lora_state(both)
        assert state.keys() == lora_state(alone[name]).keys()
        assert all(torch.equal(x, state[key]) for key, x in lora_state(alone[name]).items())
    assert torch.equal(both(TOKENS), alone["two"](TOKENS))
    assert (alone["one"](TOKENS) - alone["two"](TOKENS)).abs().max() > 0.01


def test_one_adapter_is_trained_at_a_time_and_the_others_stay(make_decoder, make_batch, rows):
    both, _ = two(make_decoder)
    for name, other in (("one", "two"), ("two", "one")):
        select_adapter(both, name)
        with use_adapter(both, other):
            before = {n: x.clone() for n, x in lora_state(both).items()}
        policy = Policy(both)
        trained = {id(p) for p in policy.actor_parameters()}
        assert trained == {id(p) for p in lora_parameters(both)}
        with use_adapter(both, other):  # looking through another adapter does not train it
            assert {id(p) for p in policy.actor_parameters()} == trained
        optimizer = torch.optim.SGD(policy.actor_parameters(), lr=0.1)
        policy(make_batch(rows), LOGP).logp.sum().backward()
        optimizer.step()
        with use_adapter(both, other):
            assert all(torch.equal(x, before[n]) for n, x in lora_state(both).items())
        assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in policy.actor_parameters())
        both.zero_grad()


def test_merging_takes_the_adapter_that_is_on(make_decoder):
    both, alone = two(make_decoder)
    state = plain_state(both)
    with use_adapter(both, "one"):
        first = plain_state(both)
    for name, expected in (("one", first), ("two", state)):
        merge_lora(alone[name])
        assert all(torch.equal(x, expected[key]) for key, x in alone[name].state_dict().items())
    merge_lora(both)
    assert adapter_names(both) == []
    torch.testing.assert_close(both(TOKENS), alone["two"](TOKENS), rtol=0, atol=1e-12)


def test_an_unknown_adapter_lists_those_there_are(make_decoder):
    both, _ = two(make_decoder)
    for call in (lambda: select_adapter(both, "three"), lambda: use_adapter(both, "three").__enter__()):
        with pytest.raises(HoneError, match="use one of one, two"):
            call()
    with pytest.raises(HoneError, match="add_lora first"):
        select_adapter(make_decoder(), "one")


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
    nn.init.normal_(decoder.lm_head.adapter.lora_B)
    logp = policy(batch, LOGP).logp
    logits = decoder.lm_head(decoder(torch.tensor([rows[0]])))[0]
    torch.testing.assert_close(policy.log_rows(make_batch(rows[:1]))(slice(None)), logits[1:-1].log_softmax(-1))
    logp.sum().backward()
    assert decoder.lm_head.adapter.lora_A.grad.abs().sum() > 0
    view = ReferenceView(policy)
    torch.testing.assert_close(view(batch, LOGP).logp, base(batch, LOGP).logp, rtol=0, atol=1e-12)
    three = slice(0, 3)
    torch.testing.assert_close(view.log_rows(batch)(three), base.log_rows(batch)(three), rtol=0, atol=1e-12)


def test_the_reference_view_is_the_base_model_without_gradient_or_memory(make_decoder, make_batch, rows):
    base, batch = Policy(make_decoder(), temperature=0.7), make_batch(rows)
    critic = SharedCritic(16).double()
    torch.nn.init.normal_(critic.head.weight)
    policy = Policy(adapted(make_decoder), critic=critic, temperature=0.7, chunk=4)
    view = ReferenceView(policy)
    fwd = view(batch, frozenset({"logp", "entropy"}))
    expected = base(batch, frozenset({"logp", "entropy"}))
    torch.testing.assert_close(fwd.logp, expected.logp, rtol=0, atol=1e-12)
    torch.testing.assert_close(fwd.entropy, expected.entropy, rtol=0, atol=1e-12)
    assert not fwd.logp.requires_grad
    torch.testing.assert_close(view.log_rows(batch)(slice(None)), base.log_rows(batch)(slice(None)), rtol=0, atol=1e-12)
    assert not view.log_rows(batch)(slice(None)).requires_grad


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
