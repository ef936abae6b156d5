"""A run whose sampler, reward or data raises loses no step, and one whose weights are lost saves none of them."""

import functools
import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from small import World, assert_same_run, contents, metrics, recipe, temporary

import hone
from hone import loop
from hone.data.feed.source import Source
from hone.errors import HoneError
from hone.launch import train
from hone.rollout.local import LocalSampler, SharedPrompt
from hone.rollout.supply import Roller
from hone.storage.files import checkpoints, load_tensors
from hone.train import optim
from hone.train.learner import Learner

torch.set_num_threads(1)


def failing(function: Callable[..., Any], calls: int, error: Exception) -> Callable[..., Any]:
    """The function for so many calls, then the error."""
    count = itertools.count()

    @functools.wraps(function)
    def called(*arguments: Any, **named: Any) -> Any:
        if next(count) >= calls:
            raise error
        return function(*arguments, **named)

    return called


@pytest.mark.parametrize(
    ("algo", "place", "name", "calls"),
    [("grpo", Roller, "stream", 2), ("sft", Source, "take", 3), ("trpo", Roller, "_written", 19)],
)
def test_what_raises_is_told_and_the_steps_before_are_saved(
    algo: str, place: type, name: str, calls: int, world: World, tmp_path: Path, monkeypatch, capsys
):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    hone.run(recipe(world, algo, whole))
    made = recipe(world, algo, cut)
    with monkeypatch.context() as patch:
        patch.setattr(place, name, failing(getattr(place, name), calls, RuntimeError("the cable")))
        with pytest.raises(RuntimeError, match="the cable"):
            hone.run(made)
    assert list(checkpoints(cut / "checkpoints")) == [2]
    assert temporary(cut) == []
    assert "step 3 failed; step 2 is saved" in capsys.readouterr().err
    hone.resume(cut)
    assert_same_run(whole, cut, step=4)


AHEAD = ["train.lag=1", "train.mismatch=truncate"]


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("grpo", AHEAD),
        ("grpo with a LoRA", [*AHEAD, "lora.rank=2", "train.reference_refresh=1"]),
        ("dapo", [*AHEAD, "train.minibatches=2"]),
    ],
)
@pytest.mark.parametrize("step", [2, 4], ids=["midway", "beside the last step"])
def test_a_sampler_ahead_that_raises_costs_no_step(
    name: str, settings: list[str], step: int, world: World, tmp_path: Path, monkeypatch, capsys
):
    """It fails while the learner is in that step, which ends; the weights it sampled with are kept for what it owes."""
    algo, whole, cut = name.split()[0], tmp_path / "whole", tmp_path / "cut"
    hone.run(recipe(world, algo, whole, *settings, "train.steps=6"))
    made = recipe(world, algo, cut, *settings, f"train.steps={6 if step == 2 else 4}")
    broken = failing_at(LocalSampler, lambda sampler: sampler.version == step - 1)
    with monkeypatch.context() as patch:
        patch.setattr(Roller, "stream", broken(Roller.stream))
        if step == 2:
            with pytest.raises(RuntimeError, match="the cable"):
                hone.run(made)
        else:
            hone.run(made)
    assert list(checkpoints(cut / "checkpoints")) == [step]
    assert (cut / f"checkpoints/step-{step:06d}/sampler.safetensors").is_file()
    said = capsys.readouterr().err
    assert "step 3 failed; step 2 is saved" in said or "(RuntimeError: the cable) and is made again" in said
    hone.resume(cut, settings=["train.steps=6"])
    assert_same_run(whole, cut, step=6)


def failing_at(kind: type, when: Callable[[Any], bool]) -> Callable[[Any], Any]:
    """Wraps a roller's method: it raises where its sampler is such."""

    def wrap(function: Any) -> Any:
        def called(roller: Any, *arguments: Any) -> Any:
            assert isinstance(roller.sampler, kind)
            if when(roller.sampler):
                raise RuntimeError("the cable")
            return function(roller, *arguments)

        return called

    return wrap


def test_what_raises_before_the_update_gives_back_what_was_sampled_ahead(
    world: World, tmp_path: Path, monkeypatch, capsys
):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    hone.run(recipe(world, "grpo", whole, *AHEAD))
    with monkeypatch.context() as patch:
        patch.setattr(loop.Annotator, "annotate", failing(loop.Annotator.annotate, 2, RuntimeError("the cable")))
        with pytest.raises(RuntimeError, match="the cable"):
            hone.run(recipe(world, "grpo", cut, *AHEAD))
    assert list(checkpoints(cut / "checkpoints")) == [2]
    assert "step 3 failed; step 2 is saved" in capsys.readouterr().err
    hone.resume(cut)
    assert_same_run(whole, cut, step=4)


def test_an_evaluation_that_raises_costs_its_own_numbers_alone(world: World, tmp_path: Path, monkeypatch, capsys):
    settings = [f"eval_data={world.data('problems')}", "train.eval_every=2"]
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    hone.run(recipe(world, "grpo", whole, *settings))
    with monkeypatch.context() as patch:
        patch.setattr(train, "evaluate_tasks", failing(train.evaluate_tasks, 0, RuntimeError("the cable")))
        with pytest.raises(RuntimeError, match="the cable"):
            hone.run(recipe(world, "grpo", cut, *settings))
    assert "the evaluation after step 2 failed; the step is saved" in capsys.readouterr().err
    assert list(checkpoints(cut / "checkpoints")) == [2]
    hone.resume(cut)
    a, b = (contents(out / "checkpoints/step-000004") for out in (whole, cut))
    assert a == b
    missing = [row.keys() - other.keys() for row, other in zip(metrics(whole), metrics(cut), strict=True)]
    assert [all(name.startswith("eval/") for name in names) for names in missing] == [True] * 4
    assert [bool(names) for names in missing] == [False, True, False, False]


def test_a_save_that_fails_too_does_not_hide_what_went_wrong_first(world: World, tmp_path: Path, monkeypatch, capsys):
    def unsaved(*_: Any, **named: Any) -> Any:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(Roller, "stream", failing(Roller.stream, 2, RuntimeError("the cable")))
    monkeypatch.setattr("hone.launch.rescue.save", unsaved)
    with pytest.raises(RuntimeError, match="the cable"):
        hone.run(recipe(world, "grpo", tmp_path / "run"))
    assert "step 2 could not be saved: CUDA error" in capsys.readouterr().err


def test_too_many_invalid_rewards_cost_no_step(world: World, tmp_path: Path):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    hone.run(replace(recipe(world, "rloo", whole), reward=len_of))
    made = recipe(world, "rloo", cut)
    with pytest.raises(HoneError, match="rewards are invalid"):
        hone.run(replace(made, reward=failing(len_of, 20, RuntimeError("no more"))))
    assert list(checkpoints(cut / "checkpoints")) == [2]
    hone.run(replace(made, reward=len_of), resume=True)
    assert_same_run(whole, cut, step=4)


def len_of(completion: str) -> float:
    return float(len(completion))


def test_nothing_is_saved_of_a_step_that_has_moved_the_weights(world: World, tmp_path: Path, monkeypatch):
    """The second of two updates fails, after a step that is not saved yet: half a step is none."""
    out = tmp_path / "run"
    settings = ["train.minibatches=2", "save.every=2"]
    with monkeypatch.context() as patch:
        patch.setattr(optim, "clip_gradients", failing(optim.clip_gradients, 7, RuntimeError("the cable")))
        with pytest.raises(RuntimeError, match="the cable"):
            hone.run(recipe(world, "grpo", out, *settings))
    assert list(checkpoints(out / "checkpoints")) == [2]
    hone.resume(out)
    hone.run(recipe(world, "grpo", tmp_path / "whole", *settings))
    assert_same_run(tmp_path / "whole", out, step=4)


@pytest.mark.parametrize("settings", [[], AHEAD], ids=["now", "ahead"])
def test_a_log_prob_of_the_sampler_that_is_not_finite_reaches_no_update_and_no_checkpoint(
    settings: list[str], world: World, tmp_path: Path, monkeypatch
):
    whole, cut, count = tmp_path / "whole", tmp_path / "cut", itertools.count()
    hone.run(recipe(world, "grpo", whole, *settings))
    made, rollout = recipe(world, "grpo", cut, *settings, "save.every=1"), SharedPrompt.rollout

    def spoilt(*arguments: Any) -> Any:
        found: Any = rollout(*arguments)
        if next(count) == 22:  # of the third step
            found.gen_logp[-1] = torch.nan
        return found

    with monkeypatch.context() as patch:
        patch.setattr(SharedPrompt, "rollout", spoilt)
        with pytest.raises(HoneError, match="the sampler gave a log-prob that is not finite"):
            hone.run(made)
    assert list(checkpoints(cut / "checkpoints")) == [1, 2]
    tensors = [x for path in cut.rglob("*.safetensors") for x in load_tensors(path).values()]
    assert all(x.isfinite().all() for x in tensors if x.is_floating_point())
    hone.resume(cut)
    assert_same_run(whole, cut, step=4)


@pytest.mark.parametrize("algo", ["grpo", "sft", "trpo"])
def test_weights_that_are_lost_are_never_saved(algo: str, world: World, tmp_path: Path, monkeypatch):
    out, count = tmp_path / "run", itertools.count()
    step = torch.optim.AdamW.step

    def spoil(self: torch.optim.AdamW, *arguments: Any, **named: Any) -> Any:
        found = step(self, *arguments, **named)
        if next(count) == 2:
            self.param_groups[0]["params"][0].data.view(-1)[3] = torch.nan
        return found

    with monkeypatch.context() as patch:
        patch.setattr(torch.optim.AdamW, "step", spoil)
        with pytest.raises(HoneError) as error:
            hone.run(recipe(world, algo, out, "save.every=1", "train.steps=6"))
    assert "weights or moments are not finite" in str(error.value) or "logits are not finite" in str(error.value)
    assert list(checkpoints(out / "checkpoints")) == [1, 2]
    hone.resume(out)
    hone.run(recipe(world, algo, tmp_path / "whole", "save.every=1", "train.steps=6"))
    assert_same_run(tmp_path / "whole", out, step=6)


# --- losses that leap ---

BACK = ["train.steps=16", "save.every=2", "save.keep=2", "train.rollback=20"]


def strike(monkeypatch: pytest.MonkeyPatch, step: int, factor: float) -> None:
    """After this step the weights are multiplied by the factor."""
    end = Learner.end_iteration

    def struck(learner: Learner) -> None:
        end(learner)
        if learner.version == step:
            for p in optim.parameters_of(learner.optimizer):
                p.data.mul_(factor)

    monkeypatch.setattr(Learner, "end_iteration", struck)


@pytest.mark.parametrize(
    ("step", "factor", "says"),
    [
        (13, -30.0, ["step 14: the loss is", "went back to the weights of step-000012"]),
        (13, torch.nan, ["step 13: the weights are not finite: went back to the weights of step-000012"]),
        # the checkpoint of step 12 holds the harm already: the one before it is taken then
        (12, -30.0, ["went back to the weights of step-000012", "went back to the weights of step-000010"]),
    ],
)
def test_a_run_goes_back_from_a_loss_that_leaps(step, factor, says, world: World, tmp_path: Path, monkeypatch, capsys):
    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        strike(patch, step, factor)
        hone.run(recipe(world, "sft", out, *BACK))
    said = capsys.readouterr().err
    assert [text for text in says if text not in said] == []
    losses = [row["loss"] for row in metrics(out) if "loss" in row]
    assert losses[-1] < 1.2 * losses[9]
    assert len(metrics(out)) == 16


def test_without_the_setting_it_goes_on_and_with_nowhere_to_go_back_to_it_stops(
    world: World, tmp_path: Path, monkeypatch, capsys
):
    strike(monkeypatch, 13, -30.0)
    hone.run(recipe(world, "sft", tmp_path / "off", *BACK[:-1]))
    assert "went back" not in capsys.readouterr().err
    settings = ["train.steps=16", "save.every=15", "train.rollback=20"]
    with pytest.raises(HoneError, match=r"stopped at step 14: the loss is .* no checkpoint is left to go back to"):
        hone.run(recipe(world, "sft", tmp_path / "none", *settings))
    with pytest.raises(HoneError, match=r"set save\.every, and save\.keep to 2 or more"):
        hone.run(recipe(world, "sft", tmp_path / "refused", "train.rollback=20"))
