"""The policy and the scorer: every number equals that of one row alone, however the batch is padded or packed."""

import pytest
import torch
from each import each
from torch.utils._python_dispatch import TorchDispatchMode

from hone.errors import HoneError
from hone.model.policy import OwnCritic, Policy, SharedCritic, frozen_copy
from hone.model.scorer import ScalarHead, Scorer
from hone.model.vocab import token_stats
from hone.types import ABSENT

torch.set_num_threads(1)
EVERYTHING = frozenset({"logp", "entropy", "value", "ref_kl", "old_kl"})
STATS = EVERYTHING - {"value"}
LOGP, VALUE = frozenset({"logp"}), frozenset({"value"})


def exact(a, b):
    torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def full_policy(make_decoder, *, own=False, **settings):
    """A policy with everything set; other seeds make the reference and the old policy differ from it."""
    critic = OwnCritic(make_decoder(seed=7, hidden_size=8)) if own else SharedCritic(16)
    torch.manual_seed(0)
    torch.nn.init.normal_(critic.head.weight)
    torch.nn.init.constant_(critic.head.bias, 0.3)
    policy = Policy(make_decoder(), critic=critic.double(), **settings)
    temperature = settings.get("temperature", 1.0)
    policy.reference = Policy(make_decoder(seed=1), temperature=temperature)
    policy.old = Policy(make_decoder(seed=2), temperature=temperature)
    return policy


def one_row_at_a_time(policy, row, logits_of):
    """Every statistic of one row by the definitions, at the positions trained on; values at every position."""
    T = policy.temperature
    logq, logr, logo = (
        logits_of(m.decoder, row).div(T).log_softmax(-1) for m in (policy, policy.reference, policy.old)
    )
    q = logq.exp()
    seen = slice(1, len(row) - 1)
    logp = logq[torch.arange(len(row) - 1), torch.tensor(row[1:])]
    backbone = policy.critic.decoder if isinstance(policy.critic, OwnCritic) else policy.decoder
    return {
        "logp": logp[seen],
        "entropy": -(q * logq).sum(-1)[seen],
        "ref_kl": (q * (logq - logr)).sum(-1)[seen],
        "old_kl": (logo.exp() * (logo - logq)).sum(-1)[seen],
        "value": policy.critic.head(backbone(torch.tensor([row])))[0],
    }


def weighted(columns):
    """A loss in which every number has its own weight."""
    return sum(
        x @ torch.linspace(0.5, 1.5, len(x), dtype=x.dtype) * (i + 1)
        for i, (_, x) in enumerate(sorted(columns.items()))
    )


def read(fwd, batch):
    return {name: getattr(fwd, name)[batch.mask] for name in STATS} | {"value": fwd.value[batch.real]}


def gradients(policy, loss):
    params = [*policy.actor_parameters(), *policy.critic_parameters()]
    return torch.autograd.grad(loss, params)


SETTINGS = [
    {"layout": "padded"},
    {"layout": "packed"},
    {"layout": "packed", "chunk": 5},
    {"layout": "padded", "chunk": 1},
    {"layout": "padded", "checkpoint_layers": True},
    {"layout": "packed", "chunk": 7, "checkpoint_layers": True, "temperature": 0.6},
    {"layout": "padded", "temperature": 1.7},
    {"layout": "shared"},
    {"layout": "shared", "checkpoint_layers": False},
    {"layout": "shared", "chunk": 5, "checkpoint_layers": True, "temperature": 0.6},
]


@each("own", [False, True])
@each("settings", SETTINGS, ids=str)
def test_every_layout_gives_the_numbers_and_gradients_of_each_row_alone(
    settings, own, make_decoder, make_batch, rows, logits_of
):
    policy, batch = full_policy(make_decoder, own=own, **settings), make_batch(rows)
    got = read(policy(batch, EVERYTHING), batch)
    parts = [one_row_at_a_time(policy, row, logits_of) for row in rows]
    alone = {name: torch.cat([part[name] for part in parts]) for name in got}
    for name in got:
        exact(got[name], alone[name])
    for a, b in zip(gradients(policy, weighted(got)), gradients(policy, weighted(alone)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-11)


class Logits(TorchDispatchMode):
    """How many positions met the vocabulary in each product."""

    def __init__(self, size: int):
        super().__init__()
        self.size, self.seen = size, list[int]()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if "mm" in func.__name__ and out.ndim == 2 and out.shape[1] == self.size:
            self.seen.append(len(out))
        return out


@pytest.mark.parametrize(
    ("settings", "once"),
    [({}, False), ({"checkpoint_layers": False}, True), ({"checkpoint_layers": False, "chunk": 3}, False)],
)
def test_logits_are_computed_once_where_nothing_is_to_be_computed_again(
    settings, once, make_decoder, make_batch, rows, monkeypatch
):
    policy, batch = Policy(make_decoder().double(), **settings), make_batch(rows)
    V, N = policy.decoder.config.vocab_size, int(batch.mask.sum())
    monkeypatch.setitem(token_stats.BUDGET, "cpu", 3 * 8 * V)
    chunks = -(-N // 3)
    with Logits(V) as logits:
        logp = policy(batch, frozenset({"logp"})).logp
    assert sum(logits.seen) == N
    assert len(logits.seen) == (1 if once else chunks)
    with Logits(V) as logits:
        logp.sum().backward()
    assert len(logits.seen) == (0 if once else chunks - 1)
    with torch.no_grad(), Logits(V) as logits:
        policy(batch, frozenset({"logp"}))
    assert len(logits.seen) == chunks, "what is only read needs no more memory than a chunk"


@each("layout", ["padded", "packed", "shared"])
@each("place", ["left", "right", "middle", "both"])
@each("extra", [0, 1, 9])
def test_padding_changes_nothing_whatever_its_place_amount_and_tokens(
    layout, place, extra, make_decoder, make_batch, rows
):
    policy = full_policy(make_decoder, layout=layout)
    plain = make_batch(rows)
    padded = make_batch(rows, place=place, extra=extra, garbage=-100)
    a, b = policy(plain, EVERYTHING), policy(padded, EVERYTHING)
    for name, x in read(a, plain).items():
        exact(x, read(b, padded)[name])
    for x, y in zip(
        gradients(policy, weighted(read(a, plain))), gradients(policy, weighted(read(b, padded))), strict=True
    ):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-11)


def test_everything_is_zero_off_the_mask_and_values_on_padding(make_decoder, make_batch, rows):
    batch = make_batch(rows, place="both", extra=3)
    fwd = full_policy(make_decoder)(batch, EVERYTHING)
    for name in STATS:
        column = getattr(fwd, name)
        assert column.shape == batch.mask.shape
        assert (column[~batch.mask] == 0).all()
        assert (column[batch.mask] != 0).all()
    assert (fwd.value[~batch.real] == 0).all()
    assert (fwd.value[batch.real] != 0).all()


def test_only_what_is_wanted_is_computed(make_decoder, make_batch, rows):
    policy, batch = full_policy(make_decoder), make_batch(rows)
    policy.reference = policy.old = None
    fwd = policy(batch, LOGP)
    assert all(x is ABSENT for x in (fwd.entropy, fwd.value, fwd.ref_kl, fwd.old_kl))
    assert policy(batch, frozenset()) == type(fwd)()


@pytest.mark.parametrize("own", [False, True])
def test_values_never_touch_the_vocabulary(own, make_decoder, make_batch, rows):
    policy, batch = full_policy(make_decoder, own=own), make_batch(rows)
    policy.decoder.lm_head = torch.nn.Linear(16, 23, bias=False).double()  # untied, and rubbish
    torch.nn.init.constant_(policy.decoder.lm_head.weight, float("nan"))
    value = policy(batch, VALUE).value
    assert value.isfinite().all()
    value.sum().backward()
    assert policy.decoder.lm_head.weight.grad is None


def test_an_own_critic_does_not_run_the_policy(make_decoder, make_batch, rows):
    policy = full_policy(make_decoder, own=True)
    with torch.no_grad():
        for p in policy.decoder.parameters():
            p.fill_(float("nan"))
    assert policy(make_batch(rows), VALUE).value.isfinite().all()


def test_value_at_the_last_real_position_has_read_the_last_token(make_decoder, make_batch):
    policy = full_policy(make_decoder)
    batch, other = make_batch([[1, 2, 3, 4], [5, 6]]), make_batch([[1, 2, 3, 9], [5, 6]])
    a, b = policy(batch, VALUE).value, policy(other, VALUE).value
    assert (a != b).tolist() == [[False, False, False, True], [False] * 4]


def test_temperature_divides_the_logits_exactly(make_decoder, make_batch, rows, logits_of):
    batch = make_batch(rows[:1])
    logits = logits_of(make_decoder(), rows[0])[1:-1]
    for temperature in (0.25, 1.0, 3.0):
        policy = Policy(make_decoder(), temperature=temperature)
        exact(policy.log_rows(batch)(slice(None)), (logits / temperature).log_softmax(-1))


@pytest.mark.parametrize("layout", ["padded", "packed", "shared"])
def test_log_rows_are_at_the_mask_in_row_major_order(layout, make_decoder, make_batch, rows):
    policy, batch = Policy(make_decoder(), layout=layout), make_batch(rows, place="left", extra=2)
    table = policy.log_rows(batch)(slice(None))
    assert table.shape == (int(batch.mask.sum()), 23)
    exact(table.exp().sum(-1), torch.ones(len(table)).double())
    exact(table.gather(-1, batch.targets[batch.mask][:, None])[:, 0], policy(batch, LOGP).logp[batch.mask])
    exact(policy.log_rows(batch)(slice(3, 6)), table[3:6])


def test_a_distribution_may_be_anything_with_log_rows(make_decoder, make_batch, rows):
    class Uniform:
        def log_rows(self, batch):
            return torch.full((int(batch.mask.sum()), 23), 1 / 23, dtype=torch.float64).log().__getitem__

    policy, batch = Policy(make_decoder(), chunk=4), make_batch(rows)
    policy.reference = Uniform()
    fwd = policy(batch, frozenset({"ref_kl", "entropy"}))
    expected = torch.where(batch.mask, torch.tensor(23.0).double().log() - fwd.entropy, 0.0)
    exact(fwd.ref_kl, expected)  # KL(p || uniform) = log V - H(p)


def test_a_policy_is_at_distance_zero_from_its_frozen_copy_with_zero_gradient(make_decoder, make_batch, rows):
    policy, batch = Policy(make_decoder(), temperature=0.8), make_batch(rows)
    policy.reference = policy.old = frozen_copy(policy)
    fwd = policy(batch, frozenset({"ref_kl", "old_kl"}))
    exact(fwd.ref_kl, torch.zeros_like(fwd.ref_kl))
    exact(fwd.old_kl, torch.zeros_like(fwd.old_kl))
    for grad in torch.autograd.grad(fwd.ref_kl.sum() + fwd.old_kl.sum(), policy.actor_parameters()):
        exact(grad, torch.zeros_like(grad))


def test_frozen_copy_stays_when_the_policy_moves(make_decoder, make_batch, rows):
    policy, batch = full_policy(make_decoder, own=True), make_batch(rows)
    twin, before = frozen_copy(policy), policy(batch, LOGP)
    assert not any(p.requires_grad for p in twin.parameters())
    assert not twin.training
    assert twin.critic is None
    with torch.no_grad():
        for p in policy.parameters():
            p.mul_(1.5)
    exact(twin(batch, LOGP).logp, before.logp.detach())
    assert not torch.equal(policy(batch, LOGP).logp, before.logp)
    assert all(p.requires_grad for p in policy.parameters())


def test_reference_and_old_are_no_part_of_the_policy(make_decoder):
    policy = Policy(make_decoder())
    names, count = list(policy.state_dict()), len(list(policy.parameters()))
    policy.reference = policy.old = frozen_copy(policy)
    assert list(policy.state_dict()) == names
    assert len(list(policy.parameters())) == count
    assert [name for name, _ in policy.named_children()] == ["decoder"]
    policy.train()
    assert not policy.reference.training


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("own", [True, False])
def test_actor_and_critic_parameters_are_disjoint_and_complete(tie, own, make_decoder):
    decoder = make_decoder(tie_word_embeddings=tie)
    critic = OwnCritic(make_decoder(tie_word_embeddings=tie)) if own else SharedCritic(16)
    policy = Policy(decoder, critic=critic)
    actor, value = {id(p) for p in policy.actor_parameters()}, {id(p) for p in policy.critic_parameters()}
    assert not actor & value
    assert actor | value == {id(p) for p in policy.parameters() if p.requires_grad}
    assert actor == {id(p) for p in decoder.parameters()}
    # two layers of 9 tensors, embedding, final norm, head and its bias; the unused lm_head is left out
    assert len(value) == (22 if own else 2)
    assert Policy(make_decoder()).critic_parameters() == []


@pytest.mark.parametrize("own", [True, False])
def test_frozen_parameters_are_in_neither_list(own, make_decoder):
    policy = full_policy(make_decoder, own=own)
    policy.decoder.model.embed_tokens.weight.requires_grad_(False)
    policy.critic.head.bias.requires_grad_(False)
    assert all(p.requires_grad for p in policy.actor_parameters() + policy.critic_parameters())
    left = len(policy.actor_parameters()) + len(policy.critic_parameters())
    assert left == len(list(policy.parameters())) - 2


def test_values_of_a_shared_critic_reach_the_backbone(make_decoder, make_batch, rows):
    policy = Policy(make_decoder(), critic=SharedCritic(16).double())
    torch.nn.init.normal_(policy.critic.head.weight)
    policy(make_batch(rows), VALUE).value.sum().backward()
    assert policy.decoder.model.norm.weight.grad.abs().sum() > 0
    assert policy.critic.head.weight.grad.abs().sum() > 0


@each("layout", ["padded", "packed", "shared"])
@each("empty", ["mask", "real", "rows"])
@each("chunk", [None, 3])
def test_an_empty_micro_batch_gives_zeros_and_zero_gradients(layout, empty, chunk, make_decoder, make_batch, rows):
    policy = full_policy(make_decoder, layout=layout, chunk=chunk)
    batch = make_batch(rows)
    if empty == "rows":
        batch = batch.rows(slice(0, 0))
    else:
        batch.mask.zero_()
        batch.real.logical_and_(torch.tensor(empty != "real"))
    fwd = policy(batch, EVERYTHING)
    for name in STATS:
        assert torch.equal(getattr(fwd, name), torch.zeros(batch.mask.shape, dtype=torch.float64))
    (sum(getattr(fwd, name).sum() for name in STATS) + 0 * fwd.value.sum()).backward()
    for name, p in policy.named_parameters():
        assert p.grad is not None, name
        assert torch.equal(p.grad, torch.zeros_like(p)), name


def test_a_row_without_tokens_is_harmless(make_decoder, make_batch, rows):
    for layout in ("padded", "packed", "shared"):
        policy = full_policy(make_decoder, layout=layout)
        batch, fewer = make_batch(rows), make_batch(rows[1:])
        batch.mask[0], batch.real[0] = False, False
        a, b = policy(batch, EVERYTHING), policy(fewer, EVERYTHING)
        for name in EVERYTHING:
            assert (getattr(a, name)[0] == 0).all()
            exact(getattr(a, name)[1:], getattr(b, name))


def test_what_is_missing_is_named_before_anything_is_computed(make_decoder, make_batch, rows):
    policy, batch = Policy(make_decoder()), make_batch(rows)
    with pytest.raises(HoneError, match="SharedCritic or OwnCritic"):
        policy(batch, VALUE)
    with pytest.raises(HoneError, match=r"set policy\.reference"):
        policy(batch, frozenset({"ref_kl"}))
    with pytest.raises(HoneError, match=r"set policy\.old"):
        policy(batch, frozenset({"old_kl"}))
    with pytest.raises(ValueError, match="unknown fields"):
        policy(batch, frozenset({"logits"}))
    batch.real[0, 1] = False
    with pytest.raises(ValueError, match="mask is True on padding"):
        policy(batch, LOGP)


def test_wrong_settings_are_refused(make_decoder):
    decoder = make_decoder()
    with pytest.raises(ValueError, match="another decoder"):
        Policy(decoder, critic=OwnCritic(decoder))
    with pytest.raises(HoneError, match="temperature is 0"):
        Policy(decoder, temperature=0.0)
    with pytest.raises(HoneError, match="reward, value, step"):
        Scorer(decoder, kind="judge")
    with pytest.raises(HoneError, match="standard deviation"):
        Scorer(decoder, std=0.0)


def test_a_row_longer_than_the_context_is_refused(make_decoder, make_batch, rows):
    with pytest.raises(HoneError, match="12 tokens, the model's context is 11"):
        Policy(make_decoder(max_position_embeddings=11))(make_batch(rows), LOGP)
    # padding does not count
    batch = make_batch(rows, place="left", extra=40)
    Policy(make_decoder(max_position_embeddings=12))(batch, LOGP)


def test_scalar_head_by_hand():
    head = ScalarHead(2)
    head.load_state_dict({"weight": torch.tensor([[2.0, -1.0]]), "bias": torch.tensor([0.5])})
    assert head(torch.tensor([[[1.0, 3.0], [0.0, 0.0]]])).tolist() == [[-0.5, 0.5]]
    assert head.bfloat16()(torch.ones(3, 2).bfloat16()).dtype == torch.float32


def test_a_zero_head_starts_at_zero_and_still_learns():
    head = ScalarHead(4, zero=True)
    x = torch.randn(5, 4)
    assert (head(x) == 0).all()
    head(x).sum().backward()
    assert head.weight.grad.abs().min() > 0
    assert (ScalarHead(4).weight != 0).all()


@pytest.mark.parametrize("layout", ["padded", "packed", "shared"])
def test_scorer_gives_the_normalised_head_of_each_row_alone(layout, make_decoder, make_batch, rows):
    scorer = Scorer(make_decoder(), layout=layout, mean=0.4, std=2.0).double()
    batch = make_batch(rows, place="middle", extra=3, garbage=-1)
    value = scorer(batch, VALUE).value
    for b, row in enumerate(rows):
        raw = scorer.head(scorer.decoder(torch.tensor([row])))[0]
        exact(value[b][batch.real[b]], (raw - 0.4) / 2.0)
    assert (value[~batch.real] == 0).all()
    with pytest.raises(ValueError, match="only value"):
        scorer(batch, LOGP)


@pytest.mark.parametrize("tie", [True, False])
def test_scorer_trains_its_backbone_and_head_but_no_vocabulary_head(tie, make_decoder, make_batch, rows):
    scorer = Scorer(make_decoder(tie_word_embeddings=tie)).double()
    scorer(make_batch(rows), VALUE).value.sum().backward()
    trainable = {name: p for name, p in scorer.named_parameters() if p.requires_grad}
    assert not any("lm_head" in name for name in trainable)
    assert all(p.grad is not None for p in trainable.values())
    assert len(trainable) == 21


def test_scorer_gradients_are_equal_with_checkpointed_layers(make_decoder, make_batch, rows):
    grads = []
    for on in (False, True):
        torch.manual_seed(3)
        scorer = Scorer(make_decoder(), checkpoint_layers=on).double()
        scorer(make_batch(rows), VALUE).value.square().sum().backward()
        grads.append([p.grad for p in scorer.parameters()])
    for a, b in zip(*grads, strict=True):
        exact(a, b)
