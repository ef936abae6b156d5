"""From tasks to groups: every request has random numbers of its own, step after step, and each group its own task."""

import torch

from hone.data.text.tokenizer import train_bpe
from hone.engine.params import SampleParams
from hone.model.config import DecoderConfig
from hone.model.decoder import Decoder
from hone.rollout.local import LocalSampler
from hone.rollout.supply import Roller
from hone.types import Group, Task

torch.set_num_threads(1)
TASKS = [Task(prompt=prompt, answer=str(n)) for n, prompt in enumerate(("one", "three", "by two"))]


def roller(*, group: int = 2, seed: int = 0) -> Roller:
    torch.manual_seed(0)
    tokenizer = train_bpe([], vocab_size=258)
    decoder = Decoder(DecoderConfig(vocab_size=258, hidden_size=16, num_hidden_layers=1, initializer_range=0.2))
    params = SampleParams(max_tokens=8, stop_ids=tokenizer.stop_ids, seed=seed)
    return Roller(LocalSampler(decoder), tokenizer, params, group=group)


def written(groups: list[Group]) -> list[tuple[int, ...]]:
    return [tuple(r.tokens) for g in groups for r in g]


def test_the_next_step_draws_other_random_numbers() -> None:
    roll = roller()
    first, second = written(roll(TASKS)), written(roll(TASKS))
    assert len({*first, *second}) == 12
    assert roll.state() == {"requests": 12}


def test_a_resumed_roller_writes_what_the_other_would_have_written() -> None:
    one, two = roller(), roller()
    one(TASKS)
    two.load(one.state())
    assert written(one(TASKS)) == written(two(TASKS))


def test_each_group_is_of_its_own_task_and_prompt() -> None:
    roll = roller()
    for task, group in zip(TASKS, roll(TASKS), strict=True):
        prompt = roll.tokenizer.encode(str(task.prompt))
        for r in group:
            assert r.task is task
            assert list(r.tokens[: len(prompt)]) == prompt
            assert r.mask.index(True) == len(prompt)


def test_parts_of_the_tasks_are_what_the_whole_would_be() -> None:
    whole = written(roller()(TASKS))
    parts = [roller()(TASKS, slice(0, 1)), roller()(TASKS, slice(1, 3))]
    assert [row for part in parts for row in written(part)] == whole


def test_sampled_tokens_are_kept_though_their_text_would_be_encoded_otherwise() -> None:
    roll, again = roller(group=4), roller(group=4)
    prompts = [again.tokenizer.encode(str(task.prompt)) for task in TASKS]
    sampled = again.sampler.sample(prompts, n=4, params=again.params)
    found = roll(TASKS)
    assert written(found) == written(sampled)
    assert [r.gen_logp for g in found for r in g] == [r.gen_logp for g in sampled for r in g]
    tails = [(r.text, [t for t, m in zip(r.tokens, r.mask, strict=True) if m]) for g in found for r in g]
    assert any(roll.tokenizer.encode(text) != tail for text, tail in tails), "the case is met"
