"""Steps labelled, process models trained, and used: as rewards, as potentials, as judges, in beam search."""

import json
import math
from pathlib import Path

import pytest
import torch
from small import Crash, World, decoder, metrics, recipe, write_rows

import hone
from hone.cli import main
from hone.data.text.chat import render_prompt
from hone.errors import HoneError
from hone.inference import problems as working
from hone.inference.defaults import Sampling
from hone.inference.label import FIRST_CONTINUATION, StepLabels, label_steps
from hone.inference.problems import Problems
from hone.inference.rank import Rank, evaluate_ranked
from hone.launch.job import prepare
from hone.model.formats.folder import load_scorer
from hone.model.formats.save import save_model
from hone.model.scorer import Scorer
from hone.reward.learned.load import process_model
from hone.search.beam import Beam, rank_by_rating
from hone.types import Rollout, Stop

torch.set_num_threads(1)
K = 3
HOW = Sampling(samples=2, max_tokens=5, seed=7)
LABELS = StepLabels(k=K)
PROBLEMS = [{"prompt": f"{a}?\n", "completion": f"{a}\n{a}{a}\n{'x' * (a % 2)}y", "answer": "1"} for a in range(5)]


def even(completion: str) -> float:
    return float(len(completion.encode(errors="replace")) % 2 == 0)


@pytest.fixture(scope="module")
def judge(world: World, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("judge")
    with torch.random.fork_rng():
        torch.manual_seed(5)
        save_model(Scorer(decoder(258, seed=4), kind="step"), world.tokenizer, folder)
    return str(folder)


def rows_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_label_is_the_share_of_continuations_that_verify_and_the_last_one_the_solutions_own(world, tmp_path):
    out = tmp_path / "steps.jsonl"
    found = label_steps(world / "model", PROBLEMS, out, reward=even, labels=LABELS, how=HOW)
    problems = Problems(world / "model", PROBLEMS, HOW)
    rows = rows_of(out)
    assert [row["steps"] for row in rows] == [[f"{a}\n", f"{a}{a}\n", f"{'x' * (a % 2)}y"] for a in range(5)]
    texts = [(row["prompt"], row["prompt"] + "".join(row["steps"][:n])) for row in rows for n in (1, 2)]
    prompts = [problems.tokenizer.encode(text) for _, text in texts]
    groups = problems.sampler.sample(prompts, n=K, params=problems.params, first_request=FIRST_CONTINUATION)
    labels, tokens = [], 0
    for (prompt, text), group in zip(texts, groups, strict=True):
        ends = [
            [t for t, on in zip(r.tokens, r.mask, strict=True) if on and t != problems.tokenizer.eos_id] for r in group
        ]
        whole = [text[len(prompt) :] + problems.tokenizer.decode(end) for end in ends]
        labels.append(sum(map(even, whole)) / K)
        tokens += sum(sum(r.mask) for r in group)
    assert [x for row in rows for x in row["step_labels"][:2]] == pytest.approx(labels)
    assert [row["step_labels"][2] for row in rows] == [even("".join(row["steps"])) for row in rows]
    assert found["tokens sampled"] == tokens
    assert found["steps"] == 15
    assert len(set(labels)) > 1


def test_work_that_was_killed_goes_on_without_repeating_a_finished_row(world, tmp_path, monkeypatch):
    monkeypatch.setattr(working, "AT_ONCE", 2)
    problems = [{key: row[key] for key in ("prompt", "answer")} for row in PROBLEMS]
    seen = list[str]()

    def counted(completion: str) -> float:
        seen.append(completion)
        return even(completion)

    def work(out: Path, say=lambda text: None) -> list[dict]:
        label_steps(world / "model", problems, out, reward=counted, labels=LABELS, how=HOW, say=say)
        return [{name: value for name, value in row.items() if name != "seconds"} for row in rows_of(out)]

    def kill(text: str) -> None:
        if text.startswith("2 of"):
            raise Crash

    whole = work(tmp_path / "whole.jsonl")
    calls = len(seen)
    with pytest.raises(Crash):
        work(tmp_path / "cut.jsonl", kill)
    before = len(seen) - calls
    with (tmp_path / "cut.jsonl").open("a") as file:
        file.write('{"prompt": "half a li')
    assert work(tmp_path / "cut.jsonl") == whole
    assert len(seen) == 2 * calls
    assert before > 0


def test_a_file_is_gone_on_with_by_the_same_settings_only(world, tmp_path):
    out = tmp_path / "steps.jsonl"
    label_steps(world / "model", PROBLEMS[:1], out, reward=even, labels=LABELS, how=HOW)
    with pytest.raises(HoneError, match="was begun with k 3, not 4"):
        label_steps(world / "model", PROBLEMS[:1], out, reward=even, labels=StepLabels(k=4), how=HOW)
    said = list[str]()
    label_steps(world / "model", PROBLEMS[:1], out, reward=even, labels=LABELS, how=HOW, say=said.append)
    assert said == ["1 rows are there: all problems are labelled"]
    out.with_name("steps.jsonl.settings.json").unlink()
    with pytest.raises(HoneError, match=r"steps\.jsonl\.settings\.json is not there"):
        label_steps(world / "model", PROBLEMS[:1], out, reward=even, labels=LABELS, how=HOW)


def test_a_reward_that_fails_labels_nothing(world, tmp_path):
    with pytest.raises(HoneError, match="have no verdict"):
        label_steps(world / "model", PROBLEMS, tmp_path / "a", reward=lambda completion: None, how=HOW)
    assert not (tmp_path / "a").exists()
    mixed = [PROBLEMS[0], {"prompt": "1?\n"}]
    with pytest.raises(HoneError, match="1 of 2 problems have no completion"):
        label_steps(world / "model", mixed, tmp_path / "b", reward=even, how=HOW)


def test_the_command_labels_and_a_process_model_learns_from_its_rows(world, tmp_path, capsys):
    data, out = write_rows(tmp_path / "problems.jsonl", PROBLEMS), tmp_path / "steps.jsonl"
    reward = f"{world / 'rewards.py'}:bytes_sum"
    asked = ["label-steps", world / "model", data, "--reward", reward, "--out", str(out), "--k", "2"]
    assert main([*asked, "--max-tokens", "4", "--threshold", "0.1"]) == 0
    printed = capsys.readouterr().out
    assert "tokens sampled" in printed
    assert "seconds" in printed
    folder = hone.run(recipe(world, "process_reward_model", tmp_path / "run", f"data={out}", "train.steps=2"))
    assert load_scorer(folder).kind == "step"
    assert load_scorer(folder).separator == "\n"


def test_a_separator_that_separates_nothing_is_doubted(world, tmp_path):
    said = list[str]()
    label_steps(
        world / "model",
        PROBLEMS,
        tmp_path / "a",
        reward=even,
        labels=StepLabels(k=1, separator="@"),
        how=HOW,
        say=said.append,
    )
    assert said[-1] == "warning: 5 of 5 solutions have one step: if '@' does not end one, set --separator"
    said.clear()
    label_steps(
        world / "model", PROBLEMS, tmp_path / "b", reward=even, labels=StepLabels(k=1), how=HOW, say=said.append
    )
    assert said == ["5 of 5 problems"]


def test_a_process_model_is_used_with_the_separator_of_its_labels(world, judge, tmp_path):
    spaced = [{**row, "completion": row["completion"].replace("\n", " ")} for row in PROBLEMS]
    labels, out = StepLabels(k=1, separator=" "), tmp_path / "steps.jsonl"
    label_steps(world / "model", spaced, out, reward=even, labels=labels, how=HOW)
    hone.run(recipe(world, "process_reward_model", tmp_path / "run", f"data={out}", "train.steps=1"))
    own = str(tmp_path / "run")
    assert process_model([own], world.tokenizer).stepper.separator == " "
    assert process_model([own, judge], world.tokenizer).stepper.separator == " "
    assert process_model([judge], world.tokenizer).stepper.separator == "\n"
    assert process_model([judge], world.tokenizer, separator=" ").stepper.separator == " "
    made = recipe(world, "ppo", tmp_path / "ppo", f"process.path={own}")
    job = prepare(made)
    assert job.process is not None
    assert job.process.model.stepper.separator == " "
    with pytest.raises(HoneError, match=r"steps that end with ' ', not '\\n': leave the separator out"):
        evaluate_ranked(world / "model", PROBLEMS, Rank(judge=own, separator="\\n"), reward=even, how=HOW)
    found = evaluate_ranked(world / "model", PROBLEMS[:1], Rank(judge=own), reward=even, how=HOW)
    assert "best_of_2" in found


# --- in training ---


@pytest.mark.parametrize(
    ("algo", "use", "settings"),
    [
        ("grpo", "reward", {"process": True}),
        ("grpo", "progress", {"process": True}),
        ("grpo", "reward", {"lam": 0.7}),
        ("ppo", "reward", {}),
        ("ppo", "shaping", {}),
    ],
)
def test_a_process_model_gives_step_rewards_in_training(algo, use, settings, world, judge, tmp_path):
    changes = [f"process.path={judge}", f"process.use={use}", "train.steps=2", "process.weight=2.0"]
    made = recipe(world, algo, tmp_path / "run", *changes, **settings)
    job = prepare(made)
    assert job.process is not None
    assert (job.process.use, job.process.weight, job.process.outcome) == (use, 2.0, bool(settings))
    hone.run(made)
    plain = recipe(world, algo, tmp_path / "plain", "train.steps=2")
    hone.run(plain)
    found, without = metrics(tmp_path / "run"), metrics(tmp_path / "plain")
    assert 0 < found[-1]["reward/process"] < 1
    assert all(math.isfinite(value) for value in found[-1].values())
    assert found[0]["reward"] == pytest.approx(without[0]["reward"])  # the outcome is reported as it is
    assert found[0]["loss"] != pytest.approx(without[0]["loss"])


def test_recipes_that_cannot_use_a_process_model_are_refused(world, judge, tmp_path):
    for algo, settings, own, message in (
        ("grpo", (), {"process": True}, "set process.path=FOLDER"),
        ("grpo", (f"process.path={judge}", "process.use=shaping"), {}, "cancels potentials"),
        ("grpo", (f"process.path={judge}", "process.use=progress"), {"lam": 0.7}, "set process.use=reward"),
        ("grpo", (f"process.path={world / 'scorer'}",), {}, "is a reward model"),
        ("ppo", (f"process.path={judge}", "train.lag=1", "train.mismatch=truncate"), {}, "set train.lag=0"),
        ("sft", (f"process.path={judge}",), {}, "scores what an online run samples"),
    ):
        with pytest.raises(HoneError, match=message):
            hone.run(recipe(world, algo, tmp_path / "run", *settings, **own))


# --- choosing ---


def test_the_chosen_completion_is_the_one_with_the_highest_rating(world, judge):
    how = Sampling(samples=4, max_tokens=6)
    problems = Problems(world / "model", PROBLEMS, how)
    process = process_model([judge], problems.tokenizer)
    expected = list[float]()
    for group in problems.completions(problems.tasks, 0):
        ratings = process.rate(group, by="last")
        expected.append(even(group[ratings.index(max(ratings))].text))
    found = evaluate_ranked(world / "model", PROBLEMS, Rank(judge=judge, by="last"), reward=even, how=how)
    assert found["best_of_4"] == pytest.approx(sum(expected) / len(expected))
    assert 0 < found["reward"] < 1
    reward = evaluate_ranked(world / "model", PROBLEMS, Rank(judge=world / "scorer"), reward=even, how=how)
    assert reward["reward"] == pytest.approx(found["reward"])


def test_beams_end_are_best_first_and_rated_above_what_they_were_chosen_from(world, judge):
    how = Sampling(max_tokens=6)
    problems = Problems(world / "model", PROBLEMS, how)
    process = process_model([judge], problems.tokenizer, separator="\n")
    prompts = [render_prompt(problems.tokenizer, task.prompt) for task in problems.tasks]

    def searched(beams: int, width: int) -> list[list[Rollout]]:
        search = Beam(
            sampler=problems.sampler, process=process, params=problems.params, beams=beams, width=width, by="last"
        )
        return search(prompts)

    found = searched(2, 8)
    assert [[r.tokens for r in g] for g in searched(2, 8)] == [[r.tokens for r in g] for g in found]
    for group, prompt in zip(found, prompts, strict=True):
        ratings = process.rate(group, by="last")
        assert ratings == sorted(ratings, reverse=True)
        assert 0 < len(group) <= 2
        for r in group:
            assert list(r.tokens[: len(prompt)]) == prompt
            assert r.stop in (Stop.TOKEN, Stop.LENGTH)
            assert 0 < sum(r.mask) <= 6
            assert list(r.mask) == [i >= len(prompt) for i in range(len(r.tokens))]
    best = sum(process.rate([g[0] for g in found], by="last"))
    assert best > sum(process.rate([g[0] for g in searched(1, 1)], by="last"))


def test_a_beam_of_unequal_steps_writes_no_more_than_the_limit(world, judge):
    problems = Problems(world / "model", PROBLEMS, Sampling(max_tokens=24))
    prompts = [render_prompt(problems.tokenizer, task.prompt) for task in problems.tasks]
    process = process_model([judge], problems.tokenizer, separator="3")  # many steps end early, others late
    groups = Beam(sampler=problems.sampler, process=process, params=problems.params, beams=8, width=8)(prompts)
    for r in (r for group in groups for r in group):
        assert sum(r.mask) <= 24
        assert sum(r.mask) == 24 or r.stop is Stop.TOKEN


def test_judges_that_cannot_choose_are_refused(world, judge):
    for rank, message in (
        (Rank(judge=world / "scorer", beams=2), "beams need a process model"),
        (Rank(judge=judge, beams=9), "multiple of --beams"),
    ):
        with pytest.raises(HoneError, match=message):
            evaluate_ranked(world / "model", PROBLEMS, rank, reward=even)
    with pytest.raises(HoneError, match="use one of min"):
        Rank(judge=judge, by="best")
    for name in ("judge.yaml", "judge:judge.yaml"):
        with pytest.raises(HoneError, match=r"--reward judge:judge\.yaml; --judge takes the folder of a reward or"):
            Rank(judge=name)
    with pytest.raises(ValueError, match="2 ratings"):
        rank_by_rating([Rollout(tokens=[1], mask=[True])], [0.1, 0.2])


def test_eval_says_what_the_judge_chose(world, judge, tmp_path, capsys):
    data = write_rows(tmp_path / "problems.jsonl", PROBLEMS[:2])
    reward = f"{world / 'rewards.py'}:bytes_sum"
    asked = ["eval", world / "model", data, "--reward", reward, "--samples", "4", "--max-tokens", "4"]
    assert main([*asked, "--judge", judge, "--beams", "2"]) == 0
    assert capsys.readouterr().out.startswith("beam ")
