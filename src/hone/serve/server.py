"""The socket and the event loop: bounds on connections, and an orderly shutdown."""

import asyncio
import http
import socket
import sys
from collections.abc import Callable
from types import FrameType

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from hone.errors import HoneError
from hone.serve.dispatcher import Dispatcher
from hone.serve.http import HEAD_BYTES, APIError

HEAD_SECONDS = 10.0  # from the opening of a connection, or the last answer, to the end of the next head
STALLED_SECONDS = 10.0  # a client that reads nothing of its answer for so long is dropped
CONNECTIONS = 512
PIPELINED = 2**16  # bytes that a client may send while it is being answered
HIGH, LOW = 2**14, 2**13  # bytes waiting for a client: above the first its answer pauses, below the second it goes on
SEND_BUFFER = 2**16  # bytes of an answer that the system may hold: more would hide that a client does not read
SILENT_SECONDS = 30  # a client whose machine does not answer for so long is gone
SWITCH_SECONDS = 5e-4  # after so long the engine's thread and the event loop take turns
GRACE_SECONDS = 2.0  # for running requests when the server is told to stop


class BoundedConnection(H11Protocol):
    """uvicorn's connection, which by itself waits forever for a head and for a client that does not read."""

    _head: asyncio.TimerHandle | None = None
    _stalled: asyncio.TimerHandle | None = None
    since = 0.0  # when it last began to wait for a head

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(HIGH, LOW)
        if len(self.connections) > CONNECTIONS and not self._make_room():
            self._refuse(APIError(503, "too many connections: ask again later", code="too_many_connections"))
            return
        self._await_head()

    def _make_room(self) -> bool:
        """Close the connection that has been idle for longest."""
        others = (other for other in self.connections if isinstance(other, BoundedConnection) and other is not self)
        oldest = min((other for other in others if other.idle), key=lambda other: other.since, default=None)
        if oldest is None:
            return False
        oldest.transport.abort()
        self.connections.discard(oldest)
        return True

    @property
    def idle(self) -> bool:
        """Whether no request is being answered on it."""
        return self.cycle is None or self.cycle.response_complete

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._head, self._stalled):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Go on reading while an answer is made: only so a client that leaves is noticed."""
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
        """Refuse what is not HTTP, in OpenAI's form."""
        if not self.idle:
            self.transport.abort()  # rubbish after a request that is being answered
            return
        self._refuse(APIError(400, "this is not an HTTP/1.1 request, or its head is too large", code="invalid_http"))

    def _refuse(self, error: APIError) -> None:
        body = error.json().encode()
        fields = {"content-type": "application/json", "content-length": str(len(body)), "connection": "close"}
        phrase = http.HTTPStatus(error.status_code).phrase
        head = h11.Response(status_code=error.status_code, headers=list(fields.items()), reason=phrase)
        for event in (head, h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


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
    """A bound socket. If the port is taken, the error comes before a model is loaded."""
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


class Server(uvicorn.Server):
    """uvicorn's server with the engine's thread. A signal ends it in order, and is not raised again."""

    def __init__(self, app: ASGIApp, dispatcher: Dispatcher, ready: Callable[[], None]) -> None:
        config = uvicorn.Config(
            app,
            http=BoundedConnection,
            ws="none",
            backlog=CONNECTIONS,
            loop="asyncio",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            log_level="critical",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            headers=[("x-content-type-options", "nosniff")],
            h11_max_incomplete_event_size=HEAD_BYTES,
            timeout_keep_alive=int(HEAD_SECONDS),
            timeout_graceful_shutdown=int(2 * GRACE_SECONDS),
        )
        super().__init__(config)
        self.dispatcher, self.ready = dispatcher, ready
        self.engine_ended = False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self.dispatcher.start()
        await super().startup(sockets)
        self.ready()  # clients can connect from now on

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept nothing new, and give running requests a few seconds."""
        error = APIError(503, "the server is shutting down", code="shutting_down")
        asyncio.get_running_loop().call_later(GRACE_SECONDS, self.dispatcher.stop_all, error)
        await super().shutdown(sockets)
        self.engine_ended = await asyncio.to_thread(self.dispatcher.close)


def serve(app: ASGIApp, dispatcher: Dispatcher, sock: socket.socket, *, ready: Callable[[], None]) -> bool:
    """Until SIGINT or SIGTERM. False: the engine is still in a launch, which takes longer."""
    sys.setswitchinterval(SWITCH_SECONDS)
    server = Server(app, dispatcher, ready)
    server.run(sockets=[sock])
    return server.engine_ended
