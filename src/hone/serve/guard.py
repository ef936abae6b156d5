"""Who may ask at all: the Host, Origin and token of a request, looked at before its path, method or body."""

import hmac
import ipaddress
import re
import socket
from collections.abc import Iterable, Sequence

from hone.errors import HoneError
from hone.serve.refusal import Refusal

LOCAL = frozenset({"localhost", "127.0.0.1", "::1"})
EVERYWHERE = frozenset({"0.0.0.0", "::"})
OPEN_PATHS = frozenset({"/health"})  # answered without a token
HOST = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(?::\d{1,5})?", re.ASCII)
TOKEN = re.compile(r"[!-~]+", re.ASCII)

Headers = Sequence[tuple[bytes, bytes]]


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server bound to it."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_token(token: str) -> str:
    """A token that fits into a header."""
    if not TOKEN.fullmatch(token):
        raise HoneError("the token is empty or has blanks or other than ASCII in it: use letters and digits")
    return token


class Guard:
    """Checks each request. `host` is what the server is bound to."""

    def __init__(self, *, host: str, token: str) -> None:
        self.token = check_token(token).encode()
        self.anywhere = host in EVERYWHERE
        self.names = LOCAL | {host.lower()} | ({socket.gethostname().lower()} if self.anywhere else set[str]())

    def check(self, path: str, headers: Headers) -> None:
        """Raise the Refusal of a request that may not be answered."""
        host = self._host(headers)
        self._same_origin(host, headers)
        if path not in OPEN_PATHS and not self.knows_token(headers):
            raise Refusal(
                401,
                "the token is missing or wrong: send the one of this start as `Authorization: Bearer TOKEN`",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )

    def _host(self, headers: Headers) -> str:
        """A page elsewhere can make its own name point here (DNS rebinding); the Host header tells it."""
        hosts = _values(headers, b"host")
        host = hosts[0].lower() if len(hosts) == 1 else ""
        found = HOST.fullmatch(host)
        name = found[1].strip("[]") if found else ""
        if name not in self.names and not (self.anywhere and _is_address(name)):
            raise Refusal(
                403,
                "the Host header is not a name of this server: use the address that `hone serve` printed",
                code="forbidden_host",
            )
        return host

    def _same_origin(self, host: str, headers: Headers) -> None:
        """No page of another origin may ask, whatever the method; there are no CORS headers either."""
        own = {f"http://{host}", f"https://{host}"}
        foreign = [origin for origin in _values(headers, b"origin") if origin.lower() not in own]
        sites = set(_values(headers, b"sec-fetch-site")) - {"same-origin", "none"}
        if foreign or sites:
            raise Refusal(
                403,
                "requests from a page of another origin are refused: ask from a program, not from a browser",
                code="forbidden_origin",
            )

    def knows_token(self, headers: Headers) -> bool:
        """Compared in constant time."""
        given = _values(headers, b"authorization")
        scheme, _, token = given[0].partition(" ") if len(given) == 1 else ("", "", "")
        fits = hmac.compare_digest(token.strip().encode("latin-1"), self.token)
        return fits and scheme.lower() == "bearer"


def _values(headers: Iterable[tuple[bytes, bytes]], name: bytes) -> list[str]:
    return [value.decode("latin-1") for key, value in headers if key == name]


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
