"""Backends by name."""

from typing import Protocol

from hone.errors import HoneError
from hone.reward.sandbox_limits import Protection, Wanted
from hone.reward.sandbox_pool import Pool
from hone.reward.sandbox_slots import Ask, Talk


class Backend(Protocol):
    """Runs jobs behind a wall of some kind."""

    def talk(self, request: bytes, talk: Talk, *, seconds: float, ask: Ask | None = None) -> float: ...

    def report(self) -> list[Protection]: ...

    def close(self) -> None: ...


def open_backend(name: str, wanted: Wanted) -> Backend:
    """The backend of that name, ready to run jobs."""
    if name in ("auto", "native"):
        return Pool(wanted)
    raise HoneError(f"no sandbox backend {name!r}: use auto, native, bubblewrap, nsjail, gvisor or an http(s) URL")
