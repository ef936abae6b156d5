"""The tutorial and the how-to pages are followed: every block is run word for word, in order, in an empty folder."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import reading
from reading import Block, Command

END = "@@ended {} with {}@@"
WARM = Path(__file__).with_name("warm.py")
SECONDS = 120  # for a background command to say that it is there
DATA = Path(os.environ.get("HONE_DATA", Path(__file__).parents[3] / "shared" / "data"))
MODELS = Path(os.environ.get("HONE_HOME", Path.home() / ".cache" / "hone")) / "models"
NEEDED = {"smollm2-135m": MODELS / "smollm2-135m", "gsm8k": DATA / "gsm8k"}  # slow blocks speak of it: where it must be


@dataclass
class Reader:
    """Follows pages in one folder; a page is followed once, and after the page whose files it uses."""

    folder: Path
    programs: Path  # where `hone` and `python` are found first
    slow: bool
    followed: dict[str, str] = field(default_factory=dict)  # a page to what went wrong there

    def follow(self, page: str) -> str:
        """What went wrong, "" for nothing."""
        if page in self.followed:
            return self.followed[page]
        earlier = reading.before(page)
        wrong = self.follow(earlier) if earlier else ""
        running: list[subprocess.Popen[str]] = []
        try:
            for block in reading.blocks(page):
                wrong = wrong or self.do(block, running)
        finally:
            for process in running:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGTERM)
                process.wait()
        self.followed[page] = wrong
        return wrong

    def do(self, block: Block, running: list[subprocess.Popen[str]]) -> str:
        """What goes wrong in a block."""
        absent = any(name in block.text and not path.is_dir() for name, path in NEEDED.items())
        if block.kind == "skip" or (block.kind == "slow" and (not self.slow or absent)):
            return ""
        if block.kind == "file":
            (self.folder / block.what).write_text(block.text)
            return ""
        if block.language == "python":
            (self.folder / "snippet.py").write_text(block.text)
            commands = [Command("python snippet.py", ())]
        else:
            commands = block.commands()
        if block.kind == "background":
            return self.start(block, commands[0], running)
        return self.type(block, commands)

    def type(self, block: Block, commands: list[Command]) -> str:
        """Commands in one shell, each of which prints what the page shows."""
        ends = [f"printf '\\n@@ended %s with %s@@\\n' {number} $?" for number in range(len(commands))]
        script = "\n".join(f"{command.line}\n{end}" for command, end in zip(commands, ends, strict=True))
        done = subprocess.run(["bash", "-c", script], **self.shell(), stdout=subprocess.PIPE, text=True)
        rest = done.stdout
        for number, command in enumerate(commands):
            printed, code, rest = self.until_end(number, rest)
            wanted = block.code if number == len(commands) - 1 else 0
            if code != str(wanted):
                return f"{block}: $ {command.line}\nended with {code}, not {wanted}:\n{printed[-3000:]}"
            if line := reading.missing(command.shown, printed):
                return f"{block}: $ {command.line}\ndid not print {line!r}:\n{printed[-3000:]}"
            if number == len(commands) - 1:
                wrong = [f"{fact}: {why}" for fact in block.facts if (why := reading.broken(fact, printed))]
                return f"{block}: $ {command.line}\n{wrong}\n{printed[-3000:]}" if wrong else ""
        return f"{block} has no command"

    @staticmethod
    def until_end(number: int, text: str) -> tuple[str, str, str]:
        """What was printed up to the end of this command, its code, and the rest."""
        found = re.search(r"\n" + END.format(number, r"(\d+)") + r"\n", text)
        return (text[: found.start()], found[1], text[found.end() :]) if found else (text, "nothing", "")

    def start(self, block: Block, command: Command, running: list[subprocess.Popen[str]]) -> str:
        """A command that goes on while the page does."""
        log = self.folder / "background.log"
        with log.open("w") as file:
            process = subprocess.Popen(["bash", "-c", command.line], **self.shell(file), text=True)
        running.append(process)
        deadline = time.monotonic() + SECONDS
        while reading.missing(command.shown, log.read_text()):
            if process.poll() is not None or time.monotonic() > deadline:
                return f"{block}: $ {command.line}\ndid not say {command.shown}:\n{log.read_text()[-3000:]}"
            time.sleep(0.05)
        return ""

    def shell(self, output: Any = None) -> dict[str, Any]:
        path = os.pathsep.join([str(self.programs), str(Path(sys.executable).parent), os.environ["PATH"]])
        plain = {
            "PATH": path,
            "NO_COLOR": "1",
            "COLUMNS": "100",
            "TERM": "dumb",
            "OMP_NUM_THREADS": "1",
            "HONE_DATA": str(DATA),
        }
        streams = {"stdin": subprocess.DEVNULL, "stderr": subprocess.STDOUT} | ({"stdout": output} if output else {})
        return {"cwd": self.folder, "env": {**os.environ, **plain}, "start_new_session": True, **streams}


def program(path: Path, line: str) -> None:
    path.write_text(f'#!/bin/sh\nexec {line} "$@"\n')
    path.chmod(0o755)


@pytest.fixture(scope="module")
def warm_reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    """Its commands are forks of a process that has imported torch."""
    folder = tmp_path_factory.mktemp("pages")
    programs = tmp_path_factory.mktemp("programs")
    socket = programs / "socket"
    for name in ("hone", "python"):
        program(programs / name, f"{sys.executable} -I -S {WARM} {name} {socket}")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    words = [sys.executable, str(WARM), "serve", str(socket)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment, cwd=folder) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == "ready\n"
        yield Reader(folder, programs, slow=False)
        server.terminate()


@pytest.fixture(scope="module")
def patient_reader(tmp_path_factory: pytest.TempPathFactory) -> Reader:
    """Its commands are processes of their own, and it runs what takes minutes too."""
    programs = tmp_path_factory.mktemp("programs")
    program(programs / "hone", f"{sys.executable} -m hone")
    program(programs / "python", sys.executable)
    return Reader(tmp_path_factory.mktemp("pages"), programs, slow=True)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", reading.pages())
def test_a_page_is_true(page: str, warm_reader: Reader):
    assert warm_reader.follow(page) == ""


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("page", reading.pages())
def test_a_page_is_true_with_what_takes_minutes(page: str, patient_reader: Reader):
    assert patient_reader.follow(page) == ""


def test_every_block_of_code_says_whether_it_is_run():
    silent = [
        str(block)
        for page in reading.pages()
        for block in reading.blocks(page)
        if block.kind not in reading.KINDS or (block.kind in ("slow", "skip", "file") and not block.what)
        if block.language in ("console", "bash", "python") or block.kind
    ]
    assert silent == []


def test_what_is_left_out_says_why():
    """Its skip shows the reasons in the summary of every run."""
    left_out = [block for page in reading.pages() for block in reading.blocks(page) if block.kind in ("skip", "slow")]
    assert all(block.what for block in left_out)
    pytest.skip("left out, or run by `make docs-test-slow` only: " + "; ".join(f"{b} ({b.what})" for b in left_out))


def test_every_marker_belongs_to_a_block():
    """A comment that no block follows at once would be ignored."""
    for page in reading.pages():
        text = (reading.DOCS / page).read_text(encoding="utf-8")
        written = re.findall(rf"<!-- ({'|'.join(reading.KINDS)}|holds)\b", text)
        read = [kind for block in reading.blocks(page) for kind in (block.kind, *["holds"] * len(block.facts)) if kind]
        assert sorted(written) == sorted(read), page


PAGE = """
<!-- run -->
```console
$ echo one; echo loss 0.5
one
$ {command}
{shown}
```
<!-- holds: loss < 1 -->
"""


@pytest.mark.skipif(not shutil.which("bash"), reason="needs bash")
def test_a_page_that_is_not_true_is_found_out(tmp_path: Path):
    reader = Reader(tmp_path, tmp_path, slow=False)
    cases = {
        "true": ("echo loss 0.2", "loss 0.9", ""),
        "another line": ("echo loss 0.2", "lost 0.2", "did not print 'lost 0.2'"),
        "a line too few": ("echo loss 0.2", "loss 0.2\nloss 0.2", "did not print 'loss 0.2'"),
        "another code": ("echo loss 0.2; false", "loss 0.2", "ended with 1, not 0"),
        "another number": ("echo loss 1.2", "loss 0.2", "loss is 1.2"),
        "no number": ("echo", "...", "there is no loss"),
    }
    for name, (command, shown, why) in cases.items():
        (block,) = reading.blocks("page", PAGE.format(command=command, shown=shown))
        found = reader.do(block, [])
        assert why in found, name
        assert bool(why) == bool(found), name
