"""A file of finished rows that work goes on from: appended to in whole lines, never written twice."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hone.errors import HoneError
from hone.log import sinks
from hone.textfile import read_text

Row = dict[str, Any]


class Ledger:
    """JSON lines beside the settings they were made with, which have to be the same when the file is gone on with.

    whole: the column that marks the last row of a piece of work; rows after the last such row are taken out.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any], *, whole: str) -> None:
        self.path = path
        self._check(dict(settings))
        self.rows = self._finished(whole)

    def append(self, rows: Sequence[Row]) -> None:
        """Written down for good before it returns."""
        with self.path.open("ab", buffering=0) as file:
            file.write(b"".join(map(sinks.line, rows)))
            os.fsync(file.fileno())
        self.rows += rows

    def _check(self, settings: Row) -> None:
        about = self.path.with_name(self.path.name + ".settings.json")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if not self.path.exists():
            about.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
            return
        try:
            before = json.loads(read_text(about))
            if not isinstance(before, dict):
                raise ValueError("it holds no settings")
        except (OSError, ValueError, RecursionError) as error:
            raise HoneError(
                f"{self.path} is there, but {about.name} is not there or is damaged: choose another --out, or remove it"
            ) from error
        wrong = sorted(name for name in {**before, **settings} if before.get(name) != settings.get(name))
        if wrong:
            name = wrong[0]
            raise HoneError(
                f"{self.path} was begun with {name} {before.get(name)!r}, not {settings.get(name)!r}: "
                "use the same settings, or choose another --out"
            )

    def _finished(self, whole: str) -> list[Row]:
        """The rows of finished pieces; what was cut off when it was written is taken out of the file."""
        rows = sinks.read(self.path)
        while rows and not rows[-1].get(whole):
            rows.pop()
        if self.path.exists():
            sinks.rewrite(self.path, rows)
        return rows
