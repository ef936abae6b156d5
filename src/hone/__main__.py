"""`python -m hone` and the command `hone`: a signal ends it in one line from here on, whatever is being imported."""

# not signal, which imports others first: a signal may come meanwhile
import _signal as signal  # pyright: ignore[reportMissingImports]
import os
import sys


def _end(number: int, frame: object) -> None:
    """Nothing is begun yet, so that nothing has to be tidied up."""
    os.write(2, b"hone: interrupted; nothing new was saved\n")
    os._exit(128 + number)


_end.early = True  # pyright: ignore[reportFunctionMemberAccess]  # for `signals.heard`, which takes over from it


def main() -> int:
    """The exit code."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)
    for number in (signal.SIGTERM, signal.SIGHUP) if "RANK" not in os.environ else ():  # torchrun ends its ranks so
        if signal.getsignal(number) == signal.SIG_DFL:  # and not as nohup asks for
            signal.signal(number, _end)
    from hone.cli import main as command

    return command()


if __name__ == "__main__":
    sys.exit(main())
