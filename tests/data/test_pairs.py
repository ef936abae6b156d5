"""Preference pairs as files hold them: the prompt that dialogues share, and what other algorithms make of them."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from places import write_rows

from hone.algo import ALGORITHMS
from hone.config.overrides import Choice
from hone.config.recipe import Recipe
from hone.data.rows.pairs import rows_for_reader, transcript, with_prompt
from hone.data.text.chat import CHAT_SPECIALS, DEFAULT_TEMPLATE
from hone.data.text.tokenizer import Tokenizer, train_bpe
from hone.errors import HoneError
from hone.launch import feeds
from hone.types import Task

PLAIN = train_bpe([], vocab_size=258)
CHAT = replace(
    train_bpe([], vocab_size=258 + len(CHAT_SPECIALS), specials=CHAT_SPECIALS), chat_template=DEFAULT_TEMPLATE
)
USER, BOT = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}
RIVAL = {"role": "assistant", "content": "no"}
MORE = {"role": "user", "content": "and?"}
HH = {"chosen": "\n\nHuman: hi\n\nAssistant: ho", "rejected": "\n\nHuman: hi\n\nAssistant: no"}
LONG = {name: f"{text}\n\nHuman: and?\n\nAssistant: {name}" for name, text in zip(HH, [HH["chosen"]] * 2, strict=True)}
CHATS = {"chosen": [USER, BOT], "rejected": [USER, RIVAL]}
ONLINE = sorted(name for name, make in ALGORITHMS.items() if make().online)
PAIRED = sorted(name for name, make in ALGORITHMS.items() if not make().online and make().unit == 2)


def read(data, algo: str, tokenizer: Tokenizer, tmp_path: Path):
    """What a run with this algorithm would read from a file of these rows, and what it says of it."""
    path = write_rows(tmp_path / "pairs.jsonl", data) if isinstance(data, list) else data
    recipe = Recipe(data=str(path), algo=Choice(algo))
    loaded = feeds.feed(recipe, ALGORITHMS[algo](), tokenizer, context=4096)
    return loaded.feed.take(len(loaded.feed)), " ".join(loaded.notes)


def test_hh_transcripts_become_chats_with_a_prompt_where_there_is_a_template():
    made, written = with_prompt(HH, chat=True)
    assert (made, written) == ({"prompt": [USER], "chosen": [BOT], "rejected": [RIVAL]}, "HH-RLHF")


def test_hh_transcripts_stay_text_where_there_is_no_template():
    made, written = with_prompt(LONG, chat=False)
    asked = "\n\nHuman: hi\n\nAssistant: ho\n\nHuman: and?\n\nAssistant:"
    assert (made, written) == ({"prompt": asked, "chosen": " chosen", "rejected": " rejected"}, "HH-RLHF")


def test_the_prompt_of_texts_ends_at_the_last_mark_of_an_answer_that_both_share():
    for mark in ("Assistant:", "### Response:", "Answer:", "A:", "TL;DR:"):
        sides = {name: f"Question: 1+1?\n{mark} The answer is {x}" for name, x in (("chosen", 2), ("rejected", 3))}
        made, _ = with_prompt(sides, chat=False)
        assert made["prompt"] == f"Question: 1+1?\n{mark}", mark
        assert made["chosen"] == " The answer is 2", mark
    bare = {"chosen": "Yes, sure.", "rejected": "Yes, but."}
    assert with_prompt(bare, chat=False) == (bare, "")  # replies without their question


def test_a_prompt_that_the_row_gives_is_kept():
    row = {"prompt": "Human: hi\n\nAssistant:", "chosen": " Human: x\nAnswer: 1", "rejected": " Human: x\nAnswer: 2"}
    assert with_prompt(row, chat=True) == (row, "")
    alone = {"prompt": [USER], "chosen": [BOT], "rejected": [RIVAL]}
    assert with_prompt(alone, chat=True) == (alone, "")
    whole = {"prompt": "hi", **CHATS}  # as UltraFeedback has it
    assert with_prompt(whole, chat=True)[0]["prompt"] == [USER]


def test_messages_that_only_the_prompt_holds_are_kept_before_those_that_the_sides_repeat():
    system = {"role": "system", "content": "Be brief."}
    for given in ([system, USER], [system]):
        made, _ = with_prompt({"prompt": given, **CHATS}, chat=True)
        assert made == {"prompt": [system, USER], "chosen": [BOT], "rejected": [RIVAL]}
    before = [USER, RIVAL, USER]
    assert with_prompt({"prompt": before, **CHATS}, chat=True)[0]["prompt"] == before
    for given in ([MORE], [system, MORE], [MORE, USER, BOT], ["hi"]):
        with pytest.raises(HoneError, match="begin with another prompt"):
            with_prompt({"prompt": given, **CHATS}, chat=True)
    noted = {"prompt": [{**USER, "id": 7}], **CHATS}
    assert with_prompt(noted, chat=True)[0]["prompt"] == [USER]


def test_dialogues_that_part_before_their_last_turn_share_what_comes_before():
    row = {"chosen": [USER, BOT, MORE, BOT], "rejected": [USER, RIVAL, MORE, BOT]}
    made, _ = with_prompt(row, chat=True)
    assert made == {"prompt": [USER], "chosen": [BOT, MORE, BOT], "rejected": [RIVAL, MORE, BOT]}


def test_chats_that_share_nothing_are_refused():
    with pytest.raises(HoneError, match="do not share a prompt: begin both with the same"):
        with_prompt({"chosen": [USER, BOT], "rejected": [MORE, BOT]}, chat=True)


def test_online_a_pair_is_its_prompt():
    (row,), what = rows_for_reader(with_prompt(HH, chat=True)[0], "prompts")
    assert row["prompt"] == [USER]
    assert what == "prompts taken from preference pairs"
    # parting at the user's turn, the prompt ends before the last reply: a sampler cannot answer an answer
    parting = {"chosen": [USER, BOT, MORE, BOT], "rejected": [USER, BOT, USER, BOT]}
    assert rows_for_reader(with_prompt(parting, chat=True)[0], "prompts")[0][0]["prompt"] == [USER]
    # one reply that is missing or the same as the other does not matter
    for sides in ({"chosen": [USER, BOT], "rejected": [USER]}, {"chosen": [USER, BOT], "rejected": [USER, BOT]}):
        assert rows_for_reader(with_prompt(sides, chat=True)[0], "prompts")[0][0]["prompt"] == [USER]


def test_online_a_chat_is_asked_up_to_its_last_reply():
    (row,), what = rows_for_reader({"messages": [USER, BOT, MORE, BOT]}, "prompts")
    assert row["prompt"] == [USER, BOT, MORE]
    assert "up to its last reply" in what
    with pytest.raises(HoneError, match="no message to be answered"):
        rows_for_reader({"messages": [BOT]}, "prompts")


def test_a_pair_unpaired_is_two_labelled_rows():
    pair = {"prompt": "1+1=", "chosen": "2", "rejected": "3", "margin": 1.0, "source": "x"}
    rows, what = rows_for_reader(pair, "labels")
    assert rows == [
        {"prompt": "1+1=", "source": "x", "completion": "2", "label": True},
        {"prompt": "1+1=", "source": "x", "completion": "3", "label": False},
    ]
    assert "chosen as desirable" in what
    with pytest.raises(HoneError, match="are the same: remove the row"):
        rows_for_reader({**pair, "rejected": "2"}, "labels")


def test_every_online_algorithm_reads_dialogue_pairs_with_and_without_a_template(tmp_path):
    for algo in ONLINE:
        for tokenizer, wanted in ((PLAIN, "\n\nHuman: hi\n\nAssistant:"), (CHAT, [USER])):
            tasks, said = read([HH, HH], algo, tokenizer, tmp_path)
            assert [task.prompt for task in tasks if isinstance(task, Task)] == [wanted] * 2, algo
            assert "2 prompts taken from preference pairs" in said, algo
            assert "HH-RLHF" in said, algo


def test_every_paired_algorithm_trains_on_the_replies_alone(tmp_path):
    for algo in PAIRED:
        for tokenizer, asked, replies in ((PLAIN, "\n\nHuman: hi\n\nAssistant:", " "), (CHAT, "hi", "")):
            (pair,), _ = read([HH], algo, tokenizer, tmp_path)
            texts = [tokenizer.decode(r.written()).removesuffix(tokenizer.eos) for r in pair]
            assert texts == [f"{replies}ho", f"{replies}no"], algo
            assert all(asked in tokenizer.decode(r.tokens) for r in pair), algo


def test_kto_and_pointwise_models_read_pairs_as_two_rows(tmp_path):
    for algo in ("kto", "pointwise_reward_model"):
        for tokenizer in (PLAIN, CHAT):
            groups, said = read([HH, LONG], algo, tokenizer, tmp_path)
            assert sorted(g[0].label for g in groups) == [0.0, 0.0, 1.0, 1.0], algo
            assert "2 pairs read as two rows each" in said, algo


def test_sft_trains_on_the_chosen_reply_of_a_pair(tmp_path):
    groups, said = read([HH, LONG], "sft", CHAT, tmp_path)
    assert sorted(CHAT.decode(g[0].written()).removesuffix(CHAT.eos) for g in groups) == ["chosen", "ho"]
    assert "2 pairs, of which the chosen reply is trained on" in said


def test_sharegpts_turns_in_pairs_are_read(tmp_path):
    turns = [{"from": "human", "value": "hi"}]
    row = {name: [*turns, {"from": "gpt", "value": x}] for name, x in (("chosen", "ho"), ("rejected", "no"))}
    (pair,), said = read([row], "dpo", CHAT, tmp_path)
    assert CHAT.decode(pair[1].written()) == "no" + CHAT.eos
    assert "1 row converted from ShareGPT" in said


def test_a_bad_pair_is_skipped_and_counted_whatever_reads_it(tmp_path):
    bad = {"chosen": [USER, BOT], "rejected": [MORE, RIVAL]}
    for algo in ("dpo", "kto", "sft", "grpo"):
        path = write_rows(tmp_path / "bad.jsonl", [CHATS, bad, CHATS])
        recipe = Recipe(data=str(path), algo=Choice(algo))
        with pytest.raises(HoneError, match=r"bad\.jsonl line 2: .*do not share a prompt"):
            feeds.feed(recipe, ALGORITHMS[algo](), CHAT, context=99)


def test_a_transcript_by_hand():
    text = "\n\nHuman: a\n\nb: c Human: d\n\nAssistant: one\n\nAssistant:\n\nHuman:  x \n\nAssistant:"
    assert transcript(text) == [
        {"role": "user", "content": "a\n\nb: c Human: d"},
        {"role": "assistant", "content": "one"},  # two turns of one speaker are one
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": ""},
    ]
    with pytest.raises(HoneError, match="begin it with Human: or Assistant:"):
        transcript("so: \n\nHuman: a")
    assert transcript("  Human: a") == [{"role": "user", "content": "a"}]  # blanks before the first speaker


def test_rows_in_memory_are_read_as_those_of_a_file(tmp_path):
    recipe = Recipe(data=[HH, json.loads(json.dumps(LONG))], algo=Choice("ppo"))
    loaded = feeds.feed(recipe, ALGORITHMS["ppo"](), PLAIN, context=4096)
    assert all(isinstance(task.prompt, str) and task.prompt.endswith("Assistant:") for task in loaded.feed.take(2))


@pytest.mark.parametrize("tokenizer", [PLAIN, CHAT], ids=["text", "chat"])
def test_a_dialogue_whose_reply_is_blank_is_a_bad_row_to_who_reads_replies(tokenizer: Tokenizer, tmp_path: Path):
    blank = {**HH, "chosen": "\n\nHuman: hi\n\nAssistant: "}
    for algo in ("dpo", "kto", "reward_model", "sft"):
        with pytest.raises(HoneError, match=r"line 2: .* empty"):
            read([HH, blank], algo, tokenizer, tmp_path)
    tasks, _ = read([HH, blank], "ppo", tokenizer, tmp_path)
    assert len(tasks) == 2
