"""The Hub's client made brief: where the Hub is not there, it reads its cache at once instead of trying again."""

import logging
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from urllib.parse import urlsplit
from urllib.request import getproxies

CONNECT = 3.0  # seconds
OFFLINE = "HF_HUB_OFFLINE"


@contextmanager
def briefly(*, local: bool = False) -> Iterator[str]:
    """Within it the client says nothing of retries; gives the Hub's host where that cannot be reached, else "".

    local: nothing will be asked of the Hub.
    """
    import datasets.config
    from huggingface_hub import constants

    host = "" if local or constants.HF_HUB_OFFLINE else _missing(str(constants.ENDPOINT))
    logger = logging.getLogger("huggingface_hub")
    level = logger.level
    logger.setLevel(logging.ERROR)
    # it has no setting for its five retries over half a minute; without a network it makes none where it is told so
    before = [_set(module, True) for module in (constants, datasets.config)] if host else []
    try:
        yield host
    finally:
        logger.setLevel(level)
        for module, value in zip((constants, datasets.config), before, strict=False):
            _set(module, value)


def _set(module: ModuleType, value: bool) -> bool:
    before = bool(getattr(module, OFFLINE))
    setattr(module, OFFLINE, value)
    return before


def _missing(endpoint: str) -> str:
    """The host, where nothing answers there; behind a proxy that cannot be told from here."""
    parts = urlsplit(endpoint)
    host, port = parts.hostname or "", parts.port or (80 if parts.scheme == "http" else 443)
    if getproxies():
        return ""
    try:
        socket.create_connection((host, port), timeout=CONNECT).close()
    except OSError:
        return host
    return ""
