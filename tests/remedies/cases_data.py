"""Rows and files that are refused, and what each message asks for."""

import json
import os
from functools import lru_cache
from pathlib import Path

from remedy_world import World, call, prepared, rows

LONG = "7" * 90
PAIR = {"prompt": "a", "chosen": "b", "rejected": "c"}
DIALOGUE = {"chosen": "Human: a\n\nAssistant: b", "rejected": "Human: a\n\nAssistant: c"}
BROKEN = '{"prompt": "a", "completion": "b"}\n{"prompt": "a", "completion": "b"\n'
SKIPPED = "read.skip_bad=true leaves such rows out"
USER, BOT = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}

DATA = [
    rows("sft", {"prompt": "1", "completion": LONG}, "read.overlong=truncate", "read.overlong=truncate cuts them"),
    rows(
        "sft",
        [{"prompt": "1", "completion": LONG}, {"prompt": "1", "completion": "2"}],
        "read.overlong=drop",
        "read.overlong=drop leaves such rows out",
    ),
    *(
        rows("sft", [{"prompt": "1", "completion": "2"}, bad], "read.skip_bad=true", SKIPPED)
        for bad in (
            {"prompt": "1", "completion": None},
            {"prompt": "1", "completion": ""},
            {"prompt": "1", "completion": 3},
            {"prompt": "1", "reply": "2"},  # other names would be wrong for the row before
            {"question": "1", "reply": "2"},
        )
    ),
    rows(
        "sft", {"q": "1", "a": "2"}, "read.columns.prompt=q read.columns.completion=a", "as with read.columns.prompt=q"
    ),
    rows("ppo", [{"prompt": "1"}, {"prompt": None}], "read.skip_bad=true", SKIPPED),
    rows("dpo", [PAIR, {**PAIR, "rejected": PAIR["chosen"]}], "read.skip_bad=true", SKIPPED),
    rows("dpo", [DIALOGUE, {**DIALOGUE, "rejected": "Human: a\n\nAssistant: "}], "read.skip_bad=true", SKIPPED),
    call(
        lambda w: prepared(w, "sft", "data=" + w.file(BROKEN, ".jsonl")),
        lambda w: prepared(w, "sft", "data=" + w.file(BROKEN, ".jsonl"), "read.skip_bad=true"),
        SKIPPED,
    ),
    rows(
        "sft",
        {"question": "1", "answer": "2"},
        "read.columns.prompt=question read.columns.completion=answer",
        "as with read.columns.prompt=question",
    ),
    rows(
        "sft", {"prompt": "1", "answer": "2"}, "read.columns.completion=answer", "as in read.columns.completion=answer"
    ),
    rows(
        "grpo", {"question": "1", "answer": "2"}, "read.columns.prompt=question", "as with read.columns.prompt=question"
    ),
    rows(
        "dpo",
        {"prompt": "a", "chosen": "b", "worse": "c"},
        "read.columns.rejected=worse",
        "as with read.columns.rejected=worse",
    ),
    rows(
        "kto",
        [{"prompt": "a", "completion": "b", "good": True}] * 2,
        [{"prompt": "a", "completion": "b", "label": True}] * 2,
        "add label",
    ),
    rows("pretrain", {"prompt": "a", "completion": "b", "body": "c"}, {"text": "a"}, "add text"),
    rows("sft", {"prompt": None, "completion": "b"}, {"prompt": "a", "completion": "b"}, "fill it or remove the row"),
    rows("sft", {"prompt": "", "completion": "b"}, {"prompt": "a", "completion": "b"}, "is empty: fill it"),
    rows(
        "sft",
        {"prompt": 3, "completion": "b"},
        {"prompt": "3", "completion": "b"},
        "expected text or a list of messages",
    ),
    rows(
        "dpo",
        {"prompt": "a", "chosen": "b", "rejected": "b"},
        {"prompt": "a", "chosen": "b", "rejected": "c"},
        "are the same",
    ),
    rows(
        "dpo",
        {"chosen": [USER, BOT], "rejected": [BOT, USER]},
        {"prompt": "a", "chosen": "b", "rejected": "c"},
        "begin both with the same",
    ),
    rows(
        "dpo",
        {"prompt": [BOT], "chosen": [USER, BOT], "rejected": [USER, USER]},
        {"prompt": "a", "chosen": "b", "rejected": "c"},
        "remove one of them",
    ),
    rows(
        "process_reward_model",
        {"prompt": "a", "steps": ["b"], "step_labels": []},
        {"prompt": "a", "steps": ["b"], "step_labels": [1]},
        "is empty",
    ),
    rows(
        "process_reward_model",
        {"prompt": "a", "steps": ["b"], "step_labels": [1, 0]},
        {"prompt": "a", "steps": ["b"], "step_labels": [1]},
        "give one label a step",
    ),
    rows(
        "grpo", {"messages": [BOT]}, {"messages": [USER, BOT]}, "begin it with one of the user", "model.path=WORLD/chat"
    ),
    rows(
        "sft",
        {"messages": [USER]},
        {"messages": [USER, BOT]},
        "add one with the role assistant",
        "model.path=WORLD/chat",
    ),
    rows(
        "sft",
        {"messages": [USER, {"role": "assistant", "content": ""}]},
        {"messages": [USER, BOT]},
        "remove it or fill it",
        "model.path=WORLD/chat",
    ),
    rows(
        "sft",
        {"messages": [USER, {"content": "x"}]},
        {"messages": [USER, BOT]},
        "every message needs role and content",
        "model.path=WORLD/chat",
    ),
    rows("sft", {"messages": [USER, BOT]}, {"prompt": "a", "completion": "b"}, "write the rows as text"),
    rows("sft", {"messages": [USER, BOT]}, "model.path=WORLD/chat", "or use a model with a chat template"),
    rows(
        "grpo",
        {"prompt": [USER, BOT]},
        {"prompt": [USER]},
        "end it with the message to be answered",
        "model.path=WORLD/chat",
    ),
    rows("sft", {"prompt": "a", "completion": [BOT]}, {"prompt": "a", "completion": "b"}, "give both in the same form"),
    rows(
        "sft",
        {"instruction": "a", "output": "b", "history": [["c", "d"]]},
        {"instruction": "a", "output": "b"},
        'write the turns of the chat as "messages"',
    ),
    rows(
        "sft",
        {"conversations": [{"from": "alien", "value": "x"}]},
        {"conversations": [{"from": "human", "value": "x"}, {"from": "gpt", "value": "y"}]},
        "expected one of human",
        "model.path=WORLD/chat",
    ),
    call(
        lambda w: prepared(w, "sft", f"data={w.folder}"),
        lambda w: prepared(w, "sft", f"data={w.folder}/answers*.jsonl"),
        "name its files, as in",
    ),
    call(
        lambda w: prepared(w, "sft", f"data={w / 'none*.jsonl'}"),
        lambda w: prepared(w, "sft", f"data={w / 'ans*.jsonl'}"),
        "check the pattern",
    ),
    call(
        lambda w: prepared(w, "sft", "data=math5000"),
        lambda w: prepared(w, "sft", f"data={w / 'answers.jsonl'}"),
        "did you mean math500",
    ),
    call(
        lambda w: prepared(w, "sft", f"data={w / 'answers.jsonl'}[2:4]"),
        lambda w: prepared(w, "sft", f"data={w / 'answers.jsonl'}[:4]"),
        "[:N], with N of 1 or more",
    ),
    call(
        lambda w: prepared(w, "sft", f"data={w / 'answers.jsonl'}*0.5+{w / 'answers.jsonl'}"),
        lambda w: prepared(w, "sft", f"data={w / 'answers.jsonl'}*0.5+{w / 'answers.jsonl'}*0.5"),
        "write FILE*WEIGHT for each",
    ),
    call(
        lambda w: prepared(w, "sft", f"data={w.file('a;b', '.csv')}"),
        lambda w: prepared(w, "sft", f"data={w.file('prompt,completion' + chr(10) + 'a,b', '.csv')}"),
        "save it with a comma between fields",
    ),
    call(
        lambda w: prepared(
            w, "sft", f"data={w.file('prompt' + chr(9) + 'completion' + chr(10) + 'a' + chr(9) + 'b', '.csv')}"
        ),
        lambda w: prepared(
            w, "sft", f"data={w.file('prompt' + chr(9) + 'completion' + chr(10) + 'a' + chr(9) + 'b', '.tsv')}"
        ),
        "rename the file to .tsv",
    ),
    call(
        lambda w: prepared(w, "sft", f"data={w.file('{}', '.json')}"),
        lambda w: prepared(
            w, "sft", f"data={w.file('[' + json.dumps({'prompt': 'a', 'completion': 'b'}) + ']', '.json')}"
        ),
        "write a list of objects",
    ),
    call(
        lambda w: prepared(w, "sft", f"data={w.file('x', '.xlsx')}"),
        lambda w: prepared(w, "sft", f"data={w / 'answers.jsonl'}"),
        "convert it to JSON lines",
    ),
    call(
        lambda w: prepared(w, "sft", f"data={w.file('', '.jsonl')}"),
        lambda w: prepared(w, "sft", f"data={w / 'answers.jsonl'}"),
        "it needs at least one row",
    ),
    call(
        lambda w: prepared(w, "pretrain", f"data={w.file(('word ' * 20 + chr(10)) * 90_000, '.txt')}"),
        lambda w: prepared(w, "pretrain", f"data={w.file(('word ' * 4 + chr(10)) * 300, '.txt')}", "read.chunk=20"),
        "set read.chunk=2000",
    ),
    call(
        lambda w: prepared(w, "sft", data=[3]),
        lambda w: prepared(w, "sft", data=[{"prompt": "a", "completion": "b"}]),
        "write each row as {column: value}",
    ),
    call(
        lambda w: prepared(w, "sft", f"data={_pipe(w)}"),
        lambda w: prepared(w, "sft", f"data={w / 'answers.jsonl'}"),
        "save the rows in a file",
    ),
    call(
        lambda w: prepared(w, "sft", "data=" + w.file('{"prompt": "a", "prompt": "b"}', ".jsonl")),
        lambda w: prepared(w, "sft", "data=" + w.file('{"prompt": "a", "completion": "b"}', ".jsonl")),
        "twice: remove one",
    ),
    call(
        lambda w: prepared(w, "sft", f"data=hf:{_hub_folder(w)}:x"),
        lambda w: prepared(w, "sft", f"data=hf:{_hub_folder(w)}:train"),
        ":train",
    ),
    call(
        lambda w: prepared(w, "sft", "data=some/rows"),
        lambda w: prepared(w, "sft", f"data=hf:{_hub_folder(w)}:train"),
        "write hf:some/rows:train",
    ),
    call(
        lambda w: prepared(w, "sft", "data=seed_tasks:none"),
        lambda w: prepared(w, "sft", f"data={w / 'answers.jsonl'}"),
        "use seed_tasks:all",
    ),
    call(
        lambda w: prepared(w, "sft", "data=gym:"),
        lambda w: prepared(w, "sft", f"data={w / 'answers.jsonl'}"),
        "write gym:NAME",
    ),
]


def _pipe(world: World) -> str:
    path = world.new(".jsonl")
    os.mkfifo(path)
    return path


@lru_cache(maxsize=1)
def _hub_folder(world: World) -> str:
    """A dataset as `datasets` finds it on a disk."""
    folder = Path(world.new())
    folder.mkdir()
    (folder / "train.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    return str(folder)
