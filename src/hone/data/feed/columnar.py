"""Parquet and Arrow files through pyarrow, a batch of rows at a time, from any row on."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hone.errors import HoneError

FORMS = frozenset({".parquet", ".arrow", ".feather"})
AT_ONCE = 1024  # rows turned into Python at a time


def rows(path: Path, form: str, start: int) -> Iterator[tuple[int, dict[str, Any]]]:
    """(number, row) from row `start` (counting from 0) on; whole row groups before it are not read."""
    _pyarrow(path)
    number = start
    try:
        for batch in _parquet(path, start) if form == ".parquet" else _arrow(path, start):
            if twice := [name for name, n in Counter(batch.schema.names).items() if n > 1]:
                raise HoneError(f'{path} has the column "{twice[0]}" twice: rename one')
            batch.validate(full=True)  # places outside of the buffers would be read, and end the process
            for row in batch.to_pylist():
                number += 1
                yield number, {name: without_nulls(value) for name, value in row.items()}
    except Exception as error:  # whatever its bytes make of it: a text that is no UTF-8, a date in the year 99999
        raise damaged(path, form, error) from error


def count(path: Path, form: str) -> int:
    """Rows of a file, from its footer where it has one."""
    _pyarrow(path)
    try:
        if form == ".parquet":
            return _parquet_file(path).metadata.num_rows
        return sum(batch.num_rows for batch in _arrow(path, 0))
    except Exception as error:
        raise damaged(path, form, error) from error


def damaged(path: Path, form: str, error: Exception) -> HoneError:
    """The error for a file that pyarrow does not read."""
    if isinstance(error, HoneError):
        return error
    said = " ".join(str(error).split())[:100] or type(error).__name__
    reason = "".join(c if c.isprintable() else "?" for c in said)  # it may quote the file's bytes
    return HoneError(f"{path} is not a whole {form[1:]} file ({reason}): write it again")


def _pyarrow(path: Path) -> Any:
    try:
        import pyarrow
    except ImportError as error:
        raise HoneError(f'{path} needs pyarrow: pip install "hone[data]"') from error
    return pyarrow


def _parquet_file(path: Path) -> Any:
    import pyarrow.parquet as parquet

    return parquet.ParquetFile(path, memory_map=True)


def _parquet(path: Path, start: int) -> Iterator[Any]:
    file = _parquet_file(path)
    group, before = 0, 0
    while group < file.num_row_groups and before + file.metadata.row_group(group).num_rows <= start:
        before += file.metadata.row_group(group).num_rows
        group += 1
    yield from _from(file.iter_batches(AT_ONCE, row_groups=range(group, file.num_row_groups)), start - before)


def _arrow(path: Path, start: int) -> Iterator[Any]:
    """The file format, which feather is too, or the stream format that `datasets` writes."""
    import pyarrow

    with pyarrow.memory_map(str(path)) as content:
        try:
            file = pyarrow.ipc.open_file(content)
            batches = (file.get_batch(i) for i in range(file.num_record_batches))
        except pyarrow.ArrowInvalid:
            content.seek(0)
            batches = iter(pyarrow.ipc.open_stream(content))
        yield from _from(batches, start)


def _from(batches: Iterator[Any], skip: int) -> Iterator[Any]:
    """Without the first `skip` rows, and no batch larger than AT_ONCE."""
    for batch in batches:
        if skip >= batch.num_rows:
            skip -= batch.num_rows
            continue
        for begin in range(skip, batch.num_rows, AT_ONCE):
            yield batch.slice(begin, AT_ONCE)
        skip = 0


def without_nulls(value: Any, *, inside: bool = False) -> Any:
    """Lists of records lose their null keys, at every depth: a column store writes one for each key that any has."""
    if isinstance(value, list):
        return [without_nulls(x, inside=True) for x in value]
    if inside and isinstance(value, dict):
        return {k: without_nulls(v, inside=True) for k, v in value.items() if v is not None}
    return value
