"""The socket and the event loop: connections bounded in number, idle time and size, and an orderly end."""

import asyncio
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from hone.errors import HoneError
from hone.serve.dispatcher import Dispatcher
from hone.serve.refusal import Refusal, json_text

HEAD_SECONDS = 10.0  # from the opening of a connection, or the last answer, to the end of the next head
STALLED_SECONDS = 10.0  # a client that takes nothing of what waits for it for so long is dropped
CONNECTIONS = 512
PIPELINED = 2**16  # bytes that a client may send while it is being answered
HIGH, LOW = 2**14, 2**13  # bytes that wait for a client before its answer does, and until it goes on
SEND_BUFFER = 2**16  # bytes the system may hold of an answer: more would hide that nobody reads, half of it stalls
SILENT_SECONDS = 30  # a client whose machine does not answer for so long is gone
SWITCH_SECONDS = 5e-4  # after which the engine's thread and the event loop give way to each other
GRACE_SECONDS = 2.0  # for running requests when the server is told to stop


class Bounded(H11Protocol):
    """uvicorn's connection, which by itself waits forever for a head and for a client that does not read."""

    _head: asyncio.TimerHandle | None = None
    _stalled: asyncio.TimerHandle | None = None
    since = 0.0  # when it last began to wait for a head

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(HIGH, LOW)
        if len(self.connections) > CONNECTIONS and not self._make_room():
            self._say(Refusal(503, "too many connections: ask again later", code="too_many_connections"))
            return
        self._await_head()

    def _make_room(self) -> bool:
        """The connection that has said nothing for longest gives way to a new one."""
        others = (other for other in self.connections if isinstance(other, Bounded) and other is not self)
        oldest = min((other for other in others if other.idle), key=lambda other: other.since, default=None)
        if oldest is None:
            return False
        oldest.transport.abort()
        self.connections.discard(oldest)
        return True

    @property
    def idle(self) -> bool:
        """Whether nothing is asked for or being answered on it."""
        return self.cycle is None or self.cycle.response_complete

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._head, self._stalled):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Go on reading while an answer is being made: otherwise a client that leaves then is not noticed."""
        super().data_received(data)
        if not self.idle and self.conn.their_state is h11.DONE:
            if len(self.conn.trailing_data[0]) > PIPELINED:
                self.transport.abort()
            else:
                self.flow.resume_reading()

    def on_response_complete(self) -> None:
        self._await_head()  # the next request may lie here already
        super().on_response_complete()

    def _await_head(self) -> None:
        if self._head is not None:
            self._head.cancel()
        self.since = self.loop.time()
        self._head = self.loop.call_later(HEAD_SECONDS, self._close_idle)

    def _close_idle(self) -> None:
        if self.idle:
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
        if not self.idle:
            self.transport.abort()  # rubbish after a request that is being answered
            return
        self._say(Refusal(400, "this is not an HTTP/1.1 request, or its head is too large", code="invalid_http"))

    def _say(self, why: Refusal) -> None:
        body = json_text(why.body())
        phrase = {400: "Bad Request", 503: "Service Unavailable"}[why.status]
        head = f"HTTP/1.1 {why.status} {phrase}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
        self.transport.write(f"{head}\r\nconnection: close\r\n\r\n{body}".encode())
        self.transport.close()


class _Server(uvicorn.Server):
    """Signals are handled by `serve`, which ends with no signal raised again."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


OPTIONS = [
    (socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER),
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),  # or the second answer on a connection comes 40 ms late
]
if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux
    OPTIONS += [
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, SILENT_SECONDS // 2),
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
        (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * SILENT_SECONDS),
    ]


def listen(host: str, port: int) -> socket.socket:
    """A socket that is bound, so that a port that is taken is told before a model is loaded."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        made = socket.socket(family, kind, protocol)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        for level, option, value in OPTIONS:  # which every connection inherits
            made.setsockopt(level, option, value)
        made.bind(address)
    except (OSError, OverflowError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise HoneError(
            f"cannot listen on {host} port {port} ({reason}): choose another with --host or --port"
        ) from error
    return made


def serve(app: ASGIApp, dispatcher: Dispatcher, sock: socket.socket, *, head: int, ready: Callable[[], None]) -> bool:
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
        headers=[("x-content-type-options", "nosniff")],
        h11_max_incomplete_event_size=head,
        timeout_keep_alive=int(HEAD_SECONDS),
        timeout_graceful_shutdown=int(2 * GRACE_SECONDS),
    )
    sys.setswitchinterval(SWITCH_SECONDS)
    return asyncio.run(_serve(_Server(config), dispatcher, sock, ready))


async def _serve(server: _Server, dispatcher: Dispatcher, sock: socket.socket, ready: Callable[[], None]) -> bool:
    loop = asyncio.get_running_loop()

    def stop() -> None:
        server.should_exit = True
        why = Refusal(503, "the server is shutting down", code="shutting_down")
        loop.call_later(GRACE_SECONDS, dispatcher.stop_all, why)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
    dispatcher.start()
    sock.listen(CONNECTIONS)  # whoever reads what `ready` says can connect
    ready()
    await server.serve(sockets=[sock])
    return await asyncio.to_thread(dispatcher.close)
