"""A setting that is read but not used is the worst kind of setting: each one is followed to where it acts."""

import json
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from small import ROWS, World, contents, metrics, recipe, write_rows

import hone
from hone.config.recipe import Recipe
from hone.launch import build, job, rewards, train
from hone.launch.train import Run
from hone.model.lora import LoRALinear
from hone.model.policy import OwnCritic, Policy, ReferenceView, SharedCritic
from hone.model.scorer import Scorer
from hone.rollout.local import LocalSampler
from hone.train.learner import Learner

torch.set_num_threads(1)


@pytest.fixture
def prepare(world: World, tmp_path: Path):
    def prepare(algo: str, *settings: str, **algo_settings: float) -> Run:
        job = train.prepare(recipe(world, algo, tmp_path / "run", *settings, **algo_settings))
        assert list(tmp_path.iterdir()) == [], "nothing is written before everything is built"
        return job

    return prepare


def test_the_optimiser_is_the_one_asked_for(prepare):
    settings = ["optim.lr=0.5", "optim.critic_lr=0.25", "optim.betas=0.7,0.8", "optim.weight_decay=0.125"]
    job = prepare("ppo", *settings, "optim.clip_norm=3.5", "train.micro_rows=5", "critic.kind=own")
    actor = {id(p) for p in job.policy.actor_parameters()}
    for group in job.learner.optimizer.param_groups:
        of_actor = {id(p) in actor for p in group["params"]}
        assert group["base_lr"] == (0.5 if of_actor == {True} else 0.25)
        assert group["betas"] == (0.7, 0.8)
        assert group["weight_decay"] == (0.125 if group["params"][0].ndim == 2 else 0.0)
    assert (job.learner.clip_norm, job.learner.micro_rows) == (3.5, 5)
    same = prepare("ppo", "optim.lr=0.5").learner.optimizer.param_groups
    assert {group["base_lr"] for group in same} == {0.5}


def test_the_schedule_counts_updates(prepare):
    job = prepare("ppo", "optim.schedule=linear", "optim.warmup=4", "train.epochs=2", "train.minibatches=3")
    # 4 steps x 2 epochs x 3 minibatches = 24 updates, 4 of them warming; then a line from 1 down to 0.1
    assert [job.learner.schedule(n) for n in (0, 3, 4, 14, 24)] == pytest.approx([0.25, 1.0, 1.0, 0.55, 0.1])


def test_the_sampler_and_the_learner_have_one_temperature(prepare):
    job = prepare("grpo", "sample.temperature=0.5", "sample.max_tokens=7", "sample.max_rows=4", "sample.group=5")
    assert job.roller is not None
    assert isinstance(job.roller.sampler, LocalSampler)
    params = job.roller.params
    assert (params.temperature, params.max_tokens, params.seed) == (0.5, 7, 3)
    assert (job.roller.group, job.roller.sampler.max_rows) == (5, 4)
    assert params.stop_ids == job.tokenizer.stop_ids
    assert isinstance(job.policy, Policy)
    assert isinstance(job.policy.reference, Policy)
    assert job.policy.temperature == job.policy.reference.temperature == 0.5
    assert job.roller.sampler.decoder is job.policy.decoder


def test_every_setting_of_sampling_reaches_the_sampler(world: World):
    spec = hone.SampleSpec(max_tokens=9, temperature=0.3, top_k=4, top_p=0.5, min_p=0.125)
    params = build.sample_params(spec, world.tokenizer, seed=7)
    for name in ("max_tokens", "temperature", "top_k", "top_p", "min_p"):
        assert getattr(params, name) == getattr(spec, name)
    assert params.seed == 7


def test_a_temperature_of_sampling_does_not_reach_offline_losses(prepare):
    assert prepare("dpo", "sample.temperature=0.5").policy.temperature == 1.0


@pytest.mark.parametrize(
    ("algo", "settings", "kind"),
    [
        ("grpo", ["algo.beta=0.0"], type(None)),
        ("grpo", [], Policy),
        ("grpo", ["lora.rank=2"], ReferenceView),
        ("grpo", ["algo.kl=loss:exact"], Policy),
        ("klq", [], Policy),
        ("dpo", [], Policy),
        ("kto", [], Policy),
        ("online_dpo", [], Policy),
        ("simpo", [], type(None)),
        ("orpo", [], type(None)),
        ("sft", [], type(None)),
        ("reward_model", [], type(None)),
    ],
)
def test_only_what_compares_has_a_reference(algo: str, settings: list[str], kind: type, prepare):
    job = prepare(algo, *settings)
    assert type(job.learner.reference) is kind
    assert getattr(job.policy, "reference", None) is job.learner.reference


@pytest.mark.parametrize(
    ("algo", "setting", "kind"),
    [
        ("ppo", "critic.kind=none", OwnCritic),
        ("ppo", "critic.kind=own", OwnCritic),
        ("ppo", "critic.kind=shared", SharedCritic),
        ("grpo", "critic.kind=none", type(None)),
    ],
)
def test_the_critic_is_the_one_asked_for(algo: str, setting: str, kind: type, prepare):
    job = prepare(algo, setting)
    assert type(job.policy.critic) is kind
    if kind is OwnCritic:
        mine, its = job.policy.decoder.state_dict(), job.policy.critic.decoder.state_dict()
        assert all(torch.equal(mine[name], its[name]) for name in mine)
        assert not {id(p) for p in job.policy.decoder.parameters()} & {id(p) for p in job.policy.critic.parameters()}


@pytest.mark.parametrize("algo", ["sft", "grpo", "reward_model"])
def test_the_layout_reaches_the_model(algo: str, prepare):
    job = prepare(algo, "train.layout=packed")
    assert isinstance(job.policy, Policy | Scorer)
    assert job.policy.layout == "packed"


def test_the_layout_and_the_micro_batches_change_no_number(world: World, tmp_path: Path):
    for name, settings in (("a", []), ("b", ["train.layout=packed"]), ("c", ["train.micro_rows=2"])):
        hone.run(recipe(world, "sft", tmp_path / name, *settings))
    losses = [[row["loss"] for row in metrics(tmp_path / name)] for name in "abc"]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert losses[2] == pytest.approx(losses[0], rel=1e-4)


def test_a_reference_refreshed_at_every_step_is_the_policy(world: World, tmp_path: Path):
    """Before the update of each step nothing lies between the two; a frozen one is left behind."""
    for every in (0, 1, 2):
        hone.run(recipe(world, "grpo", tmp_path / str(every), f"train.reference_refresh={every}"))
    frozen, always, second = ([row["ref_kl"] for row in metrics(tmp_path / str(n))] for n in (0, 1, 2))
    assert frozen[0] == pytest.approx(0.0, abs=1e-7)
    assert min(frozen[1:]) > 1e-6
    assert always == pytest.approx([0.0] * 4, abs=1e-7)
    assert second[2] == pytest.approx(0.0, abs=1e-7)
    assert min(second[1], second[3]) > 1e-6


def test_a_lora_has_the_rank_the_scale_and_the_seed_asked_for(prepare):
    settings = ["lora.rank=3", "lora.alpha=6", "lora.targets=q_proj,down_proj"]
    job, other = prepare("sft", *settings), prepare("sft", *settings, "seed=4", "lora.rslora=true")
    layers = dict(job.policy.decoder.named_modules())
    adapted = {name for name, module in layers.items() if isinstance(module, LoRALinear)}
    assert {name.rpartition(".")[2] for name in adapted} == {"q_proj", "down_proj"}
    for name in adapted:
        ours, theirs = layers[name].adapter, dict(other.policy.decoder.named_modules())[name].adapter
        assert ours.lora_A.shape[0] == 3
        assert (ours.scale, theirs.scale) == pytest.approx((2.0, 6 / 3**0.5))
        assert not torch.equal(ours.lora_A, theirs.lora_A)


def test_rewards_are_weighed(world: World, tmp_path: Path):
    made = recipe(world, "rloo", tmp_path / "run", f"data={world.data('problems')}")
    scorer = f"model:{world / 'scorer'}"
    hone.run(replace(made, reward={scorer: 0.5, "format": 2.0, "math": 0.0}))
    rows = [json.loads(line) for line in (tmp_path / "run/samples.jsonl").read_text().splitlines()]
    assert all(set(row["parts"]) == {scorer, "format"} for row in rows)
    for row in rows:
        assert row["reward"] == pytest.approx(0.5 * row["parts"][scorer] + 2.0 * row["parts"]["format"])


def test_a_share_of_invalid_rewards_is_borne_up_to_the_limit(world: World, tmp_path: Path):
    def some(completions: list[str]) -> list[float | None]:
        return [None if i % 3 == 0 else float(i) for i in range(len(completions))]

    made = replace(recipe(world, "grpo", tmp_path / "run", "train.max_invalid=0.4"), reward=some)
    hone.run(made)
    assert metrics(tmp_path / "run")[0]["invalid"] == pytest.approx(1 / 3)
    with pytest.raises(hone.HoneError, match="3 of 9 rewards are invalid, more than 30%"):
        hone.run(replace(made, out=str(tmp_path / "other"), train=replace(made.train, max_invalid=0.3)))


def test_refill_asks_as_often_as_it_may(world: World, tmp_path: Path):
    calls = [0]

    def equal(completions: list[str]) -> list[float]:
        calls[0] += 1
        return [1.0] * len(completions)  # no group varies: DAPO keeps none

    made = recipe(world, "dapo", tmp_path / "run", "train.refill_rounds=3", "train.steps=2")
    hone.run(replace(made, reward=equal))
    assert calls[0] == 6
    assert [row["kept"] for row in metrics(tmp_path / "run")] == [0.0, 0.0]


def test_a_limit_stops_the_run_and_what_it_did_is_saved(world: World, tmp_path: Path):
    out = tmp_path / "run"
    made = recipe(world, "grpo", out, "limits.truncated_stop=0.0", "limits.patience_stop=2", "train.steps=9")
    with pytest.raises(hone.HoneError, match=r"stopped at step 2: truncated .*; the run is saved in "):
        hone.run(made)
    assert [row["step"] for row in metrics(out)] == [1, 2]
    assert (out / "checkpoints/step-000002/state.json").is_file()
    longer = recipe(world, "grpo", out, "train.steps=3")
    hone.run(longer, resume=True)
    hone.run(recipe(world, "grpo", tmp_path / "whole", "train.steps=3"))
    assert metrics(out) == metrics(tmp_path / "whole")


def test_saving_is_done_when_asked(world: World, tmp_path: Path):
    hone.run(recipe(world, "sft", tmp_path / "run", "train.steps=7", "save.every=3", "save.keep=2"))
    names = sorted(p.name for p in (tmp_path / "run/checkpoints").iterdir())
    assert names == ["latest", "step-000006", "step-000007"]


def test_tensorboard_shows_what_the_log_says_of_a_resumed_run(world: World, tmp_path: Path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # pyright: ignore

    for resume, steps in ((False, 2), (True, 4)):
        hone.run(recipe(world, "sft", tmp_path / "run", f"train.steps={steps}", "tensorboard=true"), resume=resume)
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    seen = {e.step: e.value for e in events.Scalars("loss")}
    assert seen == pytest.approx({row["step"]: row["loss"] for row in metrics(tmp_path / "run")}, rel=1e-6)
    assert list(seen) == [1, 2, 3, 4]


def test_evaluation_draws_other_numbers_than_training_and_leaves_no_mark(world: World, tmp_path: Path):
    held_out = write_rows(tmp_path / "held.jsonl", ROWS["problems"][:3])
    plain, examined = tmp_path / "plain", tmp_path / "examined"
    hone.run(recipe(world, "grpo", plain))
    hone.run(recipe(world, "grpo", examined, f"eval_data={held_out}", "train.eval_every=1", "train.eval_samples=2"))
    a, b = (contents(out / "checkpoints/step-000004") for out in (plain, examined))
    assert a == b
    rows = metrics(examined)
    assert all("eval/reward" in row for row in rows)
    assert [{k: v for k, v in row.items() if not k.startswith("eval/")} for row in rows] == metrics(plain)


@pytest.mark.parametrize(
    ("setting", "read", "value"),
    [
        ("train.threads=2", torch.get_num_threads, 2),
        ("train.deterministic=true", torch.are_deterministic_algorithms_enabled, True),
        ("train.deterministic=false", torch.are_deterministic_algorithms_enabled, False),
    ],
)
def test_torch_is_set_during_the_run(setting, read, value, world: World, tmp_path: Path, monkeypatch):
    seen, end = list[object](), Learner.end_iteration
    monkeypatch.setattr(Learner, "end_iteration", lambda self: (seen.append(read()), end(self)))
    hone.run(recipe(world, "sft", tmp_path / "run", setting, "train.steps=1"))
    assert seen == [value]


def test_every_group_of_settings_is_read_somewhere():
    """A field of the recipe that the edge never reads does nothing."""
    source = "".join(Path(module.__file__ or "").read_text() for module in (build, job, rewards, train))
    for group in fields(Recipe):
        if group.name in ("model", "sample", "train", "optim", "lora", "critic", "save", "parts"):
            spec = getattr(Recipe(), group.name)
            unread = [f.name for f in fields(spec) if f".{f.name}" not in source]
            assert unread == [], f"{group.name}: nothing reads {unread}"
