"""Problems that the package reasoning-gym makes: `gym:NAME`, `gym:NAME:SIZE` or `gym:NAME:SIZE:SEED`."""

from typing import Any

from hone.data.feed.row_store import Memory, Shelf
from hone.data.rows.columns import Row, asked
from hone.errors import HoneError

SIZE = 1000  # problems, unless told otherwise


def find(spec: str, *, chat: bool) -> Shelf | None:
    """The shelf of `gym:NAME`, or None of any other name."""
    kind, _, rest = spec.partition(":")
    if kind != "gym":
        return None
    name, *numbers = rest.split(":")
    if not name or len(numbers) > 2 or not all(n.isdecimal() and len(n) < 10 for n in numbers):
        raise HoneError(f"{spec} is not understood: write gym:NAME, gym:NAME:SIZE or gym:NAME:SIZE:SEED")
    size, seed = [*map(int, numbers), *(SIZE, 0)[len(numbers) :]]
    return Shelf(place=Memory(rows=[_row(name, item, chat=chat) for item in made(name, size, seed)], name=spec))


def made(name: str, size: int, seed: int) -> list[Any]:
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


def _row(name: str, item: Any, *, chat: bool) -> Row:
    answer = item["answer"]
    whole = {"gym": name, "question": item["question"], "metadata": item["metadata"]}
    return {
        "prompt": asked(item["question"], chat=chat),
        **({} if answer is None else {"answer": str(answer)}),
        **whole,
    }
