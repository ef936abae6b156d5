"""How programs are judged, in another language, time or share: what a `code:FILE.yaml` may set, and what follows."""

import os
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from hone.errors import HoneError
from hone.reward.sandbox.job import ENVIRONMENT
from hone.reward.sandbox.limits import MIB, interpreter, root_of
from hone.reward.sandbox.sandbox import Language, SandboxLimits
from hone.reward.verify.code.extract import PYTHON

Mode = Literal["all", "fraction"]
MODES: tuple[str, ...] = get_args(Mode)
LARGEST = 2**30  # of any limit, in its own unit
# shown to no program as a whole, nor is a folder that the run is in: it may hold the answers
NEVER = ("/", "/dev", "/etc", "/home", "/proc", "/root", "/run", "/sys", "/tmp", "/var")


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeSettings:
    """Settings as a file says them: sizes in MiB, commands as texts."""

    mode: Mode = "all"
    seconds: float = 5.0
    memory: int = 512
    addresses: int = 0
    processes: int = 32
    disk: int = 32
    input: float = 16.0
    output: float = 0.25
    result: float = 1.0
    fence: str | tuple[str, ...] = ()
    file: str = ""
    build: str | tuple[str, ...] = ()
    run: str = ""
    folders: tuple[str, ...] = ()


def reward_arguments(settings: CodeSettings, where: str) -> dict[str, Any]:
    """What `code_reward` is to be called with; HoneError names `where` the settings are."""
    try:
        _check_sizes(settings)
        limits = SandboxLimits(
            seconds=settings.seconds,
            memory=settings.memory * MIB,
            addresses=settings.addresses * MIB,
            processes=settings.processes,
            disk=settings.disk * MIB,
            input=int(settings.input * MIB),
            output=int(settings.output * MIB),
            result=int(settings.result * MIB),
        )
        fences = frozenset(["", *(text.lower() for text in _texts(settings.fence))])
        return {
            "mode": settings.mode,
            "limits": limits,
            "folders": _folders(settings.folders),
            "language": _language(settings),
            "fences": fences if settings.run or settings.fence else PYTHON,
        }
    except HoneError as error:
        raise HoneError(f"{where}: {error}") from error


def _check_sizes(settings: CodeSettings) -> None:
    for name in ("seconds", "memory", "addresses", "processes", "disk", "input", "output", "result"):
        if getattr(settings, name) > LARGEST:
            raise HoneError(f"{name} is {getattr(settings, name):g}: no machine has as much, lower it")


def _texts(value: str | Sequence[str]) -> Sequence[str]:
    return [value] if isinstance(value, str) else value


def _folders(folders: Sequence[str]) -> tuple[str, ...]:
    for folder in folders:
        if not os.path.isabs(folder) or not Path(folder).is_dir():
            raise HoneError(f"there is no folder {folder}: give the whole path of one, as in folders: [/usr/local/jdk]")
        if os.path.realpath(folder) in NEVER or Path.cwd().is_relative_to(os.path.realpath(folder)):
            raise HoneError(f"programs would see all of {folder}: name the folders in it that the language needs")
    return tuple(map(os.path.normpath, folders))


def _language(settings: CodeSettings) -> Language | None:
    if not (settings.file or settings.run or settings.build):
        return None
    if not (settings.file and settings.run):
        raise HoneError("another language needs both file and run, as in file: main.c, run: ./main")
    if settings.file != os.path.basename(settings.file) or settings.file in (".", ".."):
        raise HoneError(f"file is {settings.file!r}: programs are saved in /tmp, so give a name without folders")
    build = [_command(text, settings.folders) for text in _texts(settings.build)]
    return Language(file=settings.file, run=_command(settings.run, settings.folders), build=build)


def _command(text: str, folders: Sequence[str]) -> list[str]:
    """Its words, if the first is a program that the sandbox shows, or a path in the program's own folder."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise HoneError(f"{text!r} is not a command ({error}): write it as in a shell") from error
    if not words:
        raise HoneError("a command is empty: write what builds or runs the program, as in run: ./main")
    own = "/" in words[0] and not os.path.isabs(words[0])  # which the build makes
    if not own and not _shown(words[0], folders):
        raise HoneError(
            f"programs find no {words[0]} on this machine: install it in /usr, or name its folder in folders"
        )
    return words


def _shown(command: str, folders: Sequence[str]) -> bool:
    found = shutil.which(command, path=ENVIRONMENT["PATH"])
    seen = [folder for bind in root_of(interpreter(), folders)["binds"] for folder in bind]
    return found is not None and any(Path(os.path.realpath(found)).is_relative_to(folder) for folder in seen)
