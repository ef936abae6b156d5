"""`python -m hone` and the command `hone`: Ctrl-C ends it in one line from here on, whatever is being imported."""

# not signal, which imports others first: Ctrl-C may come meanwhile
import _signal as signal  # pyright: ignore[reportMissingImports]
import os
import sys


def _end(number: int, frame: object) -> None:
    """Nothing is begun yet, so that nothing has to be tidied up."""
    os.write(2, b"hone: interrupted; nothing new was saved\n")
    os._exit(130)


_end.early = True  # pyright: ignore[reportFunctionMemberAccess]  # for `signals.ctrl_c`, which takes over from it


def main() -> int:
    """The exit code."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)
    from hone.cli import main as command

    return command()


if __name__ == "__main__":
    sys.exit(main())
