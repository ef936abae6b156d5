"""The command line: reads arguments, calls the library, turns errors into one line. torch is imported by a command,
never by this module, so that help is instant."""

import argparse
import errno
import io
import os
import sys
import traceback
from collections.abc import Sequence

from hone.commands import COMMANDS
from hone.commands.command import Parser, add_command
from hone.errors import HoneError, Interrupted
from hone.launch.signals import WatchedStream, catch_signals, number_of

EPILOG = """\
examples:
  hone demo                                   the whole journey on the CPU, in minutes
  hone run grpo train.steps=200               a recipe with one setting changed
  hone check grpo                             is what will be trained what you meant?
  hone resume runs/grpo                       go on after Ctrl-C
  hone algos dapo                             what dapo can be set to
  hone settings train                         what train.a=value can be set to, and what it means
  torchrun --nproc-per-node 2 -m hone run RECIPE train.shard=fsdp
                                              the same run on two GPUs, each holding a part of the model
"""
REMEDIES = {
    errno.ENOSPC: "free some space, then try again",
    errno.EDQUOT: "free some space, then try again",
    errno.EACCES: "see who may read and write there, or choose another path",
    errno.EPERM: "see who may read and write there, or choose another path",
    errno.EROFS: "choose a path that can be written to",
    errno.ENOTDIR: "a file is in the way, choose another path",
    errno.EEXIST: "a file is in the way, choose another path",
    errno.EISDIR: "give a file, not a folder",
}
CHECK = "check the path and what it is on"
WRITABLE = "choose a folder that you may write to, with out=FOLDER"
RUN_REMEDIES = {
    **REMEDIES,
    errno.ENOSPC: "free some space, then continue with `hone resume RUN_DIR`",
    errno.EDQUOT: "free some space, then continue with `hone resume RUN_DIR`",
    errno.EACCES: WRITABLE,
    errno.EPERM: WRITABLE,
    errno.EROFS: WRITABLE,
}


class Output(io.FileIO):
    """stdout, which remembers why a write failed: the error that arrives may be another one by then."""

    failed: OSError | None = None

    def write(self, data: object, /) -> int | None:
        try:
            return super().write(data)  # type: ignore[arg-type]
        except OSError as error:
            self.failed = error
            raise

    def give_up(self) -> None:
        """Send what is still buffered to /dev/null, so that the interpreter ends without a message."""
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


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code: 0 done, 2 something to put right, 128 + its number a signal (Ctrl-C: 130), 1 a bug."""
    # Read when torch is loaded. Threads that wait by spinning slow training down tenfold on cores that are shared.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    output, arguments = None, argparse.Namespace(debug=False)
    with catch_signals() as came:
        try:
            output = open_streams()
            arguments = _parse(sys.argv[1:] if argv is None else argv)
            arguments.command(arguments)
            sys.stdout.flush()
        except (Exception, KeyboardInterrupt) as error:
            if output is not None and output.failed is not None:
                return _unheard(output)
            if arguments.debug:
                traceback.print_exc()
            interrupted = bool(came) and not isinstance(error, HoneError)
            code, message = explain(
                KeyboardInterrupt(came[0]) if interrupted else error, run=hasattr(arguments, "settings")
            )
            rank = os.environ.get("RANK", "0")
            where = "" if rank == "0" else f"rank {rank}: "
            WatchedStream(sys.stderr, _silence).write(f"hone: {where}{' '.join(message.split())}\n")
            return code
    return 0


def _silence() -> None:
    """Nobody reads stderr: Python would fail over it once more when it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def _unheard(output: Output) -> int:
    output.give_up()
    if isinstance(output.failed, BrokenPipeError):  # the reader (head, less) has seen enough
        return 1
    reason = output.failed.strerror if output.failed else ""
    print(f"hone: error: the output cannot be written ({reason}): send it elsewhere", file=sys.stderr)
    return 2


def explain(error: BaseException, *, run: bool = True) -> tuple[int, str]:
    """The exit code and the line that an error ends the command with; run: the command trains."""
    if isinstance(error, KeyboardInterrupt):
        return 128 + number_of(error), "interrupted; nothing new was saved"
    if isinstance(error, Interrupted):
        return 130, str(error)
    if isinstance(error, HoneError):
        return 2, f"error: {error}"
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        remedy = (RUN_REMEDIES if run else REMEDIES).get(error.errno or 0)
        return 2, f"error: {where}{error.strerror or error}; {remedy or CHECK}"
    kind = type(error).__name__
    if isinstance(error, MemoryError) or kind == "OutOfMemoryError" or "can't allocate memory" in str(error):
        said = " ".join(str(error).split())[:200] or kind
        return 2, f"error: out of memory ({said}): use a smaller model, or lower train.micro_rows and sample.max_rows"
    return 1, f"error: {kind}: {error} (a bug in Hone or in your own code: --debug shows the traceback)"


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = build_parser()
    argv = [*argv[1:], "--help"] if argv[:1] == ["help"] else argv  # `hone help run`, as other tools have it
    arguments, left = parser.parse_known_args(argv)
    takes_settings = hasattr(arguments, "settings")
    # argparse takes `a=1 --resume b=2` for two lists and refuses the second.
    settings = [text for text in left if takes_settings and "=" in text and not text.startswith("-")]
    if len(settings) < len(left):
        arguments.parser.refuse(left, settings=takes_settings)
    if not hasattr(arguments, "command"):
        parser.print_help()
        parser.exit(2)
    if settings:
        arguments.settings = [*arguments.settings, *settings]
    arguments.debug = getattr(arguments, "debug", False)
    return arguments


def build_parser() -> Parser:
    """All commands and their options."""
    parser = Parser(
        prog="hone",
        description="From pre-training to verified reasoning: language-model training whose numbers you can check.",
        epilog=EPILOG,
    )
    parser.add_argument("--version", action="version", version=f"hone {_version()}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for command in COMMANDS:
        sub = add_command(commands, command.name, command.help, notes=command.notes, examples=command.examples)
        command.options(sub)
        sub.set_defaults(command=command.run)
    return parser


def _version() -> str:
    from importlib import metadata

    try:
        return metadata.version("hone")
    except metadata.PackageNotFoundError:
        return "(from the source tree)"
