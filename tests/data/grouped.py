"""Rows in memory as a run reads them: the groups, and what became of each row."""

from hone.data.feed.assemble import convert_rows
from hone.data.feed.locate import Dataset, Reading
from hone.data.feed.row_store import Memory, RowStore
from hone.data.rows.convert import Grouper


def to_groups(rows, tokenizer, *, name="x", **settings):
    """(groups, tally); settings: of the Grouper."""
    convert = Grouper(tokenizer=tokenizer, **settings)
    part = Dataset(name=name, stores=(RowStore(place=Memory(rows=rows, name=name)),))
    return convert_rows(part, Reading(), convert), convert.tally
