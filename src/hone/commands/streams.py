"""The standard streams of a command: one that the shell has closed is nowhere, and no character ends a command."""

import io
import os
import sys


class Output(io.FileIO):
    """stdout, which remembers why it could not be written to: whoever caught the error may have said otherwise."""

    failed: OSError | None = None

    def write(self, data: object, /) -> int | None:
        try:
            return super().write(data)  # type: ignore[arg-type]
        except OSError as error:
            self.failed = error
            raise

    def give_up(self) -> None:
        """What is still to be written goes nowhere, so that the interpreter can end in silence."""
        os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())


def open_streams() -> Output | None:
    """Make the streams fit to be used; stdout's own end, unless another program has put something in its place."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # and no file of ours may get its number
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115
    if sys.stdout is not sys.__stdout__ or not isinstance(sys.stdout, io.TextIOWrapper):
        return None
    before = sys.stdout
    before.flush()
    raw = Output(before.fileno(), "w", closefd=False)
    sys.stdout = io.TextIOWrapper(
        io.BufferedWriter(raw),
        encoding=before.encoding,
        errors="backslashreplace",
        line_buffering=before.line_buffering,
        write_through=before.write_through,
    )
    return raw
