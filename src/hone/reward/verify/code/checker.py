"""Runs tests in one sandbox and the program in another. The two exchange only questions and answers, one at a time.

The cause of a failure decides between 0 and invalid. Tests that fail to load before the program has said anything are
invalid. A program that fails, ends early or does not define what the tests ask for is wrong.
"""

import threading
from collections.abc import Sequence
from queue import SimpleQueue
from typing import Any

from hone.errors import HoneError
from hone.reward.sandbox.protocol import frame
from hone.reward.sandbox.sandbox import Call, Finished, Program, Sandbox, SandboxError, call_frame, order_of
from hone.reward.verify.code.tests import Asserts, NoTests

MAX_CALLS = 100_000  # questions of one program's tests: the time limit comes first
ENDED = {"answer": {"ended": "the program has ended"}}


class Checker:
    """One program and its tests."""

    def __init__(self, source: str, tests: Asserts, seconds: float) -> None:
        names = {"called": tests.refers.called, "used": tests.refers.used, "raised": tests.refers.raised}
        plain = {name: list(found) for name, found in names.items()}
        self.checker = order_of(Program(source=tests.source)) | {"tests": {"imports": tests.imports, "names": plain}}
        self.program = order_of(Program(source=source + tests.after))
        self.tests, self.seconds = tests, seconds
        self.calls, self.answers = SimpleQueue[bytes | None](), SimpleQueue[dict[str, Any]]()
        self.call_pending, self.finished, self.verdicts = False, False, list[bool]()
        # The tests take a slot after the program has one. In any order, two programs could hold all the slots that two
        # others wait for, and these the slots of the tests.
        self.has_slot = threading.Event()
        self.failed: HoneError | None = None
        self.done: Finished | None = None
        # why the tests could not be loaded, and whether that is their own fault
        self.loading, self.tests_failed_to_load = "", False
        self.raised = False  # whether the program has said anything but the value that it was asked for
        self.bytes_from_program = 0  # bytes that the program has said: what tests give it may come from there
        self.questioned = False  # whether the tests have asked the program for anything
        self.missing = ""  # the first name that the program was asked for and does not define
        self.blamed = ""  # what the program did in the test that runs, for which it fails
        self.why = ""  # of the first test that failed

    def run(self, programs: Sandbox, checkers: Sandbox) -> list[bool]:
        """One verdict for each test; NoTests where they cannot run."""
        thread = threading.Thread(target=self._answer, args=[programs], daemon=True)
        thread.start()
        self.has_slot.wait()
        try:
            done = checkers.converse(frame(self.checker), most=MAX_CALLS, ask=self._examine)
        finally:
            self.calls.put(None)
            thread.join()
        if self.failed is not None:  # the sandbox, not the program
            raise self.failed
        if self.tests_failed_to_load:
            raise NoTests(f"the tests cannot run: {self.loading}")
        if self.missing in self.tests.foreign:
            raise NoTests(
                f"the tests use {self.missing}, which neither they nor the task define: add it to their setup"
            )
        if done.limit == "result" and self.bytes_from_program < checkers.limits.result:
            raise NoTests("the tests give the program more than 16 times result: raise result in a code:FILE.yaml")
        if len(self.verdicts) < len(self.tests.texts):
            ended = f"the tests were ended by the limit of their {done.limit}" if done.limit else self.loading
            self.why = self.why or self.blamed or ended or "the tests ended early"
        return self.verdicts + [False] * (len(self.tests.texts) - len(self.verdicts))

    def _examine(self, records: Sequence[dict[str, Any]]) -> bytes | None:
        """The next message to the tests: the program's answer, or which test to run."""
        last = records[-1]
        if "ask" in last or "answer" in last:
            self.questioned = True
            self.calls.put(frame(last))
            told = self.answers.get()
            self._blame(told)
            text = frame(told)
            self.bytes_from_program += len(text)
            return text
        if "loaded" not in last:
            self._verdict(last)
            if self.tests_failed_to_load:
                return None
        elif not last["loaded"]:
            self.loading, self.tests_failed_to_load = str(last.get("error", "")), not self.blamed and not self.raised
            return None
        else:
            self.blamed = ""  # a name that only some tests use
        done = len(self.verdicts)
        return call_frame(Call(self.tests.tests[done])) if done < len(self.tests.tests) else None

    def _blame(self, told: dict[str, Any]) -> None:
        """Records failures of the program that no test may take for the exception that it expects."""
        answer = told.get("answer")
        self.raised = self.raised or not isinstance(answer, dict) or answer.keys() != {"value"}
        if isinstance(answer, dict) and "missing" in answer:
            self.missing = self.missing or str(answer["missing"])
            self.blamed = self.blamed or f"the program does not define {answer['missing']}"
        elif told is ENDED:
            self.blamed = self.blamed or "the program had ended"

    def _verdict(self, last: dict[str, Any]) -> None:
        if "error" in last and not self.questioned:
            self.loading, self.tests_failed_to_load = str(last["error"]), True
        self.verdicts.append("value" in last and not self.blamed)
        if not self.verdicts[-1] and not self.why:
            text = " ".join(self.tests.texts[len(self.verdicts) - 1].split())
            error = self.blamed or str(last.get("error", ""))
            self.why = f"{error} in {text[:100]}" if error != "AssertionError" else text[:150]
        self.blamed = ""

    def _answer(self, programs: Sandbox) -> None:
        """In a thread: passes calls to the program. Once the program has ended, every call fails."""
        try:
            self.done = programs.converse(
                frame(self.program), most=MAX_CALLS, seconds=self.seconds, ask=self._ask, on_slot=self.has_slot.set
            )
        except Exception as failed:  # of the sandbox: whoever waits for an answer must still get one
            self.failed = failed if isinstance(failed, HoneError) else SandboxError(f"no verdict: {failed}: try again")
        finally:
            self.has_slot.set()  # without a slot too: the tests still tell whose fault it is
        while not self.finished:
            if self.call_pending:
                self.answers.put(ENDED)
            self._next()

    def _ask(self, records: Sequence[dict[str, Any]]) -> bytes | None:
        """The next call for the program, whose last record answers the call before."""
        if self.call_pending:
            last = records[-1]
            good = set(last) in ({"ask"}, {"answer"}) and all(isinstance(inner, dict) for inner in last.values())
            self.answers.put(last if good else ENDED)
        return self._next()

    def _next(self) -> bytes | None:
        call = self.calls.get()
        self.call_pending, self.finished = call is not None, call is None
        return call
