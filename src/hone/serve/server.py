"""The socket and the event loop: connections bounded in number, idle time and size, and an orderly end."""

import asyncio
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from hone.errors import HoneError
from hone.serve.app import App
from hone.serve.desk import Desk
from hone.serve.refusal import Refusal, packed

HEAD_SECONDS = 10.0  # from the opening of a connection, or the last answer, to the end of the next head
STALLED_SECONDS = 30.0  # a client that reads nothing of its answer for so long is dropped
CONNECTIONS = 512
GRACE_SECONDS = 2.0  # for running requests when the server is told to stop


class Bounded(H11Protocol):
    """uvicorn's connection, which by itself waits forever for a head and for a client that does not read."""

    _head: asyncio.TimerHandle | None = None
    _stalled: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > CONNECTIONS:
            self._say(Refusal(503, "too many connections: ask again later", code="too_many_connections"))
            return
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._head, self._stalled):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._await_head()

    def _await_head(self) -> None:
        if self._head is not None:
            self._head.cancel()
        self._head = self.loop.call_later(HEAD_SECONDS, self._close_idle)

    def _close_idle(self) -> None:
        if self.cycle is None or self.cycle.response_complete:
            self.transport.abort()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stalled = self.loop.call_later(STALLED_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stalled is not None:
            self._stalled.cancel()

    def send_400_response(self, msg: str) -> None:
        """What is not HTTP is told so in the form of every other refusal."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.transport.abort()  # rubbish after a request that is being answered
            return
        self._say(Refusal(400, "this is not an HTTP/1.1 request, or its head is too large", code="invalid_http"))

    def _say(self, why: Refusal) -> None:
        body = packed(why.body())
        phrase = {400: "Bad Request", 503: "Service Unavailable"}[why.status]
        head = f"HTTP/1.1 {why.status} {phrase}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
        self.transport.write(f"{head}\r\nconnection: close\r\n\r\n".encode() + body)
        self.transport.close()


class _Server(uvicorn.Server):
    """Signals are handled by `serve`, which ends with no signal raised again."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def listen(host: str, port: int) -> socket.socket:
    """A socket that is bound, so that a port that is taken is told before a model is loaded."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        made = socket.socket(family, kind)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
    except (OSError, OverflowError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise HoneError(
            f"cannot listen on {host} port {port} ({reason}): choose another with --host or --port"
        ) from error
    return made


def serve(app: App, desk: Desk, sock: socket.socket, *, ready: Callable[[], None]) -> bool:
    """Until SIGINT or SIGTERM; then nothing new is taken, and what runs has a few seconds.

    False: the engine is still in a launch that takes longer.
    """
    config = uvicorn.Config(
        app,
        http=Bounded,
        ws="none",
        loop="asyncio",
        lifespan="off",
        interface="asgi3",
        log_config=None,
        log_level="critical",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        h11_max_incomplete_event_size=app.limits.head,
        timeout_keep_alive=int(HEAD_SECONDS),
        timeout_graceful_shutdown=int(2 * GRACE_SECONDS),
    )
    return asyncio.run(_serve(_Server(config), desk, sock, ready))


async def _serve(server: _Server, desk: Desk, sock: socket.socket, ready: Callable[[], None]) -> bool:
    loop = asyncio.get_running_loop()

    def stop() -> None:
        server.should_exit = True
        why = Refusal(503, "the server is shutting down", code="shutting_down")
        loop.call_later(GRACE_SECONDS, desk.stop_all, why)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
    desk.start()
    sock.listen(CONNECTIONS)  # whoever reads what `ready` says can connect
    ready()
    await server.serve(sockets=[sock])
    return await asyncio.to_thread(desk.close)
