"""Rows that were mixed up, copied, leaked or are too long."""

from dataclasses import replace
from pathlib import Path

import pytest
from check_world import ROWS, World, failing, job_of, names, recipe, rows_for, verdict, write_rows

from hone.check import suite
from hone.config.recipe import ModelSpec
from hone.data.feed.source import Source
from hone.types import Task


def test_answers_of_other_rows(world: World):
    job = job_of(world, "grpo", reward={"math": 1.0})
    tasks = job.source.take(9)
    answers = [task.answer for task in tasks]
    job.source = Source([replace(t, answer=a) for t, a in zip(tasks, answers[1:] + answers[:1], strict=True)], seed=0)
    assert failing(job) == {"pairing"}
    assert "9 of 9 shuffled tasks are no row of the data" in verdict(job, "pairing")[1]


def test_one_wrong_pair_among_many_is_named(world: World):
    job = job_of(world, "grpo")
    tasks = job.source.take(9)
    wrong = [replace(tasks[0], answer="77"), *tasks[1:]]
    job.source = Source(wrong, seed=0)
    state, seen = verdict(job, "pairing")
    assert state == "fail"
    assert seen.startswith("1 of 9 shuffled tasks")
    assert "'77'" in seen


def test_completions_of_other_rows(world: World):
    for algo in ("sft", "dpo", "kto", "pointwise_reward_model", "process_reward_model"):
        job = job_of(world, algo)
        groups = job.source.take(9)
        swapped = [
            [replace(r, tokens=o.tokens, mask=o.mask, step_label=o.step_label) for r, o in zip(g, other, strict=True)]
            for g, other in zip(groups, groups[1:] + groups[:1], strict=True)
        ]
        job.source = Source(swapped, seed=0)
        assert failing(job) == {"pairing"}, algo


@pytest.mark.parametrize("algo", ["kto", "pointwise_reward_model"])
def test_a_label_turned_round_is_no_row_of_the_data(algo: str, world: World):
    job = job_of(world, algo)
    turned = [[replace(r, label=1 - (r.label or 0)) for r in g] for g in job.source.take(9)]
    job.source = Source(turned, seed=0)
    assert failing(job) == {"pairing"}


def test_rows_with_ids_and_tasks_made_in_python_pair(world: World, tmp_path: Path):
    named = write_rows(tmp_path / "rows.jsonl", [{**row, "id": f"row {i}"} for i, row in enumerate(ROWS["problems"])])
    numbered = [{**row, "id": i} for i, row in enumerate(ROWS["problems"])]  # off by one from the place in the file
    tasks = [Task(prompt=row["prompt"], answer=row["answer"], extra={"prompt": "other"}) for row in ROWS["problems"]]
    for data in (named, numbered, tasks):
        assert verdict(job_of(world, "grpo", data=data), "pairing")[0] == "pass"


BAD = {
    "sft": ({"prompt": "x", "completion": None}, {"prompt": None, "completion": "x"}),
    "dpo": ({"prompt": "x", "chosen": None, "rejected": "y"}, {"prompt": "x", "chosen": "y", "rejected": 3}),
    "process_reward_model": ({"prompt": "x", "steps": None, "step_labels": [1]},),
    "pointwise_reward_model": ({"prompt": "x", "completion": "y", "score": "high"},),
    "pretrain": ({"text": None},),
    "grpo": ({"prompt": None, "answer": "1"}, {"prompt": 7, "answer": "1"}),
}


def test_rows_that_the_run_skips_are_not_looked_at(world: World, tmp_path: Path):
    for algo, bad in BAD.items():
        good = ROWS[rows_for(algo)]
        data = write_rows(tmp_path / f"{algo}.jsonl", [good[0], *bad, *good[1:]])
        job = job_of(world, algo, "read.skip_bad=true", data=data)
        assert failing(job) == set(), algo
        seen = verdict(job, "copies")[1]
        assert seen.startswith(f"0 of {len(good)} rows"), "the skipped ones are not counted"


def test_a_mixed_up_row_is_found_among_skipped_ones(world: World, tmp_path: Path):
    data = write_rows(tmp_path / "rows.jsonl", [*BAD["grpo"], *ROWS["problems"]])
    job = job_of(world, "grpo", "read.skip_bad=true", data=data)
    tasks = job.source.take(9)
    job.source = Source([replace(tasks[0], answer="77"), *tasks[1:]], seed=0)
    assert verdict(job, "pairing")[1].startswith("1 of 9 shuffled tasks")


def test_copies_leaks_and_disputed_answers_are_noted(world: World):
    rows = ROWS["problems"]
    plain = job_of(world, "grpo", data=rows, eval_data=[{"prompt": "8+9=\n", "answer": "17"}])
    assert verdict(plain, "copies") == (
        "pass",
        "0 of 9 rows are copies of others; none of 1 held-out prompts is in data",
    )
    assert "19 rows are copies" in verdict(job_of(world, "grpo", data=rows + rows[:1] * 10), "copies")[1]
    assert verdict(job_of(world, "grpo", data=rows + rows[:1] * 10), "copies")[0] == "warn"
    leaked = job_of(world, "grpo", data=rows, eval_data=rows[:2])
    assert verdict(leaked, "copies")[0] == "warn"
    assert "2 of 2 prompts of eval_data are in data" in verdict(leaked, "copies")[1]
    disputed = job_of(world, "grpo", data=[*rows, {"prompt": rows[0]["prompt"], "answer": "5"}])
    assert verdict(disputed, "copies") == ("warn", "1 prompts occur with different answers")


def test_texts_and_conversations_of_the_held_out_data_are_looked_for_in_the_data(world: World):
    chat = ModelSpec(path=world / "chat")
    asked = [
        {**row, "messages": [*row["messages"][:-1], {"role": "assistant", "content": "?"}]} for row in ROWS["messages"]
    ]
    for algo, rows, held_out, model in (
        ("pretrain", ROWS["text"], ROWS["text"][:2], ModelSpec(path=world / "plain")),
        ("sft", ROWS["messages"], asked[:2], chat),
    ):
        state, seen = verdict(job_of(world, algo, data=rows, eval_data=held_out, model=model), "copies")
        assert (state, seen.partition(":")[0]) == ("warn", "2 of 2 prompts of eval_data are in data"), algo
        job = job_of(world, algo, data=rows[2:], eval_data=held_out, model=model)
        assert verdict(job, "copies") == (
            "pass",
            "0 of 7 rows are copies of others; none of 2 held-out prompts is in data",
        )


def test_of_a_stream_only_the_first_rows_are_spoken_of(world: World, tmp_path: Path):
    data = write_rows(tmp_path / "many.jsonl", [{"text": f"row {i}"} for i in range(300)])
    held_out = [{"text": "row 250"}]
    job = job_of(world, "pretrain", "read.stream=always", data=data, eval_data=held_out)
    assert verdict(job, "copies") == (
        "pass",
        "0 of the first 100 rows are copies of others; none of 1 held-out prompts is among them",
    )


def test_steps_of_tokens_say_nothing_of_how_often_a_row_is_met(world: World):
    job = job_of(world, "sft", "train.tokens=200", "train.steps=3")
    assert verdict(job, "plan")[1].endswith("micro-batches of at most 200 tokens; 3 steps over 9 rows")


def test_a_context_that_cuts_completions_short_is_noted(world: World):
    state, seen = verdict(job_of(world, "grpo", "sample.max_tokens=44"), "context")
    assert (state, seen) == (
        "warn",
        "longest of 9 prompts 5 + 44 to write, context 48: 9 prompts leave less than sample.max_tokens",
    )
    assert verdict(job_of(world, "grpo", "sample.max_tokens=43"), "context")[0] == "pass"


def test_rows_near_the_context_are_counted(world: World):
    rows = [{"text": "x" * 46}, {"text": "x" * 10}]  # 47 and 11 of 48 tokens
    job = job_of(world, "pretrain", data=rows)
    assert verdict(job, "context") == ("pass", "longest of 2 rows 47 of 48 tokens, 1 near the limit, none cut")


def test_a_step_that_takes_more_rows_than_there_are_is_noted(world: World):
    report = suite.check(recipe(world, "sft", "train.prompts=10"))
    assert names(report, "warn") == {"plan"}
    (plan,) = (f for f in report.findings if f.name == "plan")
    assert "10 rows; 1 epoch x 1 minibatch = 1 update" in plan.seen


def test_a_limit_below_the_datas_own_solutions_is_noted_with_one_that_is_not(world: World, tmp_path: Path):
    rows = [
        {"prompt": f"{a}+{a}=\n", "completion": "so it is twice the number", "answer": str(2 * a)} for a in range(9)
    ]
    data = write_rows(tmp_path / "rows.jsonl", rows)
    (found,) = suite.examine(job_of(world, "grpo", data=data), only=("context",)).findings
    assert (found.verdict, found.remedy) == ("warn", "set sample.max_tokens=43")
    assert found.seen.endswith("the data's own solutions take 25 tokens, at the median")
    assert verdict(job_of(world, "grpo", found.remedy.removeprefix("set "), data=data), "context")[0] == "pass"


def test_a_limit_that_nobody_set_is_what_the_context_leaves(world: World):
    state, seen = verdict(job_of(world, "grpo", "sample.max_tokens=0"), "context")
    assert state == "pass"
    assert "+ 47 to write, context 48" in seen
