"""Commands without the seconds that importing torch takes: each is a fork of one process that has imported it.

`python warm.py serve SOCKET` is that process. `python warm.py hone SOCKET WORDS` is a command: it hands its words,
folder, environment and streams over, passes signals on, and ends with the code that the fork ends with.
"""

import contextlib
import json
import os
import signal
import socket
import sys
import traceback
from types import FrameType

MOST = 1 << 20  # bytes of one request
DOORS = ("run", "load", "evaluate", "algo")  # names of hone that bring torch and nearly all of Hone


def ask(kind: str, path: str, words: list[str]) -> int:
    """Have a command run, and wait for its end."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(path)
    request = json.dumps({"kind": kind, "words": words, "folder": os.getcwd(), "environment": dict(os.environ)})
    socket.send_fds(connection, [request.encode()], [0, 1, 2])
    answers = connection.makefile()
    child = int(answers.readline())

    def pass_on(number: int, frame: FrameType | None) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, pass_on)
    return int(answers.readline() or "137")  # a fork that was killed says nothing


def serve(path: str) -> None:
    """Import once, then a fork for each request."""
    import hone

    for name in DOORS:
        getattr(hone, name)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    server = socket.socket(socket.AF_UNIX)
    server.bind(path)
    server.listen()
    print("ready", flush=True)
    while True:
        connection, _ = server.accept()
        if os.fork() == 0:
            server.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _become(connection)
        connection.close()


def _become(connection: socket.socket) -> None:
    """The command itself; never returns."""
    code = 1
    try:
        os.setsid()
        text, streams, _, _ = socket.recv_fds(connection, MOST, 3)
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        connection.sendall(f"{os.getpid()}\n".encode())
        request = json.loads(text)
        os.chdir(request["folder"])
        os.environ.clear()
        os.environ.update(request["environment"])
        code = _run(request["kind"], request["words"])
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        connection.sendall(f"{code}\n".encode())
        os._exit(code)


def _run(kind: str, words: list[str]) -> int:
    sys.path[0] = os.getcwd()
    if kind == "hone":
        from hone.cli import main

        sys.argv = ["hone", *words]
        return main()
    import runpy

    sys.argv = words
    runpy.run_path(words[0], run_name="__main__")
    return 0


if __name__ == "__main__":
    role, where, *rest = sys.argv[1:]
    if role == "serve":
        serve(where)
    else:
        sys.exit(ask(role, where, rest))
