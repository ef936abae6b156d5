"""A sandbox on other machines: the client of a service by URL, and the service (`hone sandbox serve`).

GET /report says what holds programs there and by which limits; one POST a program, JSON both ways, bytes in base64;
docs/sandbox.md has the fields. The answer is data like any other: it is bounded, and who asked judges. The token of
HONE_SANDBOX_TOKEN goes with every request.
"""

import base64
import hmac
import http.client
import json
import os
import time
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from hone.reward.sandbox.limits import BackendOptions, Protection, SandboxLimits
from hone.reward.sandbox.protocol import CHUNK, GRACE, MAX_STRETCH, Ask, JobOutput, SandboxBackend, SandboxError, frame

TOKEN = "HONE_SANDBOX_TOKEN"
MAX_BODY = 64 << 20
SHORTER = ("seconds", "output", "result")  # what a program may be given less of than the service allows


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A service that sends its clients elsewhere would send the token there."""

    def redirect_request(self, req: Any, fp: Any, code: Any, msg: Any, headers: Any, newurl: Any) -> None:
        """Nowhere."""


class RemoteBackend:
    """The client: as many programs at once as threads ask."""

    def __init__(self, url: str, wanted: BackendOptions) -> None:
        self.url, self.limits = url.rstrip("/"), wanted.limits
        self.token = os.environ.get(TOKEN, "")
        if not self.token:
            raise SandboxError(f"the service at {url} wants a token: put it into the environment as {TOKEN}")
        self._opener = urllib.request.build_opener(_NoRedirects)
        said = self._ask("/report", None, GRACE)
        try:
            self._protections = [Protection(**p) for p in said["protections"]]
            theirs = SandboxLimits(**said["limits"])
        except (KeyError, TypeError, ValueError) as error:
            raise self._no_sandbox() from error
        self._check(asdict(theirs))

    def _check(self, theirs: Mapping[str, float]) -> None:
        """Refuse a service that would run programs under other limits than those asked for."""
        for name, ours in asdict(self.limits).items():
            if ours > theirs[name] if name in SHORTER else ours != theirs[name]:
                remedy = f"start it with --limit {name}={ours}, or ask for no other"
                raise SandboxError(f"the service at {self.url} has the limit {name}={theirs[name]}: {remedy}")

    def converse(
        self,
        request: bytes,
        job_output: JobOutput,
        *,
        seconds: float,
        ask: Ask | None = None,
        on_slot: Callable[[], None] = lambda: None,
    ) -> float:
        """Send the program, wait for its end; conversations that go to and fro are not for the network."""
        if ask is not None:
            raise SandboxError("tests that ask call by call cannot run over the network: use the backend native")
        on_slot()
        start = time.monotonic()
        limits = {"seconds": seconds, "output": job_output.output, "result": job_output.result}
        body = {"request": base64.b64encode(request).decode(), "most": job_output.most, "limits": limits}
        answer = self._ask("/run", json.dumps(body).encode(), MAX_STRETCH * seconds + 3 * GRACE)
        try:
            job_output.text(job_output.stdout, base64.b64decode(answer["stdout"]))
            job_output.text(job_output.stderr, base64.b64decode(answer["stderr"]))
            job_output.limit = ""  # the service says which came first
            job_output.data(base64.b64decode(answer["records"]))
            job_output.limit = job_output.limit or str(answer["limit"])
            job_output.told = {name: n for name, n in answer["told"].items() if isinstance(n, int | float)}
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise self._no_sandbox() from error
        return time.monotonic() - start

    def _ask(self, path: str, body: bytes | None, seconds: float) -> dict[str, Any]:
        headers = {"Authorization": f"Bearer {self.token}", "Content-Type": "application/json"}
        request, until = urllib.request.Request(self.url + path, body, headers), time.monotonic() + seconds
        try:
            with self._opener.open(request, timeout=seconds) as response:
                answer = json.loads(_whole(response, until))
        except (OSError, ValueError, RecursionError, http.client.HTTPException) as error:
            raise SandboxError(f"the sandbox at {self.url} does not answer ({error}): is it running?") from error
        if not isinstance(answer, dict):
            raise self._no_sandbox()
        return answer

    def _no_sandbox(self) -> SandboxError:
        return SandboxError(f"{self.url} answers something else than a sandbox: name another service")

    def close(self) -> None:
        """Nothing stays open between programs."""

    def report(self) -> list[Protection]:
        """The other machine's word."""
        return [Protection(name="where", how=f"the service at {self.url}, which says of itself:"), *self._protections]


def _whole(response: http.client.HTTPResponse, until: float) -> bytes:
    """All that a service says, if it is not too much and does not take too long."""
    text = bytearray()
    while len(text) <= MAX_BODY and (part := response.read1(CHUNK)):
        text += part
        if time.monotonic() > until:
            raise TimeoutError("its answer does not end")
    return bytes(text)


class SandboxService(ThreadingHTTPServer):
    """Runs programs for whoever knows the token; the caller serves and closes it."""

    def __init__(self, backend: SandboxBackend, limits: SandboxLimits, *, host: str, port: int, token: str) -> None:
        super().__init__((host, port), _Handler)
        self.backend, self.limits, self.token = backend, limits, f"Bearer {token}".encode()


class _Handler(BaseHTTPRequestHandler):
    timeout = 60

    @property
    def service(self) -> SandboxService:
        assert isinstance(self.server, SandboxService)
        return self.server

    def do_GET(self) -> None:
        if self._authorised("/report"):
            protections = [asdict(p) for p in self.service.backend.report()]
            self._answer(200, {"protections": protections, "limits": asdict(self.service.limits)})

    def do_POST(self) -> None:
        length = self.headers.get("Content-Length", "")
        if not self._authorised("/run"):
            return
        if length.isascii() and length.isdigit() and int(length[:20]) <= MAX_BODY:
            self._run(self.rfile.read(int(length)))
        else:
            self._answer(400, {"error": "POST /run with a body of a known, moderate length"})

    def _authorised(self, path: str) -> bool:
        known = hmac.compare_digest(self.headers.get("Authorization", "").encode(), self.service.token)
        if not known:
            self._answer(401, {"error": "wrong token"})
        elif self.path != path:
            self._answer(404, {"error": "GET /report or POST /run"})
        return known and self.path == path

    def _run(self, body: bytes) -> None:
        try:
            request, job_output, seconds = _read(body, self.service.limits)
        except (ArithmeticError, KeyError, TypeError, ValueError, RecursionError):
            self._answer(400, {"error": "not a program"})
            return
        try:
            self.service.backend.converse(request, job_output, seconds=seconds)
        except SandboxError as error:
            self._answer(503, {"error": str(error)})
            return
        self._answer(200, _told(job_output))

    def _answer(self, code: int, told: dict[str, Any]) -> None:
        body = json.dumps(told).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet: a line a program would be noise."""


def _read(body: bytes, limits: SandboxLimits) -> tuple[bytes, JobOutput, float]:
    """A program, where its streams go, and its seconds: all within the service's own limits."""
    asked = json.loads(body)
    given = {name: float(asked["limits"][name]) for name in SHORTER}
    for name, value in given.items():
        if not 0 < value <= getattr(limits, name):  # NaN is neither
            raise ValueError(name)
    job_output = JobOutput(output=int(given["output"]), result=int(given["result"]), most=int(asked["most"]))
    return base64.b64decode(asked["request"], validate=True), job_output, given["seconds"]


def _told(job_output: JobOutput) -> dict[str, Any]:
    limit = job_output.limit or ("result" if job_output.broken else "")
    records = b"".join(frame(record) for record in job_output.records)
    streams = {"stdout": bytes(job_output.stdout), "stderr": bytes(job_output.stderr), "records": records}
    return {"limit": limit, "told": job_output.told, **{k: base64.b64encode(v).decode() for k, v in streams.items()}}
