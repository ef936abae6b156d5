"""Dataset rows: every shape by hand, and every way a row can be wrong named by file, row and column."""

import math
from dataclasses import replace

import pytest
from each import each

from hone.data.rows.columns import Shape, shape_of
from hone.data.rows.convert import Grouper, Tasker, to_groups
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
    Shape.TEXT: {"text": "hello"},
    Shape.COMPLETION: {"prompt": "hi", "completion": " good"},
    Shape.MESSAGES: {"messages": [USER, GOOD]},
    Shape.PREFERENCE: {"prompt": "hi", "chosen": " good", "rejected": " bad", "margin": 0.5},
    Shape.LABELLED: {"prompt": "hi", "completion": " good", "label": True},
    Shape.SCORED: {"prompt": "hi", "completion": " good", "score": -2.5},
    Shape.STEPS: {"prompt": "hi", "steps": ["one", "two"], "step_labels": [1, 0]},
    Shape.TASK: {"prompt": "hi", "answer": "42", "level": 3},
}


def written(rollout) -> str:
    return TOK.decode([t for t, m in zip(rollout.tokens, rollout.mask, strict=True) if m])


def tasks(rows, *, name="x", **settings):
    convert = Tasker(tokenizer=TOK, **settings)
    return [convert(row, f"{name} row {n}") for n, row in enumerate(rows, start=1)]


def only(row):
    return to_groups([row], TOK).groups[0]


@each("shape", list(Shape))
def test_each_shape_is_told_by_its_columns(shape):
    assert shape_of(GOLD[shape], expected=[shape]) is shape
    assert shape_of({**GOLD[shape], "source": "web", "id": 7}, expected=[shape]) is shape


def test_a_score_is_read_only_by_what_asks_for_it():
    scored = GOLD[Shape.SCORED]
    assert shape_of(scored) is Shape.COMPLETION
    assert shape_of({**scored, "label": True}, expected=[Shape.SCORED, Shape.LABELLED]) is Shape.SCORED
    assert only(scored)[0].label is None
    assert to_groups([scored], TOK, shape=Shape.SCORED).groups[0][0].label == -2.5


@pytest.mark.parametrize("value", [None, "high", float("nan"), float("inf"), [1], pytest.param(10**400, id="huge")])
def test_a_score_is_a_finite_number(value):
    with pytest.raises(HoneError, match='column "score" is'):
        to_groups([{**GOLD[Shape.SCORED], "score": value}], TOK, shape=Shape.SCORED)


@pytest.mark.parametrize(("value", "fits"), [(0, True), (1, True), (0.3, True), (-0.01, False), (1.01, False)])
def test_scores_that_are_shares_lie_between_0_and_1(value, fits):
    read = Grouper(tokenizer=TOK, shape=Shape.SCORED, shares=True)
    row = {**GOLD[Shape.SCORED], "score": value}
    if fits:
        assert read(row, "row 1")[0].label == value
    else:
        with pytest.raises(HoneError, match=r"row 1.*score.*expected a number from 0 to 1"):
            read(row, "row 1")


def test_published_datasets_with_more_columns_keep_their_meaning():
    assert shape_of({"prompt": "p", "prompt_id": "x", "messages": []}) is Shape.MESSAGES
    assert shape_of({"prompt": "p", "chosen": [], "rejected": [], "messages": []}) is Shape.PREFERENCE
    assert shape_of({"prompt": "p", "completions": [], "labels": []}) is Shape.STEPS
    with pytest.raises(HoneError, match="question, reply are no shape"):
        shape_of({"question": "", "reply": ""})
    with pytest.raises(HoneError, match="no shape"):
        shape_of({})


def test_text_trains_every_token_and_ends_with_eos():
    (rollout,) = only(GOLD[Shape.TEXT])
    assert list(rollout.tokens) == [*TOK.encode("hello"), TOK.eos_id]
    assert all(rollout.mask)


def test_text_that_spells_a_special_token_does_not_become_one():
    (rollout,) = only({"text": "a<eos>b"})
    assert list(rollout.tokens).count(TOK.eos_id) == 1


def test_completion_and_messages_train_what_the_assistant_writes():
    assert written(only(GOLD[Shape.COMPLETION])[0]) == " good<eos>"
    assert written(only(GOLD[Shape.MESSAGES])[0]) == "good<eos>"
    assert written(only({"prompt": [USER], "completion": [GOOD]})[0]) == "good<eos>"


def test_preference_is_chosen_then_rejected_with_the_margin_on_both():
    chosen, rejected = only(GOLD[Shape.PREFERENCE])
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
    assert only({**GOLD[Shape.LABELLED], "label": label})[0].label == value


def test_step_labels_sit_on_the_last_token_of_each_step():
    (rollout,) = only(GOLD[Shape.STEPS])
    at = {i: x for i, x in enumerate(rollout.step_label) if not math.isnan(x)}
    assert list(at.values()) == [1.0, 0.0]
    assert [TOK.decode(rollout.tokens[: i + 1]) for i in at] == ["hione\n", "hione\ntwo\n"]
    assert max(at) == len(rollout.tokens) - 1
    assert written(rollout) == rollout.text == "one\ntwo\n"


def test_trl_names_for_steps_mean_the_same_and_the_separator_is_not_doubled():
    ours = steps_row(GOLD[Shape.STEPS], TOK)
    theirs = steps_row({"prompt": "hi", "completions": ["one\n", "two"], "labels": [True, False]}, TOK)
    assert theirs.tokens == ours.tokens
    assert repr(theirs.step_label) == repr(ours.step_label)
    assert steps_row(GOLD[Shape.STEPS], TOK, separator="").text == "onetwo"
    soft = steps_row({**GOLD[Shape.STEPS], "step_labels": [0.25, 1.0]}, TOK)
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
    (Shape.TEXT, {"text": ""}, '"text" is empty'),
    (Shape.TEXT, {"text": None}, '"text" is null'),
    (Shape.TEXT, {"text": 5}, "int '5', expected text"),
    (Shape.TEXT, {"text": "\ud800"}, "surrogate"),
    (Shape.COMPLETION, {"completion": ""}, '"completion" is empty'),
    (Shape.COMPLETION, {"completion": None}, '"completion" is null'),
    (Shape.COMPLETION, {"prompt": ""}, '"prompt" is empty'),
    (Shape.COMPLETION, {"prompt": 3}, "expected text or a list of messages"),
    (Shape.COMPLETION, {"prompt": [USER], "completion": [USER]}, "no assistant"),
    (Shape.COMPLETION, {"prompt": [USER], "completion": ["x"]}, "message 1"),
    (Shape.MESSAGES, {"messages": []}, '"messages" is empty'),
    (Shape.MESSAGES, {"messages": "hi"}, "a list of messages"),
    (Shape.MESSAGES, {"messages": [USER]}, "no assistant"),
    (Shape.MESSAGES, {"messages": {"role": "user"}}, "list of messages"),
    (Shape.PREFERENCE, {"rejected": None}, '"rejected" is null'),
    (Shape.PREFERENCE, {"rejected": " good"}, "the same"),
    (Shape.PREFERENCE, {"margin": "big"}, '"margin" is str'),
    (Shape.PREFERENCE, {"margin": math.inf}, "finite"),
    (Shape.LABELLED, {"label": None}, '"label" is null'),
    (Shape.LABELLED, {"label": "true"}, '"label" is str'),
    (Shape.LABELLED, {"label": 0.5}, "true or false"),
    (Shape.LABELLED, {"label": -1}, "from 0 to 1"),
    (Shape.LABELLED, {"label": math.nan}, "from 0 to 1"),
    (Shape.STEPS, {"steps": []}, '"steps" is empty'),
    (Shape.STEPS, {"steps": ["one"]}, '1 "steps" but 2 "step_labels"'),
    (Shape.STEPS, {"steps": ["one", ""]}, "text in every step"),
    (Shape.STEPS, {"steps": ["one", None]}, "text in every step"),
    (Shape.STEPS, {"steps": "ab"}, "expected a list"),
    (Shape.STEPS, {"step_labels": [1, None]}, '"step_labels" is NoneType'),
    (Shape.STEPS, {"step_labels": [1, 2]}, "from 0 to 1"),
    (Shape.TASK, {"prompt": None}, '"prompt" is null'),
    (Shape.TASK, {"prompt": []}, '"prompt" is empty'),
    (Shape.TASK, {"prompt": [GOOD]}, "ends with an assistant"),
    (Shape.TASK, {"answer": None}, '"answer" is null'),
    (Shape.TASK, {"answer": ["a"]}, '"answer" is list'),
    (Shape.TASK, {"answer": True}, '"answer" is bool'),
    (Shape.TASK, {"answer": math.nan}, "finite"),
]


@each(("shape", "change", "says"), WRONG)
def test_a_bad_row_is_named_by_file_number_and_column(shape, change, says):
    rows = [GOLD[shape], GOLD[shape], {**GOLD[shape], **change}]
    with pytest.raises(HoneError) as caught:
        tasks(rows, name="x.jsonl") if shape is Shape.TASK else to_groups(rows, TOK, name="x.jsonl")
    message = str(caught.value)
    assert message.startswith("x.jsonl row 3: ")
    assert says in message
    assert "\n" not in message


@each("shape", [s for s in Shape if s not in (Shape.TASK, Shape.TEXT)])
def test_a_missing_column_is_named(shape):
    for column in GOLD[shape].keys() - {"margin"}:
        row = {k: v for k, v in GOLD[shape].items() if k != column}
        given = shape if shape is Shape.SCORED else None  # which nothing but its reader tells
        with pytest.raises(HoneError, match=r"x\.jsonl row 2: .*missing"):
            to_groups([GOLD[shape], row], TOK, name="x.jsonl", shape=given)


def test_rows_of_two_shapes_in_one_dataset_are_refused():
    with pytest.raises(HoneError, match="dataset row 2: it has the columns"):
        to_groups([GOLD[Shape.COMPLETION], GOLD[Shape.LABELLED]], TOK)
    forced = to_groups([GOLD[Shape.COMPLETION], GOLD[Shape.LABELLED]], TOK, shape=Shape.COMPLETION)
    assert len(forced.groups) == 2


def test_prompts_alone_cannot_be_trained_on_and_no_rows_neither():
    with pytest.raises(HoneError, match="nothing to train on"):
        to_groups([GOLD[Shape.TASK]], TOK)
    with pytest.raises(HoneError, match="has no rows"):
        to_groups([], TOK)


LONG = {"prompt": "hi", "completion": " good good good good"}


def test_long_rows_are_an_error_unless_told_otherwise():
    n = len(only(LONG)[0].tokens)
    rows = [GOLD[Shape.COMPLETION], LONG]
    assert len(to_groups(rows, TOK, max_tokens=n).groups) == 2
    with pytest.raises(HoneError, match=f"x row 2 has {n} tokens, the limit is {n - 1}"):
        to_groups(rows, TOK, name="x", max_tokens=n - 1)


def test_dropped_and_truncated_rows_are_counted_and_marked():
    whole = only(LONG)[0]
    rows, limit = [GOLD[Shape.COMPLETION], LONG], len(whole.tokens) - 1
    dropped = to_groups(rows, TOK, max_tokens=limit, overlong="drop")
    assert (len(dropped.groups), dropped.dropped, dropped.truncated) == (1, 1, 0)
    cut = to_groups(rows, TOK, max_tokens=limit, overlong="truncate")
    assert (len(cut.groups), cut.dropped, cut.truncated) == (2, 0, 1)
    (short,) = cut.groups[1]
    assert list(short.tokens) == list(whole.tokens)[:limit]
    assert TOK.eos_id not in short.tokens  # a cut row must not claim to be finished
    assert short.stop is Stop.LENGTH
    assert cut.groups[0][0].stop is Stop.TOKEN


def test_truncation_that_leaves_nothing_to_train_on_drops_the_row_and_its_pair():
    long_prompt = {"prompt": "hello " * 20, "chosen": " good", "rejected": " bad"}
    pair = {"prompt": "hi", "chosen": " good", "rejected": " bad"}
    result = to_groups([pair, long_prompt], TOK, max_tokens=8, overlong="truncate")
    assert (len(result.groups), result.dropped, result.truncated) == (1, 1, 0)
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
        (rollout,) = to_groups([{**row, "tools": tools}], tokenizer).groups[0]
        assert '"name": "add"' in tokenizer.decode(rollout.tokens)
        assert written(rollout) == "good<eos>"
        (plain,) = to_groups([{**row, "tools": []}], tokenizer).groups[0]
        assert plain == to_groups([row], TOK).groups[0][0]
    with pytest.raises(HoneError, match="tools is text that is not JSON"):
        to_groups([{"messages": [USER, GOOD], "tools": "add"}], tokenizer)
