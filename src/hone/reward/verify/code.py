"""Programs judged by their tests: they run in the sandbox, and the verdict is computed outside from what they return.

Where several programs appear, the last fenced block counts. Expected values never enter the program's sandbox. Tests
that are more than comparisons run in a second sandbox, which asks the first for values one call at a time.
"""

import atexit
import os
import re
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import cache, partial
from queue import SimpleQueue
from typing import Any

from hone.errors import HoneError
from hone.reward.outcome import invalid
from hone.reward.sandbox import Finished, Language, Limits, Program, Raised, Sandbox, SandboxError
from hone.reward.sandbox_talk import frame
from hone.reward.verify.code_settings import MODES, PYTHON
from hone.reward.verify.code_tests import Asserts, Cases, NoTests, Scripts, Tests, passed, preamble, read_tests
from hone.reward.verify.format import said
from hone.types import Outcome, Task

LIMITS = Limits()
MAX_CALLS = 10_000  # of one test
MAX_LATE = 3  # inputs on which a script may run out of time before it is given up
SAID = 200  # characters of what a program wrote that are shown
_FENCE = re.compile(
    r"^([ \t]{0,3})```[ \t]*([\w+-]*)[^\n]*\n(.*?)(?:^[ \t]{0,3}```[ \t]*$|\Z)", re.MULTILINE | re.DOTALL
)
# In the sandbox of the tests: each wanted name is a voice that asks outside and waits for the answer.
VOICE = """
def _voice(name):
    from hone.reward import sandbox_job as job, sandbox_values as values
    def ask(*args, **kwargs):
        job.write(values.dumps({"call": {"name": name, "args": list(args), "kwargs": kwargs}}, limit=1 << 20))
        answer = values.loads(job.read_frame() or b"null")
        if "error" in answer: raise RuntimeError(answer["error"])
        return answer["value"]
    return ask
"""


def program_of(completion: str, task: Task, *, fences: Collection[str] = PYTHON) -> str | None:
    """The program a completion settles on, with what the task's prompt puts before it; None where there is none."""
    text = said(completion).replace("\r\n", "\n")
    blocks = [(indent, code) for indent, tag, code in _FENCE.findall(text) if tag.lower() in fences]
    indent, code = blocks[-1] if blocks else ("", text)
    code = "".join(line.removeprefix(indent) for line in code.removeprefix("\ufeff").splitlines(keepends=True))
    before = preamble(task)
    if before is not None and isinstance(task.prompt, str):
        entry = re.escape(str(task.extra["entry_point"]))
        code = (before + "\n" if re.search(rf"^def {entry}\b", code, re.MULTILINE) else task.prompt) + code
    return code if code.strip() else None


def sandboxes(limits: Limits = LIMITS, folders: Sequence[str] = ()) -> tuple[Sandbox, Sandbox]:
    """For programs, and for tests that run: two, so that tests waiting for a program cannot take its place."""
    lasting = replace(limits, seconds=max(limits.seconds, LIMITS.seconds))  # a run can be given less
    with _opening:
        return _opened(os.getpid(), lasting, tuple(folders))


_opening = threading.Lock()


@cache
def _opened(process: int, limits: Limits, folders: tuple[str, ...]) -> tuple[Sandbox, Sandbox]:  # a fork has its own
    longer = Limits(seconds=limits.seconds + LIMITS.seconds)  # the tests wait while the program runs
    opened = Sandbox(limits=limits, packages=folders), Sandbox(limits=longer)
    for sandbox in opened:
        atexit.register(sandbox.close)
    return opened


def code_reward(
    completion: str,
    task: Task,
    *,
    mode: str = "all",
    limits: Limits = LIMITS,
    folders: Sequence[str] = (),
    language: Language | None = None,
    fences: Collection[str] = PYTHON,
) -> Outcome:
    """1 where every test passes, else 0; with mode="fraction" the share that passes; invalid without tests to run.

    `limits.seconds` is for each run of the program: all calls together, or one input of a script, building included.
    `folders`: what programs see besides /usr. `fences`: the names of blocks that count.
    """
    if mode not in MODES:
        raise HoneError(f"code_reward has the mode {mode!r}: use {' or '.join(MODES)}")
    try:
        tests = read_tests(task)
        if language is not None and not isinstance(tests, Scripts):
            raise NoTests("functions can be called in Python only: in other languages a row needs inputs and outputs")
    except NoTests as error:
        return invalid(str(error))
    source = program_of(completion, task, fences=fences)
    if source is None:
        return Outcome(value=0.0)
    try:
        verdicts, said_of_it = judged(source, tests, limits=limits, folders=folders, language=language)
    except SandboxError as error:
        return invalid(str(error))
    share = sum(verdicts) / len(verdicts)
    reason = said_of_it if share < 1 else ""
    return Outcome(value=share if mode == "fraction" else float(share == 1), reason=reason)


def code(setting: str) -> Callable[..., Outcome]:
    """A reward: `code_reward` in this mode."""
    if setting not in MODES:
        raise HoneError(f"code:{setting} is not understood: write code:fraction, code:all or code:FILE.yaml")
    return partial(code_reward, mode=setting)


def judged(
    source: str,
    tests: Tests,
    *,
    limits: Limits = LIMITS,
    folders: Sequence[str] = (),
    language: Language | None = None,
) -> tuple[list[bool], str]:
    """One verdict a test, and what a program that failed one said of it."""
    (programs, checkers), seconds = sandboxes(limits, folders), limits.seconds
    if isinstance(tests, Cases):
        asked = Program(source=source + tests.after, calls=[case.call for case in tests.cases])
        done = programs.run(asked, seconds=seconds)
        return passed(tests.cases, done), complaint(done)
    if isinstance(tests, Scripts):
        return _scripts(Program(source=source, language=language), tests, programs, seconds=seconds)
    return _Examination(source, tests, seconds).hold(programs, checkers)


def complaint(done: Finished) -> str:
    """What ended the program, in one line that can be printed; all but the limit is the program's own word."""
    raised = next((result.text for result in done.results if isinstance(result, Raised)), "")
    lines = [line for line in done.stderr[:SAID].decode("utf-8", "replace").splitlines() if line.strip()]
    wrote = lines[0] if lines and not lines[0].startswith("Traceback") else ""  # of that the error says more
    said = [f"ended by the limit of its {done.limit}" if done.limit else "", done.error or raised, wrote]
    plain = "".join(c if c.isprintable() else " " for c in ": ".join(part for part in said if part))
    return " ".join(plain.split())[:SAID]


def _scripts(program: Program, tests: Scripts, programs: Sandbox, *, seconds: float) -> tuple[list[bool], str]:
    """One verdict an input; after MAX_LATE runs that were ended by their time the rest has failed."""
    verdicts, late, said_of_it = list[bool](), 0, ""
    for given, wanted in tests.pairs:
        if late == MAX_LATE:
            break
        done = programs.run(replace(program, stdin=given), seconds=seconds)
        late += done.limit in ("time", "cpu")
        verdicts.append(_printed(done, wanted))
        said_of_it = said_of_it or ("" if verdicts[-1] else complaint(done))
    return verdicts + [False] * (len(tests.pairs) - len(verdicts)), said_of_it


def _printed(done: Finished, wanted: str) -> bool:
    """The wanted lines, up to white space at their ends, from a script that ran to its end and not into a signal."""
    try:
        text = done.stdout.decode("utf-8")
    except UnicodeDecodeError:
        return False
    ended = done.loaded and not done.limit and (done.status or 0) >= 0
    return ended and _lines(text) == _lines(wanted)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]


class _Examination:
    """Tests in one sandbox, the program in another; between them only calls and values, one at a time."""

    def __init__(self, source: str, tests: Asserts, seconds: float) -> None:
        voices = "\n".join(f"{name} = _voice({name!r})" for name in tests.names)
        self.checker = Program(source=f"{VOICE}\n{voices}\n{tests.source}")
        self.program, self.tests, self.seconds = Program(source=source), tests, seconds
        self.calls, self.answers = SimpleQueue[bytes | None](), SimpleQueue[dict[str, Any]]()
        self.asked, self.over, self.verdicts = False, False, list[bool]()
        self.failed: HoneError | None = None
        self.said = ""

    def hold(self, programs: Sandbox, checkers: Sandbox) -> tuple[list[bool], str]:
        """One verdict a test, and what the program said."""
        thread = threading.Thread(target=self._answer, args=[programs], daemon=True)
        thread.start()
        try:
            checkers.talk(_order(self.checker), most=MAX_CALLS, ask=self._examine)
        finally:
            self.calls.put(None)
            thread.join()
        if self.failed is not None:  # the sandbox, not the program
            raise self.failed
        return self.verdicts + [False] * (len(self.tests.tests) - len(self.verdicts)), self.said

    def _examine(self, records: Sequence[dict[str, Any]]) -> bytes | None:
        """What the tests are told next: the answer to their call, or which test to run."""
        last = records[-1]
        if "call" in last:
            self.calls.put(frame(last["call"]))
            return frame(self.answers.get())
        if "loaded" not in last:
            self.verdicts.append("value" in last)
        elif not last["loaded"]:
            return None
        done = len(self.verdicts)
        return (
            frame({"name": self.tests.tests[done], "args": [], "kwargs": {}}) if done < len(self.tests.tests) else None
        )

    def _answer(self, programs: Sandbox) -> None:
        """In a thread: the program, asked call by call; once it has ended every call fails."""
        try:
            done = programs.talk(_order(self.program), most=MAX_CALLS, seconds=self.seconds, ask=self._ask)
            self.said = complaint(done)
        except HoneError as failed:
            self.failed = failed
        while not self.over:
            if self.asked:
                self.answers.put({"error": "the program has ended"})
            self._next()

    def _ask(self, records: Sequence[dict[str, Any]]) -> bytes | None:
        """What the program is told next; its last record answers what it was asked."""
        if self.asked:
            last = records[-1]
            self.answers.put(last if set(last) in ({"value"}, {"error"}) else {"error": "not a value"})
        return self._next()

    def _next(self) -> bytes | None:
        call = self.calls.get()
        self.asked, self.over = call is not None, call is None
        return call


def _order(program: Program) -> bytes:
    return frame({"source": program.source, "stdin": None, "file": "", "build": [], "run": []})
