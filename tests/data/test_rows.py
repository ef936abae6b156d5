"""Dataset rows: every kind by hand, and every way a row can be wrong named by file, row and column."""

import math
from dataclasses import replace

import pytest
from each import each
from grouped import to_groups

from hone.data.rows.columns import RowKind, row_kind
from hone.data.rows.convert import Grouper, Tasker
from hone.data.rows.record import steps_row, task_row
from hone.data.text.chat import CHAT_SPECIALS, DEFAULT_TEMPLATE, render_prompt
from hone.data.text.tokenizer import train_bpe
from hone.errors import HoneError
from hone.types import Stop

TOK = replace(
    train_bpe(["hello good bad one two\n"], vocab_size=280, specials=CHAT_SPECIALS), chat_template=DEFAULT_TEMPLATE
)
USER, GOOD, BAD = ({"role": r, "content": c} for r, c in (("user", "hi"), ("assistant", "good"), ("assistant", "bad")))
GOLD = {
    RowKind.TEXT: {"text": "hello"},
    RowKind.COMPLETION: {"prompt": "hi", "completion": " good"},
    RowKind.MESSAGES: {"messages": [USER, GOOD]},
    RowKind.PREFERENCE: {"prompt": "hi", "chosen": " good", "rejected": " bad", "margin": 0.5},
    RowKind.LABELLED: {"prompt": "hi", "completion": " good", "label": True},
    RowKind.SCORED: {"prompt": "hi", "completion": " good", "score": -2.5},
    RowKind.STEPS: {"prompt": "hi", "steps": ["one", "two"], "step_labels": [1, 0]},
    RowKind.TASK: {"prompt": "hi", "answer": "42", "level": 3},
}


def written(rollout) -> str:
    return TOK.decode([t for t, m in zip(rollout.tokens, rollout.mask, strict=True) if m])


def tasks(rows, *, name="x", **settings):
    convert = Tasker(tokenizer=TOK, **settings)
    return [convert(row, f"{name} row {n}") for n, row in enumerate(rows, start=1)]


def only(row):
    return to_groups([row], TOK)[0][0]


@each("kind", list(RowKind))
def test_each_shape_is_told_by_its_columns(kind):
    assert row_kind(GOLD[kind], expected=[kind]) is kind
    assert row_kind({**GOLD[kind], "source": "web", "id": 7}, expected=[kind]) is kind


def test_a_score_is_read_only_by_what_asks_for_it():
    scored = GOLD[RowKind.SCORED]
    assert row_kind(scored) is RowKind.COMPLETION
    assert row_kind({**scored, "label": True}, expected=[RowKind.SCORED, RowKind.LABELLED]) is RowKind.SCORED
    assert only(scored)[0].label is None
    assert to_groups([scored], TOK, kind=RowKind.SCORED)[0][0][0].label == -2.5


@pytest.mark.parametrize("value", [None, "high", float("nan"), float("inf"), [1], pytest.param(10**400, id="huge")])
def test_a_score_is_a_finite_number(value):
    with pytest.raises(HoneError, match='column "score" is'):
        to_groups([{**GOLD[RowKind.SCORED], "score": value}], TOK, kind=RowKind.SCORED)


@pytest.mark.parametrize(("value", "fits"), [(0, True), (1, True), (0.3, True), (-0.01, False), (1.01, False)])
def test_scores_that_are_shares_lie_between_0_and_1(value, fits):
    read = Grouper(tokenizer=TOK, kind=RowKind.SCORED, shares=True)
    row = {**GOLD[RowKind.SCORED], "score": value}
    if fits:
        assert read(row, "row 1")[0].label == value
    else:
        with pytest.raises(HoneError, match=r"row 1.*score.*expected a number from 0 to 1"):
            read(row, "row 1")


def test_published_datasets_with_more_columns_keep_their_meaning():
    assert row_kind({"prompt": "p", "prompt_id": "x", "messages": []}) is RowKind.MESSAGES
    assert row_kind({"prompt": "p", "chosen": [], "rejected": [], "messages": []}) is RowKind.PREFERENCE
    assert row_kind({"prompt": "p", "completions": [], "labels": []}) is RowKind.STEPS
    with pytest.raises(HoneError, match="question, reply are no shape"):
        row_kind({"question": "", "reply": ""})
    with pytest.raises(HoneError, match="no shape"):
        row_kind({})


def test_text_trains_every_token_and_ends_with_eos():
    (rollout,) = only(GOLD[RowKind.TEXT])
    assert list(rollout.tokens) == [*TOK.encode("hello"), TOK.eos_id]
    assert all(rollout.mask)


def test_text_that_spells_a_special_token_does_not_become_one():
    (rollout,) = only({"text": "a<eos>b"})
    assert list(rollout.tokens).count(TOK.eos_id) == 1


def test_completion_and_messages_train_what_the_assistant_writes():
    assert written(only(GOLD[RowKind.COMPLETION])[0]) == " good<eos>"
    assert written(only(GOLD[RowKind.MESSAGES])[0]) == "good<eos>"
    assert written(only({"prompt": [USER], "completion": [GOOD]})[0]) == "good<eos>"


def test_preference_is_chosen_then_rejected_with_the_margin_on_both():
    chosen, rejected = only(GOLD[RowKind.PREFERENCE])
    assert (written(chosen), written(rejected)) == (" good<eos>", " bad<eos>")
    assert (chosen.text, rejected.text) == (" good", " bad")
    assert chosen.margin == rejected.margin == 0.5
    assert only({"prompt": "hi", "chosen": "a", "rejected": "b", "margin": None})[0].margin == 0.0


def test_preference_chats_that_repeat_the_prompt_are_split():
    whole = only({"prompt": "ignored", "chosen": [USER, GOOD], "rejected": [USER, BAD]})
    split = only({"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]})
    assert whole == split
    assert only({"chosen": [USER, GOOD], "rejected": [USER, BAD]}) == split
    other = {"role": "user", "content": "another"}
    with pytest.raises(HoneError, match="do not share a prompt"):
        only({"chosen": [USER, GOOD], "rejected": [other, BAD]})


@pytest.mark.parametrize(("label", "value"), [(True, 1.0), (False, 0.0), (1, 1.0), (0, 0.0), (1.0, 1.0)])
def test_kto_label_is_one_or_zero(label, value):
    assert only({**GOLD[RowKind.LABELLED], "label": label})[0].label == value


def test_step_labels_sit_on_the_last_token_of_each_step():
    (rollout,) = only(GOLD[RowKind.STEPS])
    at = {i: x for i, x in enumerate(rollout.step_label) if not math.isnan(x)}
    assert list(at.values()) == [1.0, 0.0]
    assert [TOK.decode(rollout.tokens[: i + 1]) for i in at] == ["hione\n", "hione\ntwo\n"]
    assert max(at) == len(rollout.tokens) - 1
    assert written(rollout) == rollout.text == "one\ntwo\n"


def test_trl_names_for_steps_mean_the_same_and_the_separator_is_not_doubled():
    ours = steps_row(GOLD[RowKind.STEPS], TOK)
    theirs = steps_row({"prompt": "hi", "completions": ["one\n", "two"], "labels": [True, False]}, TOK)
    assert theirs.tokens == ours.tokens
    assert repr(theirs.step_label) == repr(ours.step_label)
    assert steps_row({**GOLD[RowKind.STEPS], "separator": ""}, TOK).text == "onetwo"
    soft = steps_row({**GOLD[RowKind.STEPS], "step_labels": [0.25, 1.0]}, TOK)
    assert [x for x in soft.step_label if x == x] == [0.25, 1.0]


def test_a_task_keeps_the_other_columns_and_numbers_become_text():
    task = task_row({"prompt": "hi", "answer": 42, "level": 3, "id": 9})
    assert (task.prompt, task.answer, task.extra, task.id) == ("hi", "42", {"level": 3}, "9")
    assert task_row({"prompt": "hi", "answer": 0.5}).answer == "0.5"
    assert task_row({"prompt": "hi", "answer": 0}).answer == "0"
    assert task_row({"prompt": "hi"}).answer is None
    assert Tasker(tokenizer=TOK)({"prompt": "b"}, "x row 2", id="2").id == "2"
    assert Tasker(tokenizer=TOK)({"prompt": "b"}, "x row 2").id == "x row 2"


WRONG = [
    (RowKind.TEXT, {"text": ""}, '"text" is empty'),
    (RowKind.TEXT, {"text": None}, '"text" is null'),
    (RowKind.TEXT, {"text": 5}, "int '5', expected text"),
    (RowKind.TEXT, {"text": "\ud800"}, "surrogate"),
    (RowKind.COMPLETION, {"completion": ""}, '"completion" is empty'),
    (RowKind.COMPLETION, {"completion": None}, '"completion" is null'),
    (RowKind.COMPLETION, {"prompt": ""}, '"prompt" is empty'),
    (RowKind.COMPLETION, {"prompt": 3}, "expected text or a list of messages"),
    (RowKind.COMPLETION, {"prompt": [USER], "completion": [USER]}, "no assistant"),
    (RowKind.COMPLETION, {"prompt": [USER], "completion": ["x"]}, "message 1"),
    (RowKind.MESSAGES, {"messages": []}, '"messages" is empty'),
    (RowKind.MESSAGES, {"messages": "hi"}, "a list of messages"),
    (RowKind.MESSAGES, {"messages": [USER]}, "no assistant"),
    (RowKind.MESSAGES, {"messages": {"role": "user"}}, "list of messages"),
    (RowKind.PREFERENCE, {"rejected": None}, '"rejected" is null'),
    (RowKind.PREFERENCE, {"rejected": " good"}, "the same"),
    (RowKind.PREFERENCE, {"margin": "big"}, '"margin" is str'),
    (RowKind.PREFERENCE, {"margin": math.inf}, "finite"),
    (RowKind.LABELLED, {"label": None}, '"label" is null'),
    (RowKind.LABELLED, {"label": "true"}, '"label" is str'),
    (RowKind.LABELLED, {"label": 0.5}, "true or false"),
    (RowKind.LABELLED, {"label": -1}, "from 0 to 1"),
    (RowKind.LABELLED, {"label": math.nan}, "from 0 to 1"),
    (RowKind.STEPS, {"steps": []}, '"steps" is empty'),
    (RowKind.STEPS, {"steps": ["one"]}, '1 "steps" but 2 "step_labels"'),
    (RowKind.STEPS, {"steps": ["one", ""]}, "text in every step"),
    (RowKind.STEPS, {"steps": ["one", None]}, "text in every step"),
    (RowKind.STEPS, {"steps": "ab"}, "expected a list"),
    (RowKind.STEPS, {"step_labels": [1, None]}, '"step_labels" is NoneType'),
    (RowKind.STEPS, {"step_labels": [1, 2]}, "from 0 to 1"),
    (RowKind.TASK, {"prompt": None}, '"prompt" is null'),
    (RowKind.TASK, {"prompt": []}, '"prompt" is empty'),
    (RowKind.TASK, {"prompt": [GOOD]}, "ends with an assistant"),
    (RowKind.TASK, {"answer": None}, '"answer" is null'),
    (RowKind.TASK, {"answer": ["a"]}, '"answer" is list'),
    (RowKind.TASK, {"answer": True}, '"answer" is bool'),
    (RowKind.TASK, {"answer": math.nan}, "finite"),
]


@each(("kind", "change", "says"), WRONG)
def test_a_bad_row_is_named_by_file_number_and_column(kind, change, says):
    rows = [GOLD[kind], GOLD[kind], {**GOLD[kind], **change}]
    with pytest.raises(HoneError) as caught:
        tasks(rows, name="x.jsonl") if kind is RowKind.TASK else to_groups(rows, TOK, name="x.jsonl")
    message = str(caught.value)
    assert message.startswith("x.jsonl row 3: ")
    assert says in message
    assert "\n" not in message


@each("kind", [s for s in RowKind if s not in (RowKind.TASK, RowKind.TEXT)])
def test_a_missing_column_is_named(kind):
    for column in GOLD[kind].keys() - {"margin"}:
        row = {k: v for k, v in GOLD[kind].items() if k != column}
        given = kind if kind is RowKind.SCORED else None  # which nothing but its reader tells
        with pytest.raises(HoneError, match=r"x\.jsonl row 2: .*missing"):
            to_groups([GOLD[kind], row], TOK, name="x.jsonl", kind=given)


def test_rows_of_two_shapes_in_one_dataset_are_refused():
    with pytest.raises(HoneError, match="x row 2: it has the columns"):
        to_groups([GOLD[RowKind.COMPLETION], GOLD[RowKind.LABELLED]], TOK)
    forced, _ = to_groups([GOLD[RowKind.COMPLETION], GOLD[RowKind.LABELLED]], TOK, kind=RowKind.COMPLETION)
    assert len(forced) == 2


def test_prompts_alone_cannot_be_trained_on_and_no_rows_neither():
    with pytest.raises(HoneError, match="nothing to train on"):
        to_groups([GOLD[RowKind.TASK]], TOK)
    with pytest.raises(HoneError, match="x is empty"):
        to_groups([], TOK)


LONG = {"prompt": "hi", "completion": " good good good good"}


def test_long_rows_are_an_error_unless_told_otherwise():
    n = len(only(LONG)[0].tokens)
    rows = [GOLD[RowKind.COMPLETION], LONG]
    assert len(to_groups(rows, TOK, max_tokens=n)[0]) == 2
    with pytest.raises(HoneError, match=f"x row 2 has {n} tokens, the limit is {n - 1}"):
        to_groups(rows, TOK, max_tokens=n - 1)


def test_dropped_and_truncated_rows_are_counted_and_marked():
    whole = only(LONG)[0]
    rows, limit = [GOLD[RowKind.COMPLETION], LONG], len(whole.tokens) - 1
    groups, tally = to_groups(rows, TOK, max_tokens=limit, overlong="drop")
    assert (len(groups), tally.dropped, tally.truncated) == (1, 1, 0)
    groups, tally = to_groups(rows, TOK, max_tokens=limit, overlong="truncate")
    assert (len(groups), tally.dropped, tally.truncated) == (2, 0, 1)
    (short,) = groups[1]
    assert list(short.tokens) == list(whole.tokens)[:limit]
    assert TOK.eos_id not in short.tokens  # a cut row must not claim to be finished
    assert short.stop is Stop.LENGTH
    assert groups[0][0].stop is Stop.TOKEN


def test_truncation_that_leaves_nothing_to_train_on_drops_the_row_and_its_pair():
    long_prompt = {"prompt": "hello " * 20, "chosen": " good", "rejected": " bad"}
    pair = {"prompt": "hi", "chosen": " good", "rejected": " bad"}
    groups, tally = to_groups([pair, long_prompt], TOK, max_tokens=8, overlong="truncate")
    assert (len(groups), tally.dropped, tally.truncated) == (1, 1, 0)
    steps = {"prompt": "hi", "steps": ["hello " * 30], "step_labels": [1]}
    with pytest.raises(HoneError, match="all 1 rows exceed 8 tokens"):
        to_groups([steps], TOK, max_tokens=8, overlong="truncate")


def test_long_prompts_are_refused_or_dropped_but_never_cut():
    rows = [{"prompt": "hi"}, {"prompt": "hello " * 20}]
    limit = len(render_prompt(TOK, "hi"))
    with pytest.raises(HoneError, match="row 2: the prompt has"):
        tasks(rows, max_tokens=limit)
    first, second = tasks(rows, max_tokens=limit, overlong="drop")
    assert (first.prompt, second) == ("hi", None)


def test_the_tools_of_a_row_are_rendered_in_its_prompt():
    template = "{%- if tools -%}{{- tools | tojson -}}{%- endif -%}" + DEFAULT_TEMPLATE
    tokenizer = replace(TOK, chat_template=template)
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    for row in ({"messages": [USER, GOOD]}, {"prompt": [USER], "completion": [GOOD]}):
        (rollout,) = to_groups([{**row, "tools": tools}], tokenizer)[0][0]
        assert '"name": "add"' in tokenizer.decode(rollout.tokens)
        assert written(rollout) == "good<eos>"
        (plain,) = to_groups([{**row, "tools": []}], tokenizer)[0][0]
        assert plain == only(row)[0]
    with pytest.raises(HoneError, match="tools is text that is not JSON"):
        to_groups([{"messages": [USER, GOOD], "tools": "add"}], tokenizer)


def test_a_pair_of_which_the_difference_is_cut_off_is_dropped():
    grouper = Grouper(tokenizer=train_bpe([], vocab_size=258), max_tokens=5, overlong="truncate")
    for sides, kept in ((("xyzab", "xyzcd"), False), (("xyab", "xycd"), True), (("xabc", "yabc"), True)):
        row = dict(zip(("chosen", "rejected"), sides, strict=True))
        assert (grouper({"prompt": "ab", **row}, "here") is not None) == kept
    assert (grouper.tally.rows, grouper.tally.truncated, grouper.tally.dropped) == (2, 2, 1)
