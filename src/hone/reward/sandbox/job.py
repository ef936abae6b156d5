"""A job: one program in its own namespaces, asked for values over pipes. It decides nothing: only data leaves it.

Frames are four bytes of length and JSON. In: what to run, then calls, one at a time or all at once, then an empty one.
Out: one record for the module and one a call, in order. The program may write rubbish there; then nothing of it counts.
"""

import atexit
import builtins
import contextlib
import fcntl
import functools
import gc
import io
import os
import signal
import sys
import traceback
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from hone.reward.sandbox import namespaces, values
from hone.reward.sandbox.exceptions import describe
from hone.reward.sandbox.proxies import Channel, program_proxies

RESULT = 3  # the descriptor that records go to
LOCKED_IN = b"locked in"  # the client reads it before it sends the program, which could take it away
ENVIRONMENT = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/tmp", "TMPDIR": "/tmp", "LANG": "C.UTF-8"}


def run_job(descriptors: Sequence[int], conf: Mapping[str, Any]) -> NoReturn:
    """The job's first process, from its first moment; it never returns."""
    code = 70
    try:
        _take(descriptors)
        namespaces.confine(conf)
        _serve(conf["result"])
        code = 0
    except BaseException:  # a program may raise anything; whatever it is, this process ends here
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code)


def prepare_interpreter(path: Sequence[str]) -> None:
    """Make the interpreter look as a program expects it: it was started without the site module."""
    sys.path[:] = path
    sys.argv[:] = ["program.py"]
    builtins.exit = builtins.quit = sys.exit  # what the site module would have added
    atexit._clear()  # what the sandbox's own modules have there is none of the program's


def _take(descriptors: Sequence[int]) -> None:
    """Make these the descriptors 0, 1, 2 and 3, and close all others. Each is first moved to a number above those."""
    if os.getsid(0) != os.getpid():
        os.setsid()
    away = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, 16) for descriptor in descriptors]
    for number, descriptor in enumerate(away):
        os.dup2(descriptor, number, inheritable=number != RESULT)
    os.closerange(RESULT + 1, 1 << 16)
    _usual_signals()
    sys.stdin = io.StringIO()
    sys.stdout = open(1, "w", encoding="utf-8", errors="surrogatepass", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr


def _usual_signals() -> None:
    """Set the signals that an interpreter started by hand has. The trainer may have others: nohup ignores some."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    for number in range(1, 32):
        if signal.getsignal(number) is signal.SIG_IGN and number not in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _serve(limit: int) -> None:
    os.write(RESULT, LOCKED_IN)
    order = values.loads(read_frame() or b"")
    if order["run"]:
        _command(order)
    elif order["stdin"] is not None:
        _feed(order["stdin"])
        _script(order["source"])
    else:
        _module(order, limit)
    _flush()


def _script(source: str) -> None:
    """Run it as Python runs a script: to the end of its threads, of what it registered for its exit, of its files."""
    module, owner = types.ModuleType("__main__"), os.getpid()
    sys.modules["__main__"] = module
    end = _executed(source, module)
    if threading := sys.modules.get("threading"):
        threading._shutdown()
    atexit._run_exitfuncs()
    _flush()
    module.__dict__.clear()  # a file that it has left open writes what it holds when it goes
    gc.collect()
    _flush()
    if os.getpid() != owner:  # a child that it forked, which has come to the script's end too
        os._exit(0)
    _say(end)


def _module(order: Mapping[str, Any], limit: int) -> None:
    """Load it, then answer call by call. Tests have the names of the program that they test put before them."""
    module = types.ModuleType("program")
    sys.modules["program"] = module
    tests = order.get("tests")
    line = Channel(read=read_frame, write=write, limit=limit, sign=-1 if tests else 1)
    _say(_executed(order["source"], module, before=lambda: _prepare(module, line, tests) if tests else None))
    while text := read_frame():
        call = line.loads(text)
        if "ask" in call:
            line.send(line.answer(call["ask"], None if tests else module.__dict__))
        else:
            write(_answer(module, call, limit))


def _prepare(module: types.ModuleType, line: Channel, tests: Mapping[str, Any]) -> None:
    """Import what the tests import, before the program is asked for anything. Without it they cannot run."""
    for text in tests["imports"]:
        exec(text, {})
    module.__name__, sys.modules["__main__"] = "__main__", module  # as a file of tests that is run by itself
    if unittest := sys.modules.get("unittest"):
        _raise_failures(unittest)
    module.__dict__.update(program_proxies(line, **tests["names"]))


def _raise_failures(unittest: Any) -> None:
    """unittest prints what failed, and main() ends the process. Here a failed run fails the test that it is part of."""
    runner, run = unittest.TextTestRunner, unittest.TextTestRunner.run

    def run_and_raise(self: Any, suite: Any) -> Any:
        result = run(self, suite)
        for _, text in [*result.failures, *result.errors]:
            raise AssertionError(text.strip().rpartition("\n")[2])
        if not result.testsRun:
            raise AssertionError("no test of unittest ran")
        return result

    runner.run, unittest.main = run_and_raise, functools.partial(unittest.main, exit=False)


def _executed(source: str, module: types.ModuleType, before: Callable[[], None] | None = None) -> dict[str, Any]:
    """The record that says how it went."""
    try:
        if before is not None:
            before()
        exec(compile(source, "program.py", "exec"), module.__dict__)
        return {"loaded": True}
    except BaseException as error:
        if not isinstance(error, SystemExit):
            traceback.print_exc()
        return {"loaded": isinstance(error, SystemExit) and error.code in (None, 0), "error": describe(error)}


def _flush() -> None:
    for stream in {id(s): s for s in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__) if s}.values():
        with contextlib.suppress(Exception):  # the program may have closed it, or put anything in its place
            stream.flush()


def _answer(module: types.ModuleType, call: Mapping[str, Any], limit: int) -> bytes:
    try:
        function = module.__dict__[call["name"]]
        return values.dumps({"value": function(*call["args"], **call["kwargs"])}, limit=limit)
    except values.TooLarge as error:
        return values.dumps({"error": f"the value is too large: {error}"}, limit=limit)
    except BaseException as error:  # SystemExit and KeyboardInterrupt too: the next call is still asked
        return values.dumps({"error": describe(error)}, limit=limit)


def _feed(text: bytes) -> None:
    """The program's standard input, as a file without a name."""
    descriptor = os.open("/tmp/stdin", os.O_CREAT | os.O_EXCL | os.O_RDWR)
    os.unlink("/tmp/stdin")
    while text:
        text = text[os.write(descriptor, text) :]
    os.lseek(descriptor, 0, os.SEEK_SET)
    os.dup2(descriptor, 0)
    os.close(descriptor)
    sys.stdin = open(0, encoding="utf-8", errors="surrogateescape", closefd=False)  # noqa: SIM115


def _command(order: Mapping[str, Any]) -> None:
    """Write the program to a file, build it if asked, and become what runs it."""
    with open(order["file"], "w", encoding="utf-8") as file:
        file.write(order["source"])
    _feed(order["stdin"] or b"")
    for command in order["build"]:
        actions = [(os.POSIX_SPAWN_DUP2, 2, 1)]
        pid = os.posix_spawnp(command[0], command, ENVIRONMENT, file_actions=actions)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if code:
            _say({"loaded": False, "error": f"{command[0]} ended with {code}"})
            return
    _say({"loaded": True})
    os.execvpe(order["run"][0], order["run"], ENVIRONMENT)


def read_frame() -> bytes | None:
    """The next frame of the request, or None at its end."""
    head = _exactly(4)
    return _exactly(int.from_bytes(head, "big")) if len(head) == 4 else None


def _exactly(size: int) -> bytes:
    found = bytearray()
    while len(found) < size and (part := os.read(0, min(size - len(found), 1 << 20))):
        found += part
    return bytes(found)


def _say(record: dict[str, Any]) -> None:
    write(values.dumps(record, limit=4096))


def write(text: bytes) -> None:
    """One record."""
    text = len(text).to_bytes(4, "big") + text
    while text:
        text = text[os.write(RESULT, text) :]
