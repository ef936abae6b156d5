"""Models of families that the decoder does not compute, run through transformers: the same promises, more slowly."""

import itertools
import json
from typing import Any

import pytest
import tiny
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hone.algo import grpo, sft
from hone.data.feed.source import Source
from hone.engine.params import SampleParams
from hone.errors import HoneError
from hone.loop import online
from hone.model.formats.folder import load_decoder, load_scorer
from hone.model.formats.foreign import Foreign
from hone.model.formats.save import save_decoder, save_scorer
from hone.model.lora import add_lora
from hone.model.policy import Policy, frozen_copy
from hone.model.scorer import Scorer
from hone.model.teacher import trim_head
from hone.rollout.local import LocalSampler
from hone.train import optim
from hone.train.learner import Learner

torch.set_num_threads(1)
SIZE = {"vocab_size": 23, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "initializer_range": 0.3}
ROTATED = {**SIZE, "intermediate_size": 24, "max_position_embeddings": 64}
GPT2 = {"vocab_size": 23, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 64, "initializer_range": 0.3}
CAPPED = {"num_key_value_heads": 2, "head_dim": 4, "final_logit_softcapping": 2.0, "sliding_window": 8}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "absolute positions, dropout": ("gpt2", GPT2),
    "parallel layers": ("gpt_neox", {**ROTATED, "rotary_pct": 0.5, "hidden_dropout": 0.1}),
    "a bias on the head": ("phi", ROTATED),
    "soft caps": ("gemma2", {**ROTATED, **CAPPED}),
    "scaled logits": ("granite", {**ROTATED, "logits_scaling": 3.0, "embedding_multiplier": 2.0}),
    "no attention": ("mamba", {**SIZE, "state_size": 4, "time_step_rank": 2}),
    "Llama with another rope": ("llama", {**ROTATED, "rope_parameters": DYNAMIC}),
}
TOKENS = torch.randint(0, 23, (2, 20), generator=torch.Generator().manual_seed(0))


@pytest.fixture(params=FAMILIES)
def folder(request, tmp_path):
    family, settings = FAMILIES[request.param]
    torch.manual_seed(0)
    ids = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **settings, **ids))
    for p in model.parameters():
        if p.ndim == 1:
            torch.nn.init.normal_(p, mean=1.0, std=0.2)
    model.save_pretrained(tmp_path)
    return tmp_path


def test_there_and_back_logits_are_equal(folder, tmp_path):
    theirs = AutoModelForCausalLM.from_pretrained(folder).eval()
    ours = load_decoder(folder)
    assert isinstance(ours, Foreign)
    with torch.no_grad():
        torch.testing.assert_close(ours.logits(ours(TOKENS)), theirs(TOKENS).logits, rtol=1e-5, atol=1e-5)
        save_decoder(ours, tmp_path / "again")
        again = AutoModelForCausalLM.from_pretrained(tmp_path / "again").eval()
        assert torch.equal(again(TOKENS).logits, theirs(TOKENS).logits)


def test_the_sampler_and_the_learner_agree(folder):
    """Prompts of two lengths in one call, rows that end early, a group that shares its prompt."""
    ours = load_decoder(folder, dtype=torch.float64)
    params = SampleParams(max_tokens=12, stop_ids=frozenset({3, 4}), seed=1)
    groups = LocalSampler(ours).sample([[1, 2, 3], [4, 5, 6, 7, 8, 9, 10]], n=3, params=params)
    alone = LocalSampler(ours).sample([[4, 5, 6, 7, 8, 9, 10]], n=3, params=params, first_request=3)
    assert [r.tokens for r in alone[0]] == [r.tokens for r in groups[1]]
    for rollout in (r for g in groups for r in g):
        tokens = torch.tensor([list(rollout.tokens)])
        with torch.no_grad():
            logp = ours.logits(ours(tokens[:, :-1])).log_softmax(-1)[0].gather(-1, tokens[0, 1:, None])[:, 0]
        written = torch.tensor(rollout.mask[1:])
        expected = torch.tensor(rollout.gen_logp, dtype=torch.float64)[1:]
        torch.testing.assert_close(logp[written], expected[written], rtol=1e-5, atol=1e-5)


def test_it_learns_by_reinforcement(folder):
    """Through the loop, with a reference: the log-probs of sampler and learner agree and the weights move."""
    ours = load_decoder(folder)
    policy = Policy(ours)
    policy.reference = frozen_copy(policy)
    assert not any(m.training for m in policy.decoder.modules())
    optimizer = optim.adamw(policy.actor_parameters(), [], lr=0.01)
    learner = Learner(policy=policy, optimizer=optimizer, reference=policy.reference, micro_rows=5)
    before = [p.detach().clone() for p in policy.actor_parameters()]
    roll, score = tiny.Roller(ours, group=4), tiny.scorer(lambda r: sum(t % 2 for t in tiny.written(r)) / r.limit)
    done = list(itertools.islice(online(Source(tiny.TASKS, seed=0), roll, score, learner, grpo(), prompts=4), 2))
    assert done[0].metrics["gen_gap"] < 1e-4
    assert done[0].metrics["ref_kl"] < 1e-9
    assert any(not torch.equal(a, b) for a, b in zip(before, policy.actor_parameters(), strict=True))


def test_a_teacher_with_more_tokens_than_the_student_is_trimmed(folder):
    teacher = load_decoder(folder)
    with torch.no_grad():
        expected = teacher.logits(teacher(TOKENS))[..., :15]
        smaller = trim_head(teacher, 15)
        torch.testing.assert_close(smaller.logits(smaller(TOKENS)), expected)


def test_micro_batches_change_no_gradient(folder):
    rows = [[r] for r in tiny.random_rows(6)]
    weights = []
    for micro in (1, 4, 64):
        policy = Policy(load_decoder(folder, dtype=torch.float64))
        optimizer = optim.adamw(policy.actor_parameters(), [], lr=0.01)
        learner = Learner(policy=policy, optimizer=optimizer, micro_rows=micro)
        next(tiny.run_offline(learner, sft(), rows, size=6))
        weights.append(torch.cat([p.detach().flatten() for p in policy.actor_parameters()]))
    for other in weights[1:]:
        torch.testing.assert_close(other, weights[0], rtol=0, atol=1e-6)


def test_a_scorer_and_an_adapter_stand_on_it(folder):
    ours = load_decoder(folder)
    batch = tiny.collated(tiny.random_rows(3))
    scorer = Scorer(ours)
    scorer(batch, frozenset({"value"})).value.sum().backward()
    assert scorer.head.weight.grad is not None
    if any(isinstance(m, torch.nn.Linear) for n, m in ours.inner.named_modules() if "head" not in n):
        names = add_lora(load_decoder(folder), rank=2, alpha=4.0, targets=("all-linear",))
        assert names


@pytest.mark.parametrize("kind", ["reward", "step"])
def test_a_scorer_goes_there_and_back(kind, folder, tmp_path):
    scorer = Scorer(load_decoder(folder), kind=kind, mean=0.5, std=2.0)
    save_scorer(scorer, tmp_path / "scorer")
    twin = load_scorer(tmp_path / "scorer")
    assert (twin.kind, twin.mean, twin.std) == (kind, 0.5, 2.0)
    batch = tiny.collated(tiny.random_rows(3))
    assert torch.equal(twin(batch, frozenset({"value"})).value, scorer(batch, frozenset({"value"})).value)


def test_packed_rows_are_refused_with_the_remedy(folder):
    policy = Policy(load_decoder(folder), layout="packed")
    with pytest.raises(HoneError, match=r"train\.layout=padded"):
        policy(tiny.collated(tiny.random_rows(3)), frozenset({"logp"}))


def test_weights_that_do_not_fit_are_not_drawn_at_random(folder):
    config = json.loads((folder / "config.json").read_text())
    key = "n_layer" if "n_layer" in config else "num_hidden_layers"
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k != "layer_types"} | {key: 3}))
    with pytest.raises(HoneError, match="do not fit its config"):
        load_decoder(folder)
