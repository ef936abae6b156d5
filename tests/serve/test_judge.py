"""Judges against `hone serve` itself: marks, both orders, votes, retries, budgets, and failures that are invalid."""

import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from little import Server, make_decoder, make_tokenizer, start_server

import hone
from hone.config.overrides import Choice
from hone.config.recipe import ModelSpec, OptimSpec, TrainSpec
from hone.errors import HoneError
from hone.launch.rewards import judge, scorer
from hone.model.formats.save import save_model
from hone.reward.score import Reward
from hone.types import Outcome, Rollout, Task

torch.set_num_threads(1)
STEPS = 60
SAYS = {
    "mark x": "Score: 7",
    "mark y": "I see.\nScore: 3\nScore: 4/10",
    "mark z": "one two three",
    "mark w": "Score: 70",
    "pick x y": "Winner: A",
    "pick y x": "Winner: A",
    "pick z y": "Winner: tie",
    "pick y z": "Winner: B",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small judge that has learnt by heart what to say."""
    folder, tokenizer = tmp_path_factory.mktemp("judge"), make_tokenizer()
    save_model(make_decoder(tokenizer.vocab_size, context=256), tokenizer, folder / "fresh")
    turns = [({"role": "user", "content": q}, {"role": "assistant", "content": a}) for q, a in SAYS.items()]
    recipe = hone.Recipe(
        model=ModelSpec(path=str(folder / "fresh")), data=[{"messages": list(t)} for t in turns], algo=Choice("sft"),
        train=TrainSpec(steps=STEPS, prompts=len(SAYS), threads=1), optim=OptimSpec(lr=5e-3), out=str(folder / "run"),
    )  # fmt: skip
    return hone.run(recipe)


@pytest.fixture(scope="module")
def served(model: Path) -> Iterator[Server]:
    made = start_server(model)
    yield made
    assert made.close() == 0


@pytest.fixture
def file(tmp_path: Path, model: Path, served: Server, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("JUDGE_KEY", served.token)
    (tmp_path / "mark.txt").write_text("mark {completion}")
    (tmp_path / "pick.txt").write_text("pick {first} {second}")

    def write(**settings: Any) -> str:
        prompt = "pick.txt" if settings.get("kind") == "pair" else "mark.txt"
        known = {
            "model": model.name,
            "endpoint": f"{served.url}/v1",
            "key": "JUDGE_KEY",
            "prompt": prompt,
            "retries": 0,
        }
        text = "".join(f"{name}: {value}\n" for name, value in {**known, "max_tokens": 40, **settings}.items())
        (tmp_path / "judge.yaml").write_text(text)
        return str(tmp_path / "judge.yaml")

    return write


def judged(path: str, *texts: str, answer: str | None = "y") -> list[Outcome]:
    rows = [Rollout(tokens=[1], mask=[True], text=text, task=Task(prompt="q", answer=answer)) for text in texts]
    return Reward(judge(path))(rows)


def test_a_mark_on_the_scale_is_the_last_one_said(file: Any):
    # (7 - 1) / (10 - 1) and (4 - 1) / (10 - 1); no mark, and one off the scale, are no verdict
    found = judged(file(votes=2), "x", "y", "z", "w")
    assert [o.value for o in found] == [pytest.approx(6 / 9), pytest.approx(3 / 9), None, None]
    assert found[2].reason == "2 of 2 votes of the judge failed: no verdict in 'one two three'"


def test_a_local_model_says_the_same(file: Any, model: Path):
    found = judged(file(endpoint="''", model=model), "x", "z")
    assert [o.value for o in found] == [pytest.approx(6 / 9), None]


def test_both_orders_cancel_a_liking_for_the_first(file: Any):
    assert [o.value for o in judged(file(kind="pair"), "x", "z")] == [0.5, 0.75]  # A then A; tie then B, which is it
    assert judged(file(kind="pair", both_orders="false"), "x")[0].value == 1.0
    missing = judged(file(kind="pair"), "x", answer=None)[0]
    assert missing.reason == "the task has no answer to compare with"


def test_a_judge_is_a_part_and_remembered_by_content(file: Any):
    path = file(budget=1)
    made = scorer({f"judge:{path}": 2.0})
    rows = [Rollout(tokens=[1], mask=[True], text="x", task=Task(prompt="q"))] * 3
    assert [o.value for o in made(rows)] == [pytest.approx(12 / 9)] * 3
    assert made(rows)[0].value == pytest.approx(12 / 9)  # and still costs one request


def test_a_budget_that_is_spent_makes_invalid_what_is_left(file: Any):
    found = judged(file(budget=2, concurrency=1), "x", "x", "x")
    assert [o.valid for o in found] == [True, True, False]
    assert "the judge's budget of 2 requests is spent" in found[2].reason


def test_failures_are_invalid_and_say_what_the_endpoint_said(file: Any, monkeypatch: pytest.MonkeyPatch):
    assert "refused with status 404" in judged(file(model="nobody"), "x")[0].reason
    assert "refused with status 400" in judged(file(), "x" * 5000)[0].reason  # longer than its context
    monkeypatch.setenv("JUDGE_KEY", "wrong")
    assert "refused with status 401" in judged(file(), "x")[0].reason


def test_an_endpoint_that_is_not_there_is_tried_again_and_then_invalid(file: Any):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]  # taken, so that nobody else listens there
        start = time.monotonic()
        (found,) = judged(file(endpoint=f"http://127.0.0.1:{port}/v1", retries=2), "x")
    assert "did not answer in 3 tries, the last with URLError" in found.reason
    assert time.monotonic() - start > 0.3  # a quarter and a half of a second, less what chance takes off


def test_a_silent_endpoint_is_left_in_time(file: Any):
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        mute.listen()
        port = mute.getsockname()[1]
        found = judged(file(endpoint=f"http://127.0.0.1:{port}/v1", timeout=0.3), "x", "y", "z")
    assert [o.valid for o in found] == [False] * 3
    assert "did not answer in 1 tries, the last with TimeoutError" in found[0].reason


def test_what_is_filled_in_is_not_filled_again_and_files_are_read(file: Any, tmp_path: Path):
    (tmp_path / "rubric.md").write_text("Be {answer}.")
    (tmp_path / "own.txt").write_text("{rubric}|{constitution}|{prompt}|{completion}|{other}")
    made = judge(file(prompt="own.txt", rubric="rubric.md"))
    (question,) = made._questions("{answer} {prompt}", Task(prompt="q", answer="secret"), "secret")
    assert question == "Be {answer}.\n||q|{answer} {prompt}|{other}"


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"votes": 0}, "votes is 0: set it to 1 or more"),
        ({"model": ""}, "model is ''"),
        ({"votes": "many"}, "votes: expected a whole number, got 'many'"),
        ({"budget": "true"}, "budget: expected a whole number, got True"),
        ({"kind": "guess"}, "kind: expected one of score, pair"),
        ({"low": 10}, "high is 10.0: set it to a mark above low, 10"),
        ({"timeout": 0}, "timeout is 0"),
        ({"nonsense": 1}, "no setting 'nonsense'"),
        ({"endpoint": "ftp://x"}, "write http://HOST:PORT/v1"),
        ({"prompt": "nowhere.txt"}, "nowhere.txt cannot be read"),
        ({"prompt": "pick.txt"}, "has no {completion}"),
    ],
)
def test_a_file_that_makes_no_sense_is_refused(settings: dict[str, Any], says: str, file: Any):
    with pytest.raises(HoneError) as error:
        judge(file(**settings))
    assert says in str(error.value)
