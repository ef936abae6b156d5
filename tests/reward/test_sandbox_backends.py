"""Another backend than Hone's own: a service by URL, started as users start it."""

import base64
import json
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from each import each
from patience import eventually, patience

from benchmarks.hostile import PROGRAMS, aimed, groups_of, judge, world
from benchmarks.hostile.soak import below
from hone.cli import main
from hone.reward.sandbox.protocol import frame
from hone.reward.sandbox.remote import TOKEN
from hone.reward.sandbox.sandbox import Call, Program, Returned, Sandbox, SandboxError, SandboxLimits

WORD = "a secret of this test"
pytestmark = pytest.mark.usefixtures("needs_sandbox")
GOOD = Program(source="def f(x): return x + 1", calls=[Call("f", (41,))])
SOME = ("C001", "C004", "C005", "C006", "C020", "C021", "C026", "C028", "C031", "C040", "C061", "H001", "V029", "R022")


@pytest.fixture(scope="module")
def served():
    """`hone sandbox serve` as its own process, and its URL."""
    command = [sys.executable, "-m", "hone", "sandbox", "serve", "--port", "0", "--slots", "2", "--limit", "seconds=3"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, TOKEN: WORD}) as process:
        assert process.stderr is not None
        yield process, process.stderr.readline().split()[-1].removesuffix("/run")
        process.terminate()


@pytest.fixture(scope="module")
def url(served):
    return served[1]


def test_a_service_runs_programs_and_only_data_comes_back(url, monkeypatch):
    monkeypatch.setenv(TOKEN, WORD)
    with world() as places, Sandbox(backend=url, limits=SandboxLimits(seconds=3)) as sandbox:
        assert sandbox.run(GOOD).results == (Returned(42),)
        done = sandbox.run(Program(source="print(input())\nraise SystemExit(3)", stdin="é"))
        assert (done.stdout, done.status) == ("é\n".encode(), 0)
        assert not done.loaded
        assert sandbox.run(Program(source="while True: pass"), seconds=0.2).limit == "time"
        assert sandbox.run(Program(source="import os\nos.write(3, b'rubbish')")).limit == "result"
        for program in PROGRAMS:
            if program.id in SOME:
                verdict = judge(sandbox, aimed(program, places))
                assert (verdict.escaped, verdict.passed) == (False, "ok" in program.marks), program.id
        with pytest.raises(SandboxError, match="cannot run over the network"):
            sandbox.converse(b"", most=1, ask=lambda records: None)


def post(url, body, token=WORD, path="/run"):
    request = urllib.request.Request(url + path, body, {"Authorization": f"Bearer {token}"})
    try:
        with urllib.request.urlopen(request, timeout=patience(30)) as response:
            return response.status
    except urllib.error.HTTPError as error:
        return error.code


ASKED = {
    "request": base64.b64encode(frame({"source": "while True: pass", "stdin": None, "run": []})).decode(),
    "most": 1,
    "limits": {"seconds": 0.1, "output": 1000, "result": 1000},
}


def asked(**other):
    return json.dumps(ASKED | other).encode()


def limited(**other):
    return asked(limits=ASKED["limits"] | other)


RUBBISH = [b"", b"{}", b"[]", b"[" * 10000, b'{"request": 1}', asked(request="!"), asked(request=3), asked(most="x")]
RUBBISH += [asked(most=float("inf")), asked(most=None), asked(limits=3), asked(limits={})]
# a deadline that is no number never comes
RUBBISH += [limited(seconds=value) for value in (float("nan"), float("inf"), 0, -1, "x", None, 1e9)]
RUBBISH += [limited(output=1 << 40), limited(result=0), limited(output=float("nan"))]


def test_the_service_refuses_strangers_and_rubbish(url, monkeypatch):
    assert post(url, asked()) == 200
    assert [post(url, body) for body in RUBBISH] == [400] * len(RUBBISH)
    assert {post(url, asked(), token=word) for word in ("guess", "", WORD + "x", WORD[:-1])} == {401}
    assert post(url, None, token="guess", path="/report") == 401
    assert (post(url, asked(), path="/other"), post(url, None, path="/run")) == (404, 404)
    monkeypatch.setenv(TOKEN, "guess")
    with pytest.raises(SandboxError, match="does not answer"):
        Sandbox(backend=url)
    monkeypatch.delenv(TOKEN)
    with pytest.raises(SandboxError, match=f"wants a token: put it into the environment as {TOKEN}"):
        Sandbox(backend=url)


def raw(url, text):
    """The first line of what a service says to bytes that are no proper request."""
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), patience(10)) as connection:
        connection.sendall(text)
        return connection.recv(1000).partition(b"\r\n")[0]


@each("length", [b"-1", b"\xb2", b"1e3", b"9" * 5000, b"", b"+5", str(1 << 40).encode()])
def test_a_length_that_is_none_is_refused_and_the_service_lives(url, length):
    head = b"POST /run HTTP/1.1\r\nAuthorization: Bearer " + WORD.encode() + b"\r\nContent-Length: "
    assert b" 400 " in raw(url, head + length + b"\r\n\r\n")
    assert post(url, asked()) == 200


def test_a_service_says_what_holds_programs_there_and_other_limits_are_refused(url, monkeypatch):
    monkeypatch.setenv(TOKEN, WORD)
    with Sandbox(backend=url, limits=SandboxLimits(seconds=3)) as sandbox:
        names = [p.name for p in sandbox.report()]
    assert names[0] == "where"
    assert {"network", "files", "memory and processes", "CPU"} <= set(names)
    for wrong in ({"memory": 64 << 20}, {"processes": 3}, {"files": 999}, {"cores": 0.5}, {"seconds": 4}):
        name, value = next(iter(wrong.items()))
        with pytest.raises(SandboxError, match=f"has the limit {name}=.*start it with --limit {name}={value}, "):
            Sandbox(backend=url, limits=SandboxLimits(**{"seconds": 3, **wrong}))


def test_a_service_that_ends_leaves_nothing(served):
    process, _ = served
    started = below(process.pid)
    assert len(started) >= 3  # server, parent, slot
    process.terminate()
    process.wait(patience(10))
    assert eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in started))
    assert not groups_of(process.pid)


def test_a_service_needs_a_secret_and_limits_that_exist(monkeypatch, capsys):
    monkeypatch.setenv(TOKEN, "short")
    assert main(["sandbox", "serve"]) == 2
    assert "a secret of 16 characters or more" in capsys.readouterr().err
    monkeypatch.setenv(TOKEN, WORD)
    for wrong in ("disc=3", "memory=x", "memory"):
        assert main(["sandbox", "serve", "--limit", wrong]) == 2
        assert f"no limit {wrong!r}: give NAME=N with one of seconds, memory" in capsys.readouterr().err
    for wrong in (("--port", "65536"), ("--slots", "-1")):
        assert main(["sandbox", "serve", *wrong]) == 2
        assert f"{wrong[0]} is {wrong[1]}: set it" in capsys.readouterr().err


REPORT = {"protections": [], "limits": asdict(SandboxLimits())}
ANSWER = {"stdout": "", "stderr": "", "records": "", "limit": "", "told": {}}


class Liar(BaseHTTPRequestHandler):
    def do_GET(self):
        self.say(self.server.report)

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        time.sleep(getattr(self.server, "late", 0.0))
        self.say(self.server.answer)

    def say(self, body):
        self.send_response(302 if body == b"elsewhere" else 200)
        if body == b"elsewhere":
            self.send_header("Location", f"http://127.0.0.1:{self.server.server_port}/trap")
        self.server.seen.append(self.path)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        """Quiet."""


@pytest.fixture(scope="module")
def liar():
    with HTTPServer(("127.0.0.1", 0), Liar) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


LIES = [b"no", b"[]", b"{}", b"[" * 100_000, b"elsewhere"]
LIES += [json.dumps(ANSWER | {key: 3}).encode() for key in ("stdout", "records", "told")]


@pytest.mark.parametrize("answer", LIES, ids=range(len(LIES)))
def test_what_is_no_sandbox_is_no_verdict(answer, liar, monkeypatch):
    monkeypatch.setenv(TOKEN, WORD)
    liar.report, liar.answer, liar.seen = json.dumps(REPORT).encode(), answer, []
    url = f"http://127.0.0.1:{liar.server_port}"
    with Sandbox(backend=url) as sandbox, pytest.raises(SandboxError):
        sandbox.run(GOOD)
    assert liar.seen == ["/report", "/run"]  # nobody follows it elsewhere, with the token
    liar.report = answer
    with pytest.raises(SandboxError):
        Sandbox(backend=url)


def test_a_busy_service_may_stretch_a_program_s_time(liar, monkeypatch):
    """There, waiting for a processor does not count, up to three times the seconds."""
    monkeypatch.setenv(TOKEN, WORD)
    liar.report, liar.answer, liar.seen = json.dumps(REPORT).encode(), json.dumps(ANSWER).encode(), []
    with Sandbox(backend=f"http://127.0.0.1:{liar.server_port}") as sandbox:
        monkeypatch.setattr("hone.reward.sandbox.remote.GRACE", 0.5)
        monkeypatch.setattr(liar, "late", 3.0, raising=False)
        assert sandbox.run(GOOD, seconds=1.0).limit == ""


def test_what_a_service_says_too_much_is_cut_or_voids_the_rest(liar, monkeypatch):
    monkeypatch.setenv(TOKEN, WORD)
    loaded, value = frame({"loaded": True}), frame({"value": 42})
    big = base64.b64encode(b"x" * 1_000_000).decode()

    def run(records, **other):
        text = base64.b64encode(records).decode()
        liar.answer = json.dumps(
            ANSWER | {"records": text, "told": {"status": 0, "cpu": "x", "y": []}} | other
        ).encode()
        return sandbox.run(GOOD)

    liar.report, liar.seen = json.dumps(REPORT).encode(), []
    with Sandbox(backend=f"http://127.0.0.1:{liar.server_port}") as sandbox:
        done = run(loaded + value, stdout=big)
        assert (done.results, len(done.stdout), done.cpu) == ((Returned(42),), SandboxLimits().output, 0.0)
        for records in (loaded + value * 2, loaded + b"\0", loaded + frame([1]), value, b"\xff" * 100):
            assert run(records).results == ()
