"""Datasets by name: `gsm8k:train` is read from the folder that HONE_DATA names, or from the Hub.

An entry says which files there are and how a row becomes a training row. One row serves every use: reinforcement
learning reads its `prompt` and `answer`, supervised learning its `prompt` and `completion`.
"""

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from hone.data.feed.files import File
from hone.data.feed.row_store import Hub, RowStore
from hone.data.rows.columns import Row, as_completion, as_prompt, to_hone_columns
from hone.data.rows.pairs import SIDES
from hone.errors import HoneError

FOLDER = "HONE_DATA"
Make = Callable[..., list[Row]]  # (row, chat) -> the rows it becomes; none where it is left out


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """Where a dataset lies, and how it is read."""

    files: Mapping[str, str]  # split -> file below the dataset's folder; the first is the default
    make: Make
    hub: str = ""  # owner/name or owner/name/config
    splits: Mapping[str, str] | None = None  # split -> the Hub's name for it, where it is another
    kind: str = ""  # how the file is read, where its suffix does not say
    leaves_out: str = ""  # which rows are known to be no use


def answer_of_gsm8k(solution: str) -> str:
    """What stands after ####, without the commas of thousands.

    >>> answer_of_gsm8k("so 1000 + 234\\n#### 1,234")
    '1234'
    """
    _, mark, answer = solution.rpartition("####")
    if not mark or not answer.strip():
        raise HoneError("the solution has no answer after ####: write it there, or remove the row")
    return answer.strip().replace(",", "")


def _gsm8k(row: Row, *, chat: bool) -> list[Row]:
    """The worked solution is the completion; its calculator notes <<48/2=24>> are not text a model should write."""
    solution = re.sub(r"<<[^<>]*>>", "", row["answer"])
    return [_problem(row["question"], solution, answer_of_gsm8k(row["answer"]), chat=chat)]


def _problem(question: str, solution: str, answer: str, *, chat: bool, **rest: Any) -> Row:
    completion = as_completion(solution, chat=chat)
    return {"prompt": as_prompt(question.strip(), chat=chat), "completion": completion, "answer": answer, **rest}


def _math500(row: Row, *, chat: bool) -> list[Row]:
    rest = {"subject": row["subject"], "level": row["level"], "id": row["unique_id"]}
    return [_problem(row["problem"], row["solution"], row["answer"], chat=chat, **rest)]


def _svamp(row: Row, *, chat: bool) -> list[Row]:
    """Body and question make the prompt, the equation the completion."""
    body = row["Body"].strip()
    body += "" if body[-1] in ".?!" else "."
    value = float(row["Answer"])
    answer = str(int(value) if value.is_integer() else value)
    solution = f"{row['Equation']} = {answer}"
    return [_problem(f"{body} {row['Question'].strip()}", solution, answer, chat=chat, id=row["ID"])]


def _humaneval(row: Row, *, chat: bool) -> list[Row]:
    """The function's head is the prompt, plain: the body continues it. `test` and `entry_point` go to the verifier."""
    names = ("test", "entry_point")
    body = {"prompt": row["prompt"], "completion": row["canonical_solution"], "id": row["task_id"]}
    return [{**body, **{name: row[name] for name in names}}]


def _hh(row: Row, *, chat: bool) -> list[Row]:
    made, _ = to_hone_columns(row, chat=chat)
    replies = [made[side] if isinstance(made[side], str) else made[side][-1]["content"] for side in SIDES]
    return [made] if all(reply.strip() for reply in replies) else []


def _pairs(row: Row, *, chat: bool) -> list[Row]:
    made, _ = to_hone_columns(row, chat=chat)
    return [] if "chosen" in made and made["chosen"] == made["rejected"] else [made]


def _sst2(row: Row, *, chat: bool) -> list[Row]:
    """The sentence itself is in `sentence`, for judges of sentiment."""
    label, sentence = row["line"].split(" ", 1) if "line" in row else (str(row["label"]), row["sentence"])
    answer = {"0": "negative", "1": "positive"}[label]
    question = f"Is this review positive or negative?\n{sentence.strip()}"
    return [_problem(question, answer, answer, chat=chat, sentence=sentence.strip())]


def _seed_tasks(row: Row, *, chat: bool) -> list[Row]:
    shared = {"id": row["id"], "instruction": row["instruction"]}
    return [to_hone_columns({**shared, **instance}, chat=chat)[0] for instance in row["instances"]]


def _text(row: Row, *, chat: bool) -> list[Row]:
    return [row]


DATASETS: dict[str, Entry] = {
    "gsm8k": Entry(files={"train": "train.jsonl", "test": "test.jsonl"}, make=_gsm8k, hub="openai/gsm8k/main"),
    "math500": Entry(files={"test": "test.jsonl"}, make=_math500, hub="HuggingFaceH4/MATH-500"),
    "svamp": Entry(files={"all": "SVAMP.json"}, make=_svamp, hub="ChilleD/SVAMP", splits={"all": "train+test"}),
    "humaneval": Entry(files={"test": "HumanEval.jsonl.gz"}, make=_humaneval, hub="openai/openai_humaneval"),
    "hh_harmless": Entry(files={"test": "test.jsonl.gz"}, make=_hh, leaves_out="one reply is empty"),
    "instruct_pref": Entry(
        files={"pairs": "instruction-data-with-preference.json", "answers": "instruction-data.json"},
        make=_pairs,
        leaves_out="both replies are the same",
    ),
    "sst2": Entry(
        files={"train": "stsa.binary.train", "test": "stsa.binary.test"},
        make=_sst2,
        hub="stanfordnlp/sst2",
        kind="lines",
    ),
    "seed_tasks": Entry(files={"all": "seed_tasks.jsonl"}, make=_seed_tasks),
    "tinyshakespeare": Entry(files={"all": "input.txt"}, make=_text),
}


def find(spec: str, *, chat: bool, chunk: int = 0) -> RowStore | None:
    """The store of `name` or `name:split`, or None where no dataset has that name."""
    name, _, split = spec.partition(":")
    if name not in DATASETS:
        return None
    entry = DATASETS[name]
    split = split or next(iter(entry.files))
    if split not in entry.files:
        raise HoneError(f"{name} has no split {split!r}: use {' or '.join(f'{name}:{s}' for s in entry.files)}")
    folder = os.environ.get(FOLDER, "")
    path = Path(folder) / name / entry.files[split]
    translate = partial(_translate, entry=entry, chat=chat)
    if folder and path.is_file():
        return RowStore(place=File(path=path, kind=entry.kind, chunk=chunk), translate=translate)
    if not entry.hub:
        raise HoneError(f"{name} is read from a folder: set {FOLDER} to one that has {name}/{entry.files[split]}")
    owner, repository, *config = entry.hub.split("/")
    theirs = (entry.splits or {}).get(split, split)
    instead = f", or set {FOLDER} to a folder that has {name}/{entry.files[split]}"
    place = Hub(path=f"{owner}/{repository}", config=next(iter(config), None), split=theirs, instead=instead)
    return RowStore(place=place, translate=translate)


def _translate(row: Row, *, entry: Entry, chat: bool) -> tuple[list[Row], str]:
    try:
        made = entry.make(row, chat=chat)
    except (KeyError, TypeError, IndexError, ValueError) as error:
        raise HoneError(
            f"the row is not as this dataset's rows are ({type(error).__name__}: {error}): use the dataset's own file"
        ) from error
    return made, "" if made else entry.leaves_out
