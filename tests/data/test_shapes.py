"""Other ways of writing a row become Hone's columns; nothing is guessed, and what is not read is refused."""

import pytest
from each import each

from hone.data.rows.columns import RowKind, row_kind, to_hone_columns
from hone.errors import HoneError

USER, BOT = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}


def test_hones_own_columns_go_through_as_they_are():
    for row in (
        {"text": "a"},
        {"prompt": "a", "completion": "b"},
        {"messages": [USER, BOT], "conversations": []},
        {"chosen": "Human: no", "rejected": "plain"},
        {"prompt": "p", "chosen": "\n\nHuman: x", "rejected": "\n\nHuman: y"},
        {"instruction": "a", "reply": "b"},
    ):
        assert to_hone_columns(row, chat=True) == (row, "")


def test_sharegpt_turns_become_messages():
    turns = [{"from": "system", "value": "s"}, {"from": "human", "value": "hi"}, {"from": "gpt", "value": "ho"}]
    made, written = to_hone_columns({"conversations": turns, "id": 7}, chat=False)
    assert written == "ShareGPT"
    assert made == {"id": 7, "messages": [{"role": "system", "content": "s"}, USER, BOT]}
    assert row_kind(made) is RowKind.MESSAGES
    apart, _ = to_hone_columns({"conversations": turns[1:], "system": "s"}, chat=False)
    assert apart["messages"] == made["messages"]
    named = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    assert to_hone_columns({"conversations": named}, chat=False)[0]["messages"] == [USER, BOT]


def test_sharegpt_pairs_become_a_prompt_with_two_replies():
    row = {
        "conversations": [{"from": "human", "value": "hi"}],
        "chosen": {"from": "gpt", "value": "ho"},
        "rejected": {"from": "gpt", "value": "no"},
    }
    made, _ = to_hone_columns(row, chat=False)
    assert made == {"prompt": [USER], "chosen": [BOT], "rejected": [{"role": "assistant", "content": "no"}]}


@each(
    ("turns", "says"),
    [
        ("hi", "expected a list of turns"),
        (None, "expected a list of turns"),
        (["hi"], "turn 1 is str"),
        ([{"from": "alien", "value": "x"}], "turn 1 is from 'alien'"),
        ([{"value": "x"}], "turn 1 is from None"),
        ([{"from": "human", "value": "x"}, {"from": "gpt", "value": None}], 'turn 2 has no text as its "value"'),
    ],
)
def test_a_bad_sharegpt_turn_is_named(turns, says):
    with pytest.raises(HoneError) as caught:
        to_hone_columns({"conversations": turns}, chat=True)
    assert says in str(caught.value)


ALPACA = {"instruction": "Add.", "input": "1 2", "output": "3"}


def test_alpaca_becomes_a_prompt_and_a_completion_in_chat_or_plain():
    assert to_hone_columns(ALPACA, chat=False) == ({"prompt": "Add.\n\n1 2\n", "completion": "3"}, "Alpaca")
    user = {"role": "user", "content": "Add.\n\n1 2"}
    bot = {"role": "assistant", "content": "3"}
    assert to_hone_columns(ALPACA, chat=True)[0] == {"prompt": [user], "completion": [bot]}
    for none in ({"input": ""}, {"input": None}):
        assert to_hone_columns({**ALPACA, **none}, chat=False)[0]["prompt"] == "Add.\n"
    assert to_hone_columns({**ALPACA, "system": "Be brief."}, chat=False)[0]["prompt"] == "Be brief.\n\nAdd.\n\n1 2\n"
    chat = to_hone_columns({**ALPACA, "system": "Be brief.", "source": "x"}, chat=True)[0]
    assert (chat["prompt"][0], chat["source"]) == ({"role": "system", "content": "Be brief."}, "x")


def test_alpaca_pairs_keep_chosen_and_rejected():
    row = {**ALPACA, "chosen": "3", "rejected": "4"}
    assert to_hone_columns(row, chat=False)[0] == {"prompt": "Add.\n\n1 2\n", "chosen": "3", "rejected": "4"}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"instruction": None}, '"instruction" is NoneType'),
        ({"instruction": " "}, '"instruction" is empty'),
        ({"output": None}, '"output" is NoneType'),
        ({"input": 3}, '"input" is int'),
        ({"history": [["a", "b"]]}, '"history" is not read'),
    ],
)
def test_a_bad_alpaca_row_is_named_by_column(change, says):
    with pytest.raises(HoneError) as caught:
        to_hone_columns({**ALPACA, **change}, chat=True)
    assert says in str(caught.value)


def test_an_empty_output_is_left_for_the_row_check_to_refuse():
    assert to_hone_columns({**ALPACA, "output": ""}, chat=True)[0]["completion"] == ""
