"""D: files and rows that no run should read: pipes, devices, keys that stand twice, strange bytes and values."""

import atexit
import gzip
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

from benchmarks.trials.case import Case, hone

TITLE = "Files and rows that no run should read"
USER, BOT = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}
ALGOS = ("pretrain", "sft", "dpo", "kto", "reward_model", "process_reward_model", "grpo", "ppo")
ROWS: dict[str, dict[str, Any]] = {
    "text": {"text": "a b"},
    "completion": {"prompt": "a", "completion": "b"},
    "messages": {"messages": [USER, BOT]},
    "pairs": {"prompt": "a", "chosen": "b", "rejected": "c", "margin": 1.0},
    "dialogues": {"chosen": [USER, BOT], "rejected": [USER, {"role": "assistant", "content": "no"}]},
    "labelled": {"prompt": "a", "completion": "b", "label": True},
    "steps": {"prompt": "a", "steps": ["b", "c"], "step_labels": [1, 0]},
    "problem": {"prompt": "a", "answer": "b", "id": "1"},
    "alpaca": {"instruction": "a", "input": "b", "output": "c"},
    "sharegpt": {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
}
DEEP: Any = "x"
for _ in range(400):
    DEEP = [DEEP]
STRANGE: list[Any] = [
    None, True, 0, 1.5, 10**400, "", "\x00", "\ud800", [], [[]], [None], {}, {"a": None}, [{"role": "user"}], DEEP,
    [{"role": None, "content": "a"}], [{"role": "user", "content": 3}], [{"role": ["x"], "content": "a"}],
    [{"role": "assistant", "content": "a", "tool_calls": 3}], [{"from": {}, "value": 1}], [USER, "x"], ["one", 2],
    [{"from": "human", "value": "x"}, {"from": {"a": 1}, "value": ["y"]}], "\n\nHuman: a", {"x": {"y": [1, {"z": 2}]}},
]  # fmt: skip
LINES: dict[str, bytes] = {
    "a key twice": b'{"prompt": "a", "prompt": "b", "completion": "c"}',
    "another key twice": b'{"text": "a", "x": 1, "text": "b"}',
    "a key twice in a message": b'{"messages": [{"role": "user", "role": "assistant", "content": "x"}]}',
    "a key twice in extra columns": b'{"text": "a", "x": {"k": 1, "k": 2}}',
    "NaN": b'{"text": "a", "x": NaN}',
    "Infinity": b'{"text": "a", "x": Infinity}',
    "a number beyond all": b'{"text": "a", "x": 1e999}',
    "half of a surrogate pair": b'{"text": "a", "x": "\\ud83d"}',
    "UTF-16": '{"text": "a"}'.encode("utf-16"),
    "UTF-32": '{"text": "a"}'.encode("utf-32"),
    "Latin-1": '{"text": "é"}'.encode("latin-1"),
    "NUL bytes": b"\x00" * 64,
    "70 levels": b'{"text": "a", "x": ' + b"[" * 70 + b"]" * 70 + b"}",
    "100,000 levels": b"[" * 100_000,
    "100,000 objects": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "5,000 digits": b'{"text": "a", "x": ' + b"9" * 5000 + b"}",
    "a list": b"[1, 2]",
    "half an object": b'{"text": "a',
}


@cache
def folder() -> Path:
    made = tempfile.mkdtemp(prefix="inputs-")
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    return Path(made)


def fed(data: Any, algo: str) -> str | None:
    """What came out of reading all of the data, where that was no error for users; "" where nothing was refused."""
    from hone.algo import ALGORITHMS
    from hone.config.overrides import Choice
    from hone.config.recipe import Recipe
    from hone.data.text.tokenizer import train_bpe
    from hone.errors import HoneError
    from hone.launch import feeds

    try:
        made = ALGORITHMS[algo]()
        loaded = feeds.feed(Recipe(data=data, algo=Choice(algo)), made, train_bpe([], vocab_size=258), context=64)
        loaded.feed.take(1)
    except HoneError as error:
        return None if "\n" not in str(error) else "more than one line"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def refused(name: str, content: bytes, algo: str = "pretrain") -> str | None:
    """The file must be refused with an error for users."""
    path = folder() / name
    path.write_bytes(content)
    why = fed(str(path), algo)
    return "it was read" if why == "" else why


def strange(row: dict[str, Any], algo: str, form: str) -> str | None:
    """Whatever becomes of the row, no other error comes out than one for users."""
    if form == "memory":
        return fed([row], algo) or None
    path = folder() / f"strange{form}"
    path.write_text(json.dumps(row) + "\n" if form == ".jsonl" else json.dumps([row]))
    return fed(str(path), algo) or None


def no_file(make: Callable[[Path], None], suffix: str, words: tuple[str, ...]) -> str | None:
    """A run on it ends at once, in one line."""
    path = folder() / f"{make.__name__}{len(os.listdir(folder()))}{suffix}"
    make(path)
    return _one_line(*words, f"data={path}")


@cache
def _run_folder() -> Path:
    """A recipe and a tokenizer, for runs of a fresh model."""
    from hone.data.text.tokenizer import train_bpe

    train_bpe([], vocab_size=258).save(folder() / "tokenizer")
    (folder() / "r.py").write_text("from hone import Recipe\n\n\ndef recipe():\n    return Recipe()\n")
    return folder()


def pipe(path: Path) -> None:
    os.mkfifo(path)


def zeros(path: Path) -> None:
    path.symlink_to("/dev/zero")


def random_bytes(path: Path) -> None:
    path.symlink_to("/dev/urandom")


def subfolder(path: Path) -> None:
    path.mkdir()


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(2**40)


def bomb(path: Path) -> None:
    with gzip.open(path, "wb") as file:
        for _ in range(60):
            file.write(b'{"text": "a"}\n' * 200_000)


def many_aliases(path: Path) -> None:
    path.write_text("a0: &a0 {x: 1}\n" + "".join(f"a{i}: &a{i} {{x: *a{i - 1}, y: *a{i - 1}}}\n" for i in range(1, 40)))


def many_merges(path: Path) -> None:
    lines = [f"a{i}: &a{i} {{<<: [*a{i - 1}, *a{i - 1}]}}\n" for i in range(1, 40)]
    path.write_text("a0: &a0 {x: 1}\n" + "".join(lines))


def many_names(path: Path) -> None:
    path.write_text("".join(f"k{i}: 1\n" for i in range(60_000)))


def ends_the_program(path: Path) -> None:
    path.write_text("raise SystemExit\n")


def ends_when_called(path: Path) -> None:
    path.write_text("import sys\n\n\ndef recipe():\n    sys.exit(3)\n")


def as_settings(make: Callable[[Path], None]) -> str | None:
    path = folder() / f"{make.__name__}.yaml"
    make(path)
    return _one_line("run", "r.py", "--config", str(path), *RUN[2:])


def as_recipe(make: Callable[[Path], None]) -> str | None:
    path = folder() / f"{make.__name__}.py"
    make(path)
    return _one_line("run", str(path), *RUN[2:])


def among_recipes(make: Callable[[Path], None]) -> str | None:
    """`hone recipes NAME` is asked for what is no file of text."""
    (_run_folder() / "recipes").mkdir(exist_ok=True)
    make(_run_folder() / "recipes" / f"{make.__name__}.py")
    return _one_line("recipes", make.__name__)


def beyond(setting: str) -> str | None:
    return _one_line(*RUN, setting, says="it must be at most")


def _one_line(*words: str, says: str = "hone: error: ") -> str | None:
    """The command must end at once, in one line."""
    run = hone(*words, folder=_run_folder(), seconds=25)
    if run.returncode != 2 or len(run.stderr.splitlines()) != 1:
        return f"exit code {run.returncode}: {run.stderr[-120:]}"
    return None if "bug" not in run.stderr and says in run.stderr else run.stderr


HUGE = (
    "train.reward_memory=1e308", "train.threads=1000000000000000000", "lora.rank=1000000000000000000",
    "train.epochs=1000000000000000000", "train.prompts=1000000000000000000", "sample.group=1000000000000000000",
)  # fmt: skip
RUN = ("run", "r.py", "model.tokenizer=tokenizer", "out=run", "train.steps=1", "algo=pretrain")


def cases(quick: bool) -> Iterator[Case]:
    for name, line in LINES.items():
        yield Case("rows that are no rows", name, partial(refused, "rows.jsonl", line + b"\n"))
    whole = [(n, x) for n, x in LINES.items() if n not in ("a list", "half an object") and not n.startswith("100,000")]
    for name, line in whole[:: 4 if quick else 1]:
        yield Case("the same in a .json list", name, partial(refused, "rows.json", b"[" + line + b"]"))
    mutants = [
        (f"{kind}.{column} = {value!r:.40}", {**row, column: value}, ALGOS[(n + k) % len(ALGOS)])
        for n, (kind, row) in enumerate(ROWS.items())
        for column in row
        for k, value in enumerate(STRANGE)
    ]
    for n, (name, row, algo) in enumerate(mutants[:: 9 if quick else 1]):
        form = (".jsonl", ".json", "memory")[n % 3]
        yield Case("strange values in known columns", f"{algo} {form}: {name}", partial(strange, row, algo, form))
    things = [(pipe, ".jsonl"), (zeros, ".jsonl"), (bomb, ".jsonl.gz")]
    if not quick:
        things += [(make, suffix) for make in (pipe, zeros) for suffix in (".json", ".csv", ".txt", ".parquet")]
        things += [(random_bytes, ".jsonl"), (subfolder, ".jsonl"), (sparse, ".jsonl"), (sparse, ".csv")]
    for make, suffix in things:
        yield Case(
            "pipes, devices and files without an end", f"{make.__name__}{suffix}", partial(no_file, make, suffix, RUN)
        )
    group = "recipes and settings that no run should follow"
    for make in (many_aliases,) if quick else (many_aliases, many_merges, many_names, pipe, zeros, subfolder):
        yield Case(group, f"a settings file: {make.__name__}", partial(as_settings, make))
    for make in (ends_the_program, ends_when_called):
        yield Case(group, f"a recipe: {make.__name__}", partial(as_recipe, make))
    for make in (pipe,) if quick else (pipe, zeros, subfolder):
        yield Case(group, f"among the recipes: {make.__name__}", partial(among_recipes, make))
    for setting in HUGE[:1] if quick else HUGE:
        yield Case(group, setting, partial(beyond, setting))
