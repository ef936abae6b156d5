"""Broken rewards and answers."""

import itertools
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from check_world import ROWS, World, failing, job_of, names, recipe, tags, verdict

from hone.check import suite
from hone.config.recipe import ModelSpec
from hone.reward import verify
from hone.reward.outcome import location_of
from hone.types import Outcome


def raises(completion: str) -> float:
    raise RuntimeError("two\nlines")


def always(completion: str) -> float:
    return 0.5


def too_few(completions: list[str]) -> list[float]:
    return [0.0] * (len(completions) - 1)


def one_for_all(completions: list[str]) -> float:
    return 1.0


def by_place(completions: list[str]) -> list[float]:
    return [float(i) for i in range(len(completions))]


def by_rank(completions: list[str]) -> list[float]:
    ranked = sorted(completions)
    return [float(ranked.index(c)) for c in completions]


def sometimes_invalid(completion: str, task: Any) -> float | None:
    return None if sum(completion.encode()) % 8 == 0 else tags(completion, task)


@pytest.mark.parametrize(
    ("reward", "fails", "seen"),
    [
        (
            raises,
            {"reward values", "gold answers"},
            "16 of 16 rewards are invalid, most often: RuntimeError: two lines",
        ),
        (too_few, {"reward values", "reward repeats", "signal", "gold answers"}, "expected a list of 16"),
        (one_for_all, {"reward values", "reward repeats", "signal", "gold answers"}, "returned a float"),
    ],
)
def test_a_reward_that_gives_no_numbers(world: World, reward: Callable[..., Any], fails: set[str], seen: str):
    job = job_of(world, "grpo", reward=reward)
    assert failing(job) == fails
    assert seen in verdict(job, "reward values")[1]


def test_a_few_invalid_rewards_are_noted_and_many_fail(world: World):
    job = job_of(world, "grpo", "train.max_invalid=0.9", reward=sometimes_invalid)
    assert verdict(job, "reward values")[0] == "warn"
    job.recipe = replace(job.recipe, train=replace(job.recipe.train, max_invalid=0.0))
    assert "reward values" in failing(job)


def shorter(completion: str, task: Any) -> float:
    """Reads a column that only some rows have, and a number that only some answers are."""
    return float(task.answer) + len(task.extra["hint"]) + sum(completion.encode()) % 7


def test_one_prompt_on_which_the_reward_raises_is_named_with_the_exception(world: World):
    rows = [{"prompt": f"{'so ' * 11}is\n{a}?", "answer": str(a)} for a in range(4)]
    state, seen = verdict(job_of(world, "grpo", "sample.max_tokens=1", data=rows, reward=shorter), "reward values")
    assert state == "fail"
    assert "16 of 16 rewards are invalid, most often: KeyError: 'hint' (" in seen
    assert "); as for the prompt '..." in seen
    assert re.search(r"so is \d\?'$", seen), "the end of the prompt, on one line"


def test_a_rare_row_on_which_the_reward_raises_is_found_with_its_answer(world: World):
    rows = [{"prompt": f"{a}?", "answer": str(a), "hint": "x"} for a in range(180)]
    rows[50]["answer"] = "fifty"
    job = job_of(world, "grpo", data=rows, reward=shorter)
    state, seen = verdict(job, "gold answers")
    assert state == "warn"
    place = f"{location_of(shorter).rpartition(':')[0]}:{shorter.__code__.co_firstlineno + 2}"
    assert seen == (
        "1 of 180 gold answers get an invalid reward, at first: "
        f"ValueError: could not convert string to float: 'fifty' ({place}); for the prompt '50?'"
    )
    job.recipe = replace(job.recipe, train=replace(job.recipe.train, max_invalid=0.0))
    assert verdict(job, "gold answers")[0] == "fail"


def test_rows_without_an_answer_are_tried_too_and_not_more_than_two_hundred(world: World):
    rows = [{"prompt": f"{a}?", "hint": "x", **({"answer": str(a)} if a % 2 else {})} for a in range(300)]
    state, seen = verdict(job_of(world, "grpo", data=rows, reward=shorter), "gold answers")
    assert state == "fail"
    assert re.match(r"\d+ of 200 gold answers get an invalid reward, at first: TypeError: float\(\)", seen)


def test_of_a_chat_the_last_message_is_named(world: World):
    model = ModelSpec(path=world / "chat")
    job = job_of(world, "grpo", data=world / "chats.jsonl", model=model, reward=raises)
    said = verdict(job, "gold answers")[1]
    assert re.search(r"RuntimeError: two lines \(.*\.py:\d+\); for the prompt '\d\+\d'$", said)


def test_a_reward_that_is_the_same_for_everything_is_noted(world: World):
    report = suite.check(recipe(world, "grpo", reward=always))
    assert names(report, "fail") == set()
    assert names(report, "warn") == {"reward values", "signal", "gold answers"}


def test_no_signal_matters_only_where_groups_are_compared(world: World):
    assert verdict(job_of(world, "grpo", reward=always), "signal")[0] == "warn"
    assert verdict(job_of(world, "reinforce", reward=always), "signal")[0] == "skip"


def test_a_reward_that_depends_on_the_order_fails(world: World):
    job = job_of(world, "grpo", reward=by_place)
    assert failing(job) == {"reward repeats"}
    assert "16 of 16 rewards differ when the completions come in another order" in verdict(job, "reward repeats")[1]


def test_a_reward_that_depends_on_its_neighbours_is_noted(world: World):
    state, seen = verdict(job_of(world, "grpo", reward=by_rank), "reward repeats")
    assert state == "warn"
    assert "scored alone" in seen


def test_a_reward_of_chance_is_noted(world: World):
    numbers = itertools.count()
    state, seen = verdict(job_of(world, "grpo", reward=lambda completion: float(next(numbers))), "reward repeats")
    assert (state, seen) == ("warn", "16 of 16 rewards differ when asked twice")


def test_a_reward_cannot_change_the_rows_and_a_scorer_that_does_fails(world: World):
    def greedy(completion: str, rollout: Any) -> float:
        with pytest.raises(TypeError):
            rollout.tokens[0] = 5
        return tags(completion, rollout.task)

    job = job_of(world, "grpo", reward=greedy)
    assert verdict(job, "reward repeats")[0] == "pass"

    def changes(rollouts: Any) -> list[Outcome]:
        for r in rollouts:
            r.tokens.append(5)
        return [Outcome(value=1.0) for _ in rollouts]

    job.reward = changes
    assert verdict(job, "reward repeats") == ("fail", "the reward changed the completions it was given")


# --- answers ---


def test_the_verifiers_accept_gold_answers_and_refuse_others(world: World):
    letters = [{"prompt": f"{a}?", "answer": "ABC"[a % 3]} for a in range(9)]
    for name, rows in (("math", ROWS["problems"]), ("exact", ROWS["problems"]), ("choice", letters)):
        state, seen = verdict(job_of(world, "grpo", reward={name: 1.0, "format": 0.1}, data=rows), "gold answers")
        assert state == "pass"
        assert f"{name} accepts 9 gold answers, and 0 of 9 answers of other rows" in seen


def test_a_worked_solution_is_a_gold_answer(world: World):
    rows = [{"prompt": f"{a}+1", "answer": f"{a} and 1 more. #### {a + 1}"} for a in range(5)]
    assert verdict(job_of(world, "grpo", reward={"math": 1.0}, data=rows), "gold answers")[0] == "pass"


def test_a_gold_answer_that_maths_cannot_read_is_named_with_its_row_and_the_reason_however_rare(world: World):
    rows = [{"prompt": f"{a}?", "answer": str(a)} for a in range(300)]
    rows[170]["answer"] = r"\foo{5}"
    state, seen = verdict(job_of(world, "grpo", reward={"math": 1.0}, data=rows), "gold answers")
    assert state == "warn"
    assert re.search(r"1 of 300 gold answers: row 171: the gold answer .* unusable: it has the command \\foo", seen)


def test_gold_answers_that_the_verifier_cannot_read(world: World):
    rows = [{"prompt": f"{a}?", "answer": "how many?" if a < 3 else str(a)} for a in range(9)]
    job = job_of(world, "grpo", reward={"math": 1.0}, data=rows)
    assert "gold answers" in failing(job)
    assert "math does not accept 3 of 9 gold answers" in verdict(job, "gold answers")[1]
    few = [{"prompt": f"{a}?", "answer": "how many?" if a < 1 else str(a)} for a in range(9)]
    assert verdict(job_of(world, "grpo", reward={"math": 1.0}, data=few), "gold answers")[0] == "warn"
    none = [{"prompt": f"{a}?"} for a in range(9)]
    assert (
        "9 of 9 tasks have no answer"
        in verdict(job_of(world, "grpo", reward={"math": 1.0}, data=none), "gold answers")[1]
    )


@pytest.mark.parametrize(("value", "seen"), [(1.0, "9 of 9 answers of other rows"), (0.0, "is refused in every form")])
def test_a_verifier_that_accepts_or_refuses_everything(
    world: World, monkeypatch: pytest.MonkeyPatch, value: float, seen: str
):
    monkeypatch.setitem(verify.VERIFIERS, "math", lambda completion, task: value)
    job = job_of(world, "grpo", reward={"math": 1.0})
    assert failing(job) == {"gold answers"}
    assert seen in verdict(job, "gold answers")[1]


def test_answers_of_other_rows_are_tried_in_the_form_in_which_the_right_one_is_accepted(
    world: World, monkeypatch: pytest.MonkeyPatch
):
    rows = [{"prompt": f"{row['prompt']}<think>\n", "answer": row["answer"]} for row in ROWS["problems"]]
    state, seen = verdict(job_of(world, "grpo", reward={"math": 1.0}, data=rows), "gold answers")
    assert state == "pass"
    assert seen.endswith("0 of 9 answers of other rows, tried as <think> </think> <answer>X</answer>")
    monkeypatch.setitem(verify.VERIFIERS, "math", lambda completion, task: float(completion.startswith("<think>")))
    job = job_of(world, "grpo", reward={"math": 1.0}, data=rows)
    assert verdict(job, "gold answers")[0] == "fail"
    assert "9 of 9 answers of other rows" in verdict(job, "gold answers")[1]


def test_a_function_is_tried_in_several_forms(world: World):
    job = job_of(world, "grpo", reward=lambda completion, task: float(completion == rf"\boxed{{{task.answer}}}"))
    assert verdict(job, "gold answers")[0] == "pass"
    assert r"written as \boxed{X}, earns more than another row's on 9 of 9 tasks" in verdict(job, "gold answers")[1]
    job = job_of(world, "grpo", reward=lambda completion, task: -float(task.answer in completion))
    assert verdict(job, "gold answers")[0] == "warn"


def test_a_reward_that_reads_no_answer_is_not_asked(world: World):
    for name in ("format", "length:2-5", "regex:[0-9]+", "repetition:4", "tags:a"):
        assert verdict(job_of(world, "grpo", reward={name: 1.0}), "gold answers")[0] == "skip", name
    rows = [{"prompt": row["prompt"]} for row in ROWS["problems"]]
    assert verdict(job_of(world, "grpo", reward=always, data=rows), "gold answers")[0] == "skip"
