"""A server's start and end, and its limits on how much and how long."""

import json
import signal
import socket
import time
from pathlib import Path

import pytest
from little import Server, hone, read_answer, rest, start_server
from patience import patience

from hone.cli import main

PLAIN = {"model": "chatty", "prompt": "the cat", "max_tokens": 3}
LONG = {**PLAIN, "max_tokens": 900, "logit_bias": {"1": -100}, "n": 16}
COMPLETIONS = "/v1/completions"


def begin(server: Server, **more: object) -> socket.socket:
    """A long stream, of which the first bytes have come."""
    body = json.dumps({**LONG, "stream": True, **more}).encode()
    sock = server.connect()
    sock.sendall(server.head("POST", COMPLETIONS, content_length=str(len(body)), connection="close") + body)
    assert sock.recv(15) == b"HTTP/1.1 200 OK"
    return sock


def test_more_requests_than_allowed_are_asked_to_come_back(strict: Server):
    strict.idle()
    with begin(strict), begin(strict):
        status, headers, answer = strict.ask("POST", COMPLETIONS, PLAIN)
        assert (status, headers["retry-after"], answer["error"]["type"]) == (429, "1", "rate_limit_error")
        assert strict.ask("GET", "/health")[0] == 200
    strict.idle()
    assert strict.ask("POST", COMPLETIONS, PLAIN)[0] == 200


def test_a_request_that_takes_too_long_is_ended(strict: Server):
    much = {"prompt": [LONG["prompt"]] * 2, "n": 128}
    status, _, answer = strict.ask("POST", COMPLETIONS, {**LONG, **much})
    assert (status, answer["error"]["code"]) == (504, "timeout")
    with begin(strict, **much) as sock:
        told = rest(sock)
    event = [line for line in told.split(b"\n") if line.startswith(b"data: ")][-1]
    assert json.loads(event[6:])["error"]["code"] == "timeout"
    assert strict.idle()["running"] == 0


def test_the_token_is_printed_once_with_lines_to_paste(server: Server):
    assert server.greeting.splitlines()[0].endswith(server.token)
    assert f'OpenAI(base_url="{server.url}/v1", api_key="{server.token}")' in server.greeting
    assert f"curl {server.url}/v1/chat/completions" in server.greeting
    assert len(server.token) >= 40


def test_a_signal_ends_the_server_in_order(folders: Path):
    """Nothing new is taken, what is short is finished, what is long is told why it ends."""
    before = "import hone.serve.server as s; s.GRACE_SECONDS = 1.0"
    server = start_server(folders / "plain", before=before, HONE_TOKEN="from-the-environment")
    assert "from-the-environment" not in server.greeting
    assert "HONE_TOKEN" in server.greeting
    server.token = "from-the-environment"
    body = json.dumps({**PLAIN, "model": "plain", "max_tokens": 100, "logit_bias": {"1": -100}}).encode()
    with begin(server, model="plain", n=128) as long, server.connect() as short:
        short.sendall(server.head("POST", COMPLETIONS, content_length=str(len(body))) + body)
        while not server.busy()["waiting"]:
            time.sleep(0.005)
        start = time.monotonic()
        server.process.send_signal(signal.SIGINT)
        told, (status, _, answer) = rest(long), read_answer(short)
    _, err = server.process.communicate()
    assert (server.process.returncode, err) == (0, "")
    assert time.monotonic() - start < patience(8)
    assert b"shutting_down" in told
    assert status == 200 or (status, json.loads(answer)["error"]["code"]) == (503, "shutting_down")
    with pytest.raises(ConnectionRefusedError):
        server.connect()


def test_other_machines_are_warned_of_and_a_model_without_a_template_says_where_to_ask(folders: Path):
    server = start_server(folders / "plain", "--host", "0.0.0.0", "--token", "given")
    server.token = "given"
    hosts = {"evil.example": 403, "localhost": 200, f"192.168.7.7:{server.port}": 200, f"[::1]:{server.port}": 200}
    found = {host: server.raw(server.head("GET", "/health", host=host))[0] for host in hosts}
    status, _, answer = server.ask("POST", "/v1/chat/completions", {"model": "plain", "messages": [{}]})
    server.process.terminate()
    err = server.process.communicate()[1]
    assert found == hosts
    assert "warning: 0.0.0.0 can be reached from other machines" in err
    assert "/v1/completions" in server.greeting
    assert (status, "/v1/completions" in answer["error"]["message"]) == (400, True)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["{chatty}", "--port", "{taken}"], "choose another with --host or --port"),
        (["{chatty}", "--port", "70000"], "--port"),
        (["{chatty}", "--host", "no.such.host.invalid", "--port", "0"], "choose another with --host or --port"),
        (["{chatty}", "--token", "a b"], "token"),
        (["{chatty}", "--adapter", "x"], "NAME=FOLDER"),
        (["{chatty}", "--port", "0", "--adapter", "x={plain}"], "adapter_config.json"),
        (["{chatty}", "--port", "0", "--adapter", "chatty={tuned}"], "base model's name"),
        (["{chatty}", "--adapter", "a={tuned}", "--adapter", "a={tuned}"], "one name"),
        (["{tuned}", "--port", "0"], "--adapter"),
        (["nowhere", "--port", "0"], "hone fetch"),
        (["{chatty}", "--port", "0", "--device", "gpu"], "--device"),
        (["{chatty}", "--concurrency", "0"], "--concurrency"),
        (["{chatty}", "--timeout", "nan"], "--timeout"),
    ],
)
def test_a_start_that_cannot_be_is_told_in_one_line(
    folders: Path, options: list[str], words: str, capsys: pytest.CaptureFixture[str]
):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        names = {name: str(folders / name) for name in ("chatty", "plain", "tuned")}
        filled = [option.format(taken=taken.getsockname()[1], **names) for option in options]
        assert main(["serve", *filled]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert words in err


def test_without_uvicorn_the_remedy_is_named(folders: Path, tmp_path: Path):
    (tmp_path / "uvicorn.py").write_text("raise ImportError")
    done = hone("serve", str(folders / "plain"), cwd=tmp_path)
    assert (done.returncode, "pip install 'hone[serve]'" in done.stderr) == (2, True)


def test_a_bug_is_told_to_the_operator_and_not_to_the_client(folders: Path):
    """Before an answer begins and in the midst of a stream."""
    before = (
        "import hone.serve.app as a, hone.serve.reply as r; "
        "a.Service._full_answer = lambda *given: 1 / 0; r.Reply.events = lambda *given: {}['secret']"
    )
    server = start_server(folders / "plain", before=before)
    status, _, answer = server.ask("POST", COMPLETIONS, {**PLAIN, "model": "plain"})
    assert (status, answer["error"]["code"], "division" in str(answer)) == (500, "internal_error", False)
    with begin(server, model="plain", n=1) as sock:
        told = rest(sock)
    assert b"internal_error" in told
    assert b"secret" not in told
    assert server.idle()["running"] == 0
    server.process.terminate()
    err = server.process.communicate(timeout=patience(15))[1]
    assert err.count("a request failed: ZeroDivisionError") == err.count("a request failed: KeyError: 'secret'") == 1
