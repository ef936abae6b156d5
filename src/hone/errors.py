"""The exceptions for what a user can put right: the message is one line that names the remedy."""

from pathlib import Path

MADE_BY = {  # what the recipes of the package start from, by the beginning of its path; the first that fits counts
    "runs/demo/data/steps.jsonl": "`hone label-steps` makes it: `hone recipes process` prints the command",
    "runs/demo": "`hone demo` makes it",
    "runs/process": "`hone run process` makes it",
    "runs/tinyshakespeare": "`hone corpus clean` makes it: `hone recipes pretrain_tinyshakespeare` prints the command",
    "runs/sft_gsm8k": "`hone run sft_gsm8k` makes it",
}


class HoneError(Exception):
    """What a user can put right, in one line that names the remedy. Exit code 2 of the command line."""


class Unsaved(HoneError):
    """A run's folder is gone or takes no more; elsewhere: what was learned is to be saved in another place."""

    def __init__(self, said: str, *, elsewhere: bool = True) -> None:
        super().__init__(said)
        self.elsewhere = elsewhere


class Interrupted(HoneError):
    """Ctrl-C during a run: the run has saved itself in `run_dir` and can be resumed; exit code 130."""

    def __init__(self, run_dir: str | Path) -> None:
        super().__init__(f"interrupted; the run is saved: continue it with `hone resume {run_dir}`")
        self.run_dir: Path = Path(run_dir)


def count_noun(number: int, noun: str) -> str:
    """The number with its noun, as a message says it.

    >>> count_noun(1, "row"), count_noun(2, "row"), count_noun(3, "micro-batch")
    ('1 row', '2 rows', '3 micro-batches')
    """
    plural = "es" if noun.endswith("batch") else "s"
    return f"{number} {noun}{'' if number == 1 else plural}"


def not_utf8(path: str | Path, error: UnicodeDecodeError) -> HoneError:
    """The error for a file whose whole content was to be read as text."""
    line = error.object.count(b"\n", 0, error.start) + 1
    return HoneError(f"{path} line {line} is not UTF-8: save the file as UTF-8")


def made_by(path: str | Path) -> str:
    """The command that makes a file or folder which a recipe of the package reads; "" for any other."""
    found = (remedy for start, remedy in MADE_BY.items() if Path(path).is_relative_to(start))
    return next(found, "")
