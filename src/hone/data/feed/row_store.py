"""Rows in order from any place: files, the Hub or memory. Where the Hub cannot be reached, its cache is read."""

import hashlib
import logging
import re
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol
from urllib.parse import urlsplit
from urllib.request import getproxies

from hone.data.feed.columnar import without_nulls
from hone.data.feed.files import START, Cursor, RowRead
from hone.data.rows.columns import Row
from hone.data.rows.parse import fault_in, too_long
from hone.errors import HoneError

CONNECT = 3.0  # seconds
OFFLINE = "HF_HUB_OFFLINE"


@contextmanager
def quiet_hub_client(*, local: bool = False) -> Iterator[str]:
    """Silence the Hub client's warnings of retries. Gives the Hub's host if it cannot be reached, else "".

    local: nothing will be asked of the Hub.
    """
    import datasets.config
    from huggingface_hub import constants

    host = "" if local or constants.HF_HUB_OFFLINE else _unreachable_host(str(constants.ENDPOINT))
    logger = logging.getLogger("huggingface_hub")
    level = logger.level
    logger.setLevel(logging.ERROR)
    # it has no setting for its five retries over half a minute; without a network it makes none where it is told so
    before = [_set(module, True) for module in (constants, datasets.config)] if host else []
    try:
        yield host
    finally:
        logger.setLevel(level)
        for module, value in zip((constants, datasets.config), before, strict=False):
            _set(module, value)


def _set(module: ModuleType, value: bool) -> bool:
    before = bool(getattr(module, OFFLINE))
    setattr(module, OFFLINE, value)
    return before


def _unreachable_host(endpoint: str) -> str:
    """The host if nothing answers there, else "". Behind a proxy this cannot be tried, so it is "" too."""
    parts = urlsplit(endpoint)
    host, port = parts.hostname or "", parts.port or (80 if parts.scheme == "http" else 443)
    if getproxies():
        return ""
    try:
        socket.create_connection((host, port), timeout=CONNECT).close()
    except OSError:
        return host
    return ""


# A row as it is written -> rows in Hone's columns and how it was written ("": in Hone's columns); or none, and why.
Translate = Callable[[Row], tuple[list[Row], str]]
HEAD = 200  # rows from which the number of rows of a large file is estimated


class Place(Protocol):
    """A file, a split of a Hub dataset, or a list."""

    @property
    def name(self) -> str: ...

    @property
    def unit(self) -> str: ...

    @property
    def size(self) -> int: ...

    @property
    def fingerprint(self) -> str: ...

    def count(self) -> int: ...

    def read(self, start: Cursor = START) -> Iterator[RowRead]: ...


def no_translation(row: Row) -> tuple[list[Row], str]:
    """Translates nothing."""
    return [row], ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowStore:
    """A place, and how its rows are turned into Hone's columns."""

    place: Place
    translate: Translate = no_translation

    def where(self, number: int) -> str:
        """A row's address in an error."""
        return f"{self.place.name} {self.place.unit} {number}"

    def estimate(self) -> int:
        """How many rows there are; where only reading all would tell, about how many, from the first ones."""
        if exact := self.place.count():
            return exact
        rows, end = 0, 0
        for read in self.place.read():
            rows, end = rows + 1, read.after[0]
            if rows == HEAD:
                return max(rows, rows * self.place.size // max(1, end))
        return rows


@dataclass(frozen=True, kw_only=True)
class FirstRows:
    """The first rows of a place, as many as `most`."""

    place: Place
    most: int

    @property
    def name(self) -> str:
        return self.place.name

    @property
    def unit(self) -> str:
        return self.place.unit

    @cached_property
    def _ends(self) -> tuple[int, int, int]:
        """How many rows there are, the last one's number, and the bytes (or rows) up to its end."""
        rows, number, end = 0, 0, 0
        for read in islice(self.place.read(), self.most):
            rows, number, end = rows + 1, read.number, read.after[0]
        return rows, number, end

    @property
    def size(self) -> int:
        """Bytes of these rows: by their share where rows are counted, else by where they end."""
        if whole := self.place.count():
            return self.place.size * self._ends[0] // whole
        return self._ends[2]

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(f"{self.place.fingerprint} first {self.most}".encode()).hexdigest()

    def count(self) -> int:
        """How many there are."""
        return self._ends[0]

    def read(self, start: Cursor = START) -> Iterator[RowRead]:
        """The rows from `start` on."""
        if start == START:
            yield from islice(self.place.read(), self.most)
            return
        last = self._ends[1]  # a cursor counts lines, of which some are no rows
        for read in self.place.read(start):
            if read.number > last:
                return
            yield read


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Rows in a Python sequence."""

    rows: Sequence[Row] = field(repr=False)
    name: str = "data"
    unit: str = "row"

    @property
    def size(self) -> int:
        return 0  # it is in memory already

    @property
    def fingerprint(self) -> str:
        """The hash of the rows' content."""
        return hashlib.sha256(repr(self.rows).encode("utf-8", "surrogatepass")).hexdigest()

    def count(self) -> int:
        """How many there are."""
        return len(self.rows)

    def read(self, start: Cursor = START) -> Iterator[RowRead]:
        """The rows from `start` on."""
        for number in range(start[1] + 1, len(self.rows) + 1):
            row = dict(self.rows[number - 1])
            yield RowRead(row, number, (number, number), fault_in(row))


@dataclass(frozen=True, kw_only=True)
class Hub:
    """One split of a Hub dataset, or of a local folder that `datasets` reads; its rows lie on the disk."""

    path: str  # owner/name
    config: str | None = None
    split: str = "train"
    unit: str = "row"
    instead: str = ""  # another way to have these rows, for an error's end

    @property
    def name(self) -> str:
        config = f"/{self.config}" if self.config else ""
        return f"hf:{self.path}{config}:{self.split}"

    @cached_property
    def table(self) -> Any:
        """The dataset, downloaded where it is not in the cache."""
        try:
            import datasets
        except ImportError as error:
            raise HoneError(f'{self.name} needs the datasets package: pip install "hone[data]"') from error
        datasets.disable_progress_bars()
        with quiet_hub_client(local=Path(self.path).exists()) as missing:
            try:
                return datasets.load_dataset(self.path, self.config, split=self.split)
            except Exception as error:  # a download can fail in any way; what it says is all there is
                reason, check = " ".join(str(error).split())[:160], self._instead_of(str(error))
                if missing and isinstance(error, OSError):
                    reason, check = f"{missing} cannot be reached and the cache has none", "check the network"
                raise HoneError(f"cannot read {self.name}: {reason}: {check}{self.instead}") from error

    def _instead_of(self, reason: str) -> str:
        """What to write instead, where the library lists what there is."""
        there = re.findall(r"'([\w.-]+)'", reason.partition("[")[2].partition("]")[0])
        if there and "onfig" in reason:
            return f"write hf:{self.path}/{there[0]}:{self.split}"
        if there and "split" in reason:
            return f"write hf:{self.path}{f'/{self.config}' if self.config else ''}:{there[0]}"
        if "/" not in self.path:
            return "write hf:OWNER/NAME:SPLIT"
        return "check the name, the split and the network"

    @property
    def size(self) -> int:
        return int(self.table.dataset_size or self.table.nbytes)

    @property
    def fingerprint(self) -> str:
        """The hash of the number of rows, the columns, the first row and the last row."""
        table = self.table
        ends = [table[i] for i in (0, len(table) - 1)] if len(table) else []
        return hashlib.sha256(repr((len(table), table.column_names, ends)).encode("utf-8", "replace")).hexdigest()

    def count(self) -> int:
        """How many there are."""
        return len(self.table)

    def read(self, start: Cursor = START) -> Iterator[RowRead]:
        """The rows from `start` on."""
        for number in range(start[1] + 1, len(self.table) + 1):
            row = {name: without_nulls(value) for name, value in self.table[number - 1].items()}
            yield RowRead(row, number, (number, number), fault_in(row) or too_long(row))
