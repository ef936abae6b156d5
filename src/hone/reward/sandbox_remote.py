"""A sandbox on other machines: the client of a service by URL, and the service (`hone sandbox serve`).

One POST a program, JSON both ways, bytes in base64; docs/sandbox.md has the fields. The answer is data like any other:
it is bounded, and who asked judges. The token of HONE_SANDBOX_TOKEN goes with every request.
"""

import base64
import hmac
import json
import os
import time
import urllib.request
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from hone.reward import sandbox_values as values
from hone.reward.sandbox_limits import Limits, Protection, Wanted
from hone.reward.sandbox_talk import GRACE, Ask, Backend, SandboxError, Talk

TOKEN = "HONE_SANDBOX_TOKEN"
MAX_BODY = 64 << 20


class Remote:
    """The client: as many programs at once as threads ask."""

    def __init__(self, url: str, wanted: Wanted) -> None:
        self.url, self.limits = url.rstrip("/") + "/run", wanted.limits
        self.token = os.environ.get(TOKEN, "")
        if not self.token:
            raise SandboxError(f"the service at {url} wants a token: put it into the environment as {TOKEN}")

    def talk(self, request: bytes, talk: Talk, *, seconds: float, ask: Ask | None = None) -> float:
        """Send the program, wait for its end; conversations that go to and fro are not for the network."""
        if ask is not None:
            raise SandboxError("tests that ask call by call cannot run over the network: use the backend native")
        start = time.monotonic()
        limits = asdict(self.limits) | {"seconds": seconds}
        body = {"request": base64.b64encode(request).decode(), "most": talk.most, "limits": limits}
        answer = self._post(json.dumps(body).encode(), seconds + 3 * GRACE)
        try:
            talk.stdout += base64.b64decode(answer["stdout"])[: talk.output]
            talk.stderr += base64.b64decode(answer["stderr"])[: talk.output]
            records = values.loads(base64.b64decode(answer["records"]))
            talk.records += [record for record in records if isinstance(record, dict)][: talk.most]
            talk.limit, talk.told = str(answer["limit"]), dict(answer["told"])
        except (KeyError, TypeError, ValueError) as error:
            raise SandboxError(f"{self.url} answers something else than a sandbox: name another service") from error
        return time.monotonic() - start

    def _post(self, body: bytes, timeout: float) -> dict[str, Any]:
        headers = {"Authorization": f"Bearer {self.token}", "Content-Type": "application/json"}
        try:
            request = urllib.request.Request(self.url, body, headers)
            with urllib.request.urlopen(request, timeout=timeout) as response:
                answer = json.loads(response.read(MAX_BODY))
        except (OSError, ValueError) as error:
            raise SandboxError(f"the sandbox at {self.url} does not answer ({error}): is it running?") from error
        if not isinstance(answer, dict):
            raise SandboxError(f"{self.url} answers something else than a sandbox: name another service")
        return answer

    def close(self) -> None:
        """Nothing stays open between programs."""

    def report(self) -> list[Protection]:
        """Another machine's word."""
        return [Protection(name="everything", how=f"the service at {self.url}, whose own doctor knows")]


def service(backend: Backend, limits: Limits, *, host: str, port: int, token: str) -> ThreadingHTTPServer:
    """An HTTP server that runs programs for whoever knows the token; the caller serves and closes it."""

    class Handler(BaseHTTPRequestHandler):
        timeout = 60

        def do_POST(self) -> None:
            given = self.headers.get("Authorization", "")
            length = self.headers.get("Content-Length", "")
            if not hmac.compare_digest(given.encode(), f"Bearer {token}".encode()):
                self._answer(401, {"error": "wrong token"})
            elif self.path != "/run" or not length.isdigit() or int(length) > MAX_BODY:
                self._answer(400, {"error": "POST /run with a body of a known, moderate length"})
            else:
                self._run(self.rfile.read(int(length)))

        def _run(self, body: bytes) -> None:
            try:
                asked = json.loads(body)
                talk = Talk(output=limits.output, result=limits.result, most=int(asked["most"]))
                seconds = min(float(asked["limits"]["seconds"]), limits.seconds)
                request = base64.b64decode(asked["request"])
            except (KeyError, TypeError, ValueError, RecursionError):
                self._answer(400, {"error": "not a program"})
                return
            try:
                backend.talk(request, talk, seconds=seconds)
            except SandboxError as error:
                self._answer(503, {"error": str(error)})
                return
            self._answer(200, _told(talk))

        def _answer(self, code: int, told: dict[str, Any]) -> None:
            body = json.dumps(told).encode()
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Quiet: a line a program would be noise."""

    return ThreadingHTTPServer((host, port), Handler)


def _told(talk: Talk) -> dict[str, Any]:
    limit = talk.limit or ("result" if talk.broken else "")
    records = values.dumps(talk.records, limit=MAX_BODY)
    streams = {"stdout": bytes(talk.stdout), "stderr": bytes(talk.stderr), "records": records}
    return {"limit": limit, "told": talk.told, **{k: base64.b64encode(v).decode() for k, v in streams.items()}}
