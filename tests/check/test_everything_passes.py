"""Every algorithm, and the settings that change what is built, pass every check or say why one does not apply."""

import torch
from check_world import World, job_of, names, recipe
from each import each

from hone.algo import ALGORITHMS
from hone.check import suite


@each("algo", sorted(ALGORITHMS))
def test_every_algorithm_passes(world: World, algo: str):
    report = suite.check(recipe(world, algo))
    assert names(report, "fail") | names(report, "warn") == set(), report.findings
    assert [f.name for f in report.findings] == list(suite.ALL)
    assert all(f.seen for f in report.findings)
    online = ALGORITHMS[algo]().online
    assert ("log-probs agree" in names(report, "pass")) == online
    assert {"gradient", "one step", "checkpoint", "batch cut", "update in force"} <= names(report, "pass")
    assert not (world.folder / "never").exists()


@each(
    ("algo", "settings"),
    [
        ("grpo", ["lora.rank=4", "train.layout=packed"]),
        ("grpo", ["algo.kl=loss:exact", "sample.temperature=0.5", "train.mismatch=truncate"]),
        ("grpo", ["optim.weight_decay=0.1", "optim.warmup=2", "optim.schedule=cosine", "optim.clip_norm=0.01"]),
        ("ppo", ["critic.kind=own", "lora.rank=4", "optim.critic_lr=0.01"]),
        ("ppo", ["critic.kind=shared", "train.micro_rows=3"]),
        ("ppo_penalty", ["algo.exact=true"]),
        ("distil", ["algo.top_k=5", "lora.rank=2"]),
        ("dpo", ["lora.rank=2"]),
        ("reward_model", ["lora.rank=2"]),
        ("reinforce", ["sample.group=1"]),
        ("sft", ["save.every=1", "train.reference_refresh=2"]),
    ],
)
def test_settings_that_change_what_is_built_pass(world: World, algo: str, settings: list[str]):
    report = suite.check(recipe(world, algo, *settings))
    assert names(report, "fail") | names(report, "warn") == set(), report.findings


def test_chats_pass(world: World):
    for algo, rows in (("grpo", "chats"), ("sft", "messages")):
        report = suite.check(recipe(world, algo, f"model.path={world / 'chat'}", f"data={world / rows}.jsonl"))
        assert names(report, "fail") | names(report, "warn") == set(), report.findings
        assert {"template", "first token"} <= names(report, "pass")


def test_rewards_without_signal_warn_and_learning_is_checked_with_made_up_ones(world: World):
    report = suite.check(recipe(world, "expert_iteration", reward={"math": 1.0}))
    assert names(report, "fail") == set()
    assert names(report, "warn") == {"reward values"}
    (gradient,) = (f for f in report.findings if f.name == "gradient")
    assert gradient.verdict == "pass"
    assert "made-up rewards stand in" in gradient.seen


def test_a_check_leaves_no_trace(world: World):
    torch.manual_seed(5)
    random, threads = torch.get_rng_state(), torch.get_num_threads()
    deterministic = torch.are_deterministic_algorithms_enabled()
    first = suite.check(recipe(world, "grpo", "train.threads=2"))
    assert torch.equal(torch.get_rng_state(), random)
    assert torch.get_num_threads() == threads
    assert torch.are_deterministic_algorithms_enabled() == deterministic
    assert suite.check(recipe(world, "grpo", "train.threads=2")).row == first.row


def test_examining_a_run_does_not_move_it(world: World):
    job = job_of(world, "ppo", "critic.kind=shared")
    assert job.roller is not None
    before = [p.detach().clone() for p in job.policy.parameters()]
    state = job.source.state()
    assert suite.examine(job).ok
    assert all(torch.equal(p, q) for p, q in zip(job.policy.parameters(), before, strict=True))
    assert job.source.state() == state
    assert (job.roller.requests, job.roller.sampler.version) == (0, 0)
    assert (job.learner.updates, job.learner.version, len(job.learner.optimizer.state)) == (0, 0, 0)
    assert [g["lr"] for g in job.learner.optimizer.param_groups] == [1e-3] * len(job.learner.optimizer.param_groups)
