"""Backends by name."""

import contextlib
from typing import Protocol

from hone.errors import HoneError
from hone.reward.sandbox_limits import Protection, Wanted
from hone.reward.sandbox_pool import Pool
from hone.reward.sandbox_slots import Ask, SandboxError, Talk
from hone.reward.sandbox_tools import TOOLS, Tool


class Backend(Protocol):
    """Runs jobs behind a wall of some kind."""

    def talk(self, request: bytes, talk: Talk, *, seconds: float, ask: Ask | None = None) -> float: ...

    def report(self) -> list[Protection]: ...

    def close(self) -> None: ...


def open_backend(name: str, wanted: Wanted) -> Backend:
    """The backend of that name, ready to run jobs."""
    if name == "auto":
        return _first_that_works(wanted)
    if name == "native":
        return Pool(wanted)
    if name in TOOLS:
        return Tool(name, wanted)
    if name.startswith(("http://", "https://")):
        from hone.reward.sandbox_remote import Remote  # http is slow to import, and few want it

        return Remote(name, wanted)
    raise HoneError(f"no sandbox backend {name!r}: use auto, native, {', '.join(TOOLS)} or an http(s) URL")


def _first_that_works(wanted: Wanted) -> Backend:
    """Hone's own, or where the machine does not let it, a tool that may do more: one installed set-user-id."""
    try:
        return Pool(wanted)
    except SandboxError as error:
        for name in TOOLS:
            with contextlib.suppress(SandboxError):  # not installed, or no cgroups
                return Tool(name, wanted)
        raise error
