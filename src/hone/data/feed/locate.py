"""Where the data is that a recipe names: files, patterns, known datasets, the Hub, rows in memory, mixes of them."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import partial
from glob import glob, has_magic
from pathlib import Path
from typing import Any, Literal

from hone.data.feed import registry
from hone.data.feed.files import JSON_COLUMNS, READERS, File
from hone.data.feed.row_store import FirstRows, Hub, Memory, RowStore
from hone.data.feed.stream import BUFFER
from hone.data.rows.columns import Row, RowKind, as_prompt, rename_columns, to_hone_columns
from hone.data.rows.convert import Overlong
from hone.data.rows.pairs import Use
from hone.data.text.chat import ChatRows
from hone.errors import HoneError
from hone.types import Task

WEIGHT = re.compile(r"^(.+?)\*(\d+(?:\.\d+)?(?:e-?\d+)?)$")
SLICE = re.compile(r"^(.+)\[(?::(\d+)|[^\[\]]*:[^\[\]]*)\]$")  # the number of a [:N]; none in any other slice
HUB_NAME = re.compile(r"([\w-][\w.-]*/[\w.-]+(?:/[\w.-]+)?)(?::([\w.+-]+))?$", re.ASCII)  # owner/name[/config][:split]
GYM_SIZE = 1000  # problems, unless told otherwise
Data = str | Sequence[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """How data is read; `chat`: questions of instruction datasets become messages."""

    skip_bad: bool = False
    overlong: Overlong = "error"
    stream: Literal["auto", "always", "never"] = "auto"
    buffer: int = BUFFER
    chunk: int = 0
    chat: bool = False
    turns: ChatRows = "joined"
    shares: bool = False  # scores are from 0 to 1
    kinds: tuple[RowKind, ...] = ()  # that `reader`, an algorithm, can use; none: any
    pairs: Use = "pairs"  # what the reader makes of a preference pair
    settings: bool = True  # whoever reads the errors can give settings, as read.overlong=drop
    reader: str = "training"
    columns: Mapping[str, str] = field(default_factory=dict[str, str])  # Hone's names to those of files and rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    """One dataset of a mix, or the only one."""

    name: str
    stores: tuple[RowStore, ...]
    weight: float | None = None


def locate(data: Data, how: Reading) -> list[Dataset]:
    """The datasets that `data` names: "a.jsonl", "part-*.parquet", "gsm8k:train", "gym:chain_sum",
    "hf:owner/name:split", several joined with + or mixed as "a.jsonl*0.7+b.jsonl*0.3", each with [:N] for its first N
    rows; in Python rows, or a list of (data, weight)."""
    if not isinstance(data, str):
        return _mixture(data, how) if _is_mixture(data) else [Dataset(name="data", stores=(_memory(data, how),))]
    if "+" not in data or Path(data).is_file():
        return [_dataset(data, how)]
    parts = [_dataset(text.strip(), how) for text in data.split("+")]
    if len({part.weight is None for part in parts}) > 1:
        raise HoneError(f"data={data}: some parts have a weight and some have none: write FILE*WEIGHT for each")
    if parts[0].weight is not None:
        return parts
    return [Dataset(name=data, stores=tuple(store for part in parts for store in part.stores))]


def _is_mixture(data: Sequence[Any]) -> bool:
    return bool(data) and all(
        isinstance(item, tuple | list) and len(item) == 2 and isinstance(item[1], int | float) for item in data
    )


def _mixture(data: Sequence[Any], how: Reading) -> list[Dataset]:
    """A list of (data, weight)."""
    parts = list[Dataset]()
    for n, (inner, weight) in enumerate(data, start=1):
        name = inner if isinstance(inner, str) else f"data {n}"
        found = locate(inner, how)
        if any(part.weight is not None for part in found):
            raise HoneError(f"{name} has weights inside a list of weights: give each of its parts one in that list")
        stores = [store for part in found for store in part.stores]
        parts.append(Dataset(name=name, stores=tuple(stores), weight=weight))
    return parts


def _dataset(text: str, how: Reading) -> Dataset:
    found = None if Path(text).is_file() else WEIGHT.match(text)
    name, weight = (found[1], float(found[2])) if found else (text, None)
    return Dataset(name=name, stores=tuple(_sliced(name, how)), weight=weight)


def _sliced(name: str, how: Reading) -> list[RowStore]:
    """The stores of `name`, or of "name[:N]" the first N rows; the Hub cuts its splits itself."""
    found = None if name.startswith("hf:") or Path(name).is_file() else SLICE.match(name)
    if found is None:
        return _stores(name, how)
    whole, most = found[1], int(found[2]) if found[2] else 0
    if not most:
        raise HoneError(f"{name}: only the first rows can be taken: write {whole}[:N], with N of 1 or more")
    stores, whole_stores = list[RowStore](), _stores(whole, how)
    for store in whole_stores:
        part = FirstRows(place=store.place, most=most)
        stores.append(replace(store, place=part))
        most -= part.count() if len(whole_stores) > 1 else 0
        if not most:
            break
    return stores


def _stores(name: str, how: Reading) -> list[RowStore]:
    if name.startswith("hf:"):
        return [RowStore(place=_hub(name), translate=partial(_to_hone_columns, how=how))]
    for store in (_find_gym(name, chat=how.chat), registry.find(name, chat=how.chat, chunk=how.chunk)):
        if store is not None:
            return [store]
    paths = [Path(name)]
    if has_magic(name) and not paths[0].is_file():
        paths = [Path(found) for found in sorted(glob(name, recursive=True))]
        if not paths:
            raise HoneError(f"no file matches {name}: check the pattern")
    elif File(path=paths[0]).form not in READERS and not paths[0].exists():
        raise HoneError(_unknown(name))
    values = JSON_COLUMNS | {theirs for name, theirs in how.columns.items() if name in JSON_COLUMNS}
    files = [File(path=path, chunk=how.chunk, values=values) for path in paths]
    return [RowStore(place=file, translate=partial(_to_hone_columns, how=how)) for file in files]


def _unknown(name: str) -> str:
    """What to write instead of a name that is no file and no known dataset."""
    if found := HUB_NAME.match(name):
        split = found[2] or "train"
        return f"{name} is no file: of the Hub's dataset of this name write hf:{found[1]}:{split}, else check the path"
    if near := get_close_matches(name.partition(":")[0], registry.DATASETS, n=1):
        return f"{name} is no file and no known dataset: did you mean {near[0]}? Else check the path"
    known = ", ".join(registry.DATASETS)
    hub = "or write hf:OWNER/NAME:SPLIT for one of the Hub"
    return f"{name} is no file, and no dataset of that name is known ({known}): check the path, {hub}"


def _hub(name: str) -> Hub:
    """hf:owner/name[/config][:split]; a local folder may stand for owner/name."""
    path, _, split = name.removeprefix("hf:").partition(":")
    config, (above, _, last) = None, path.rpartition("/")
    if not Path(path).is_dir() and (path.count("/") == 2 or Path(above).is_dir()):
        path, config = above, last
    return Hub(path=path, config=config or None, split=split or "train")


def _memory(data: Sequence[Any], how: Reading) -> RowStore:
    for n, row in enumerate(data, start=1):
        if not isinstance(row, Mapping | Task):
            raise HoneError(f"data row {n} is {type(row).__name__}: write each row as {{column: value}} or a hone.Task")
    rows = [_row(row) if isinstance(row, Task) else row for row in data]
    if any(isinstance(row, Task) for row in data):
        how = replace(how, columns={})  # a Task says what is what
    return RowStore(place=Memory(rows=rows), translate=partial(_to_hone_columns, how=how))


def _row(task: Task) -> dict[str, Any]:
    """A Task written in Python passes the same checks as a row of a file."""
    given = {"prompt": task.prompt, "answer": task.answer, "id": task.id or None}
    return {**task.extra, **{name: value for name, value in given.items() if value is not None}}


def _to_hone_columns(row: Row, *, how: Reading) -> tuple[list[Row], str]:
    made, written = to_hone_columns(rename_columns(row, how.columns) if how.columns else row, chat=how.chat)
    return [made], written


# --- problems that the package reasoning-gym makes: gym:NAME, gym:NAME:SIZE or gym:NAME:SIZE:SEED ---


def _find_gym(spec: str, *, chat: bool) -> RowStore | None:
    """The store of `gym:NAME`, or None of any other name."""
    kind, _, rest = spec.partition(":")
    if kind != "gym":
        return None
    name, *numbers = rest.split(":")
    if not name or len(numbers) > 2 or not all(n.isdecimal() and len(n) < 10 for n in numbers):
        raise HoneError(f"{spec} is not understood: write gym:NAME, gym:NAME:SIZE or gym:NAME:SIZE:SEED")
    size, seed = [*map(int, numbers), *(GYM_SIZE, 0)[len(numbers) :]]
    rows = [_gym_row(name, item, chat=chat) for item in make_problems(name, size, seed)]
    return RowStore(place=Memory(rows=rows, name=spec))


def make_problems(name: str, size: int, seed: int) -> list[Any]:
    """So many problems, the same ones for the same seed."""
    try:
        import reasoning_gym  # pyright: ignore[reportMissingImports]
        from reasoning_gym.factory import DATASETS  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise HoneError(f'gym:{name} needs the package reasoning-gym: pip install "hone[gym]"') from error
    if name not in DATASETS:
        near = ", ".join(sorted(known for known in DATASETS if known[:3] == name[:3])) or "chain_sum, countdown, ..."
        raise HoneError(f"reasoning-gym has no dataset {name!r}: use one of its {len(DATASETS)}, as in {near}")
    if size < 1:
        raise HoneError(f"gym:{name}:{size} has no problems: give a size of 1 or more")
    try:
        return list(reasoning_gym.create_dataset(name, size=size, seed=seed))
    except (AssertionError, ValueError) as error:  # "composite" is made of others, which it has to be told
        raise HoneError(f"reasoning-gym cannot make {name} by its name alone ({error}): use another dataset") from error


def _gym_row(name: str, item: Any, *, chat: bool) -> Row:
    answer = item["answer"]
    whole = {"gym": name, "question": item["question"], "metadata": item["metadata"]}
    return {
        "prompt": as_prompt(item["question"], chat=chat),
        **({} if answer is None else {"answer": str(answer)}),
        **whole,
    }
