"""Programs judged by their tests: they run in the sandbox, and the verdict is computed outside from what they return.

Expected values never enter the program's sandbox. Tests that are more than comparisons run in a second sandbox, which
asks the first for values one call at a time. Every 0 has a reason. What the tests, their data or the machine cause is
invalid; what only the completion causes is 0.
"""

import atexit
import os
import reprlib
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import cache, partial

from hone.errors import HoneError
from hone.reward.outcome import invalid
from hone.reward.sandbox.limits import MIB
from hone.reward.sandbox.protocol import frame
from hone.reward.sandbox.sandbox import (
    Finished,
    Language,
    Program,
    Raised,
    Returned,
    Sandbox,
    SandboxError,
    SandboxLimits,
    call_frame,
)
from hone.reward.sandbox.values import TooLarge
from hone.reward.verify.code.checker import Checker
from hone.reward.verify.code.extract import PYTHON, defined_names, extract, parse_python
from hone.reward.verify.code.settings import MODES
from hone.reward.verify.code.tests import Asserts, Cases, NoTests, Scripts, Tests, case_verdicts, preamble, read_tests
from hone.types import Outcome, Task

LIMITS = SandboxLimits()
MAX_LATE = 3  # inputs on which a script may run out of time before it is given up
MAX_MESSAGE = 200  # characters of what a program wrote that are shown
NO_PROGRAM = "the completion holds no program"


def sandboxes(limits: SandboxLimits = LIMITS, folders: Sequence[str] = ()) -> tuple[Sandbox, Sandbox]:
    """For programs, and for tests that run: two, so that tests waiting for a program cannot take its place."""
    lasting = replace(limits, seconds=max(limits.seconds, LIMITS.seconds))  # a run can be given less
    with _open_lock:
        return _open_sandboxes(os.getpid(), lasting, tuple(folders))


_open_lock = threading.Lock()


@cache
def _open_sandboxes(
    process: int, limits: SandboxLimits, folders: tuple[str, ...]
) -> tuple[Sandbox, Sandbox]:  # a fork has its own
    longer = SandboxLimits(
        seconds=limits.seconds + LIMITS.seconds, result=limits.result
    )  # the tests wait for the program
    opened = Sandbox(limits=limits, packages=folders), Sandbox(limits=longer, packages=folders)
    for sandbox in opened:
        atexit.register(sandbox.close)
    return opened


def code_reward(
    completion: str,
    task: Task,
    *,
    mode: str = "all",
    limits: SandboxLimits = LIMITS,
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
        check_sizes(tests, limits)
        before = preamble(task)
        found = extract(completion, wanted=tests.wanted, prompt=task.prompt, before=before, fences=fences)
        if found is None:
            return Outcome(value=0.0, reason=NO_PROGRAM)
        verdicts, why = run_tests(found.source, tests, limits=limits, folders=folders, language=language)
        share = sum(verdicts) / len(verdicts)
        if share == 1 and isinstance(tests, Asserts):
            _check_imports(tests, found.source)
    except (NoTests, SandboxError) as error:
        return invalid(str(error))
    reason = f"{found.taken}: {why}" if share < 1 and found.taken else why if share < 1 else found.taken
    return Outcome(value=share if mode == "fraction" else float(share == 1), reason=reason[:MAX_MESSAGE])


def code(setting: str) -> Callable[..., Outcome]:
    """A reward: `code_reward` in this mode."""
    if setting not in MODES:
        raise HoneError(f"code:{setting} is not understood: write code:fraction, code:all or code:FILE.yaml")
    return partial(code_reward, mode=setting)


def check_sizes(tests: Tests, limits: SandboxLimits) -> None:
    """NoTests where what the tests give or expect is larger than a program may be given or may say."""
    try:
        if isinstance(tests, Scripts):
            for number, (given, wanted) in enumerate(tests.pairs, start=1):
                told = len(wanted.encode("utf-8", "surrogatepass")) + wanted.count("\n") + 1  # it may end in blanks
                _check_size("input", f"input {number}", len(given.encode("utf-8", "surrogatepass")), limits.input)
                _check_size("output", f"the expected output {number}", told, limits.output)
        elif isinstance(tests, Cases):
            given = sum(len(call_frame(case.call)) for case in tests.cases)
            _check_size("input", "what the function is called with", given, limits.input)
            for number, case in enumerate(tests.cases, start=1):
                _check_size("result", f"the expected value {number}", _size(case.wanted), limits.result)
    except TooLarge as error:
        raise NoTests(f"a value of the tests cannot be given to a program: {error}") from error


def _check_size(setting: str, what: str, size: int, limit: int) -> None:
    if size > limit:
        held = f"{limit / MIB:g} MiB"
        raise NoTests(f"{what} has {size} bytes, and {setting} is {held}: raise {setting} in a code:FILE.yaml")


def _size(wanted: Sequence[object]) -> int:
    return len(frame({"value": wanted[0]})) if wanted else 0


def _check_imports(tests: Asserts, source: str) -> None:
    """Tests that use a module without importing it run by the program's import, as in one namespace, or not at all."""
    tree = parse_python(source)
    there = {name for statement in tree.body for name in defined_names(statement, imports=True)} if tree else set[str]()
    for name, line in tests.refers.lacking.items():
        if name not in there:
            raise NoTests(f"the tests use {name}, which they do not import: add {line!r} to test_imports")


def run_tests(
    source: str,
    tests: Tests,
    *,
    limits: SandboxLimits = LIMITS,
    folders: Sequence[str] = (),
    language: Language | None = None,
) -> tuple[list[bool], str]:
    """One verdict a test, and why a program that failed one did; NoTests where the tests themselves cannot run."""
    (programs, checkers), seconds = sandboxes(limits, folders), limits.seconds
    if isinstance(tests, Cases):
        asked = Program(source=source + tests.after, calls=[case.call for case in tests.cases])
        done = programs.run(asked, seconds=seconds)
        verdicts = case_verdicts(tests.cases, done)
        lacks = [c.call.name for c, r in zip(tests.cases, done.results, strict=False) if r == _not_there(c.call.name)]
        why = failure_message(done) or _first_difference(tests, verdicts, done)
        return verdicts, printable(f"the program does not define {lacks[0]}: {why}") if lacks else why
    if isinstance(tests, Scripts):
        return _scripts(Program(source=source, language=language), tests, programs, seconds=seconds)
    checker = Checker(source, tests, seconds)
    verdicts = checker.run(programs, checkers)
    said = failure_message(checker.done) if checker.done else ""
    return verdicts, said or printable(_first_failure(verdicts, checker.why))


def _not_there(name: str) -> Raised:
    return Raised(f"KeyError: {name!r}")


def failure_message(done: Finished) -> str:
    """What ended the program, in one line that can be printed; all but the limit is the program's own word."""
    raised = next((result.text for result in done.results if isinstance(result, Raised)), "")
    lines = [line for line in done.stderr[:MAX_MESSAGE].decode("utf-8", "replace").splitlines() if line.strip()]
    wrote = lines[0] if lines and not lines[0].startswith("Traceback") else ""  # of that the error says more
    failed = done.error or raised
    said = [f"ended by the limit of its {done.limit}" if done.limit else "", failed, wrote if failed else ""]
    return printable(": ".join(part for part in said if part))


def printable(text: str) -> str:
    """One short line."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())[:MAX_MESSAGE]


def _first_failure(verdicts: Sequence[bool], why: str) -> str:
    """The failure_message about the first test that failed."""
    if all(verdicts):
        return ""
    return f"test {list(verdicts).index(False) + 1} of {len(verdicts)} failed: {why}"


def _first_difference(tests: Cases, verdicts: Sequence[bool], done: Finished) -> str:
    """What the first call returned that should have returned something else."""
    if all(verdicts):
        return ""
    number = list(verdicts).index(False)
    result = done.results[number] if number < len(done.results) else None
    call = tests.cases[number].call
    given = ", ".join([*map(_short_repr, call.args), *(f"{k}={_short_repr(v)}" for k, v in call.kwargs.items())])
    returned = f"returned {_short_repr(result.value)}" if isinstance(result, Returned) else "did not return"
    return printable(_first_failure(verdicts, f"{call.name}({given})"[:100] + f" {returned}"))


def _short_repr(value: object) -> str:
    try:
        return reprlib.repr(value)
    except ValueError:  # an integer of too many digits
        return f"<{type(value).__name__}>"


def _scripts(program: Program, tests: Scripts, programs: Sandbox, *, seconds: float) -> tuple[list[bool], str]:
    """One verdict an input; after MAX_LATE runs that were ended by their time the rest has failed."""
    verdicts, late, why = list[bool](), 0, ""
    for given, wanted in tests.pairs:
        if late == MAX_LATE:
            break
        done = programs.run(replace(program, stdin=given), seconds=seconds)
        late += done.limit in ("time", "cpu")
        verdicts.append(_output_is_right(done, wanted))
        if not verdicts[-1] and not why:
            why = failure_message(done) or printable(
                f"input {len(verdicts)} of {len(tests.pairs)}: {_describe_difference(done, wanted)}"
            )
    return verdicts + [False] * (len(tests.pairs) - len(verdicts)), why


def _output_is_right(done: Finished, wanted: str) -> bool:
    """The wanted lines, up to white space at their ends, from a script that ran to its end and not into a signal."""
    try:
        text = done.stdout.decode("utf-8")
    except UnicodeDecodeError:
        return False
    ended = done.loaded and not done.limit and (done.status or 0) >= 0
    return ended and _lines(text) == _lines(wanted)


def _describe_difference(done: Finished, wanted: str) -> str:
    """How what was printed differs from what was wanted."""
    if not done.loaded or (done.status or 0) < 0:
        return f"it did not run to its end (status {done.status})"
    found, right = _lines(done.stdout.decode("utf-8", "replace")), _lines(wanted)
    line = next((i for i, (a, b) in enumerate(zip(found, right, strict=False)) if a != b), min(len(found), len(right)))
    printed, expected = (lines[line][:60] if line < len(lines) else "nothing" for lines in (found, right))
    return f"line {line + 1} is {printed!r} in place of {expected!r}"


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]
