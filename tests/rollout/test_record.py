"""Lines of a record against lists: they grow in number and in length while others write."""

import numpy as np

from hone.engine.requests import NO_LINE, WIDTH, Record
from hone.engine.runner import LaunchResult


def entries(lines: list[int], start: int) -> LaunchResult:
    value = np.arange(start, start + len(lines), dtype=np.int64)
    return LaunchResult(
        row=value,
        token=value,
        logp=-value.astype(np.float64),
        raw=-2 * value.astype(np.float64),
        ended=np.zeros(len(lines), np.bool_),
    )


def test_what_was_written_stays_when_lines_become_more_and_longer():
    g, record = np.random.default_rng(0), Record(2)
    kept: dict[int, list[int]] = {}
    for step in range(3 * WIDTH):
        if step % 20 == 0:
            kept[record.open(1 + step)] = []
            kept[record.open(4 * WIDTH)] = []
        if step % 50 == 49:
            line = next(iter(kept))
            del kept[line]
            record.close([line], step)
            record.recycle(step)
        lines = [line for line in kept if g.random() < 0.8]
        record.add(np.array(lines, dtype=np.int64), entries(lines, 100 * step))
        for i, line in enumerate(lines):
            kept[line].append(100 * step + i)
    assert len(kept) > 10
    assert max(map(len, kept.values())) > WIDTH
    for line, tokens in kept.items():
        assert record.count(line) == len(tokens)
        token, logp, raw = record.read(line, 3, len(tokens))
        assert token.tolist() == tokens[3:]
        assert logp.tolist() == [-float(t) for t in tokens[3:]]
        assert raw.tolist() == [-2.0 * t for t in tokens[3:]]


def test_nobodys_line_is_never_open_and_a_closed_one_waits_until_its_launches_are_read():
    record = Record(2)
    first, second = record.open(5), record.open(5)
    assert NO_LINE not in {first, second}
    record.close([first], launch=7)
    record.recycle(6)
    assert record.open(5) not in {NO_LINE, first, second}
    record.recycle(7)
    opened = {record.open(5) for _ in range(3)}
    assert first in opened
    assert not record.is_open[NO_LINE]
