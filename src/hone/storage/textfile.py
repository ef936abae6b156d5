"""The text of a file that anybody may have put there: a pipe would be waited for, a device never ends."""

import errno
import os
from pathlib import Path

LARGEST = 1 << 30  # bytes; nothing that is read whole, as settings and prompts are, is as large


def read_text(path: Path) -> str:
    """The text, or OSError as the system would raise it; UnicodeDecodeError where it is no UTF-8."""
    if path.exists() and not path.is_file():
        is_folder = path.is_dir()
        number, said = (errno.EISDIR, os.strerror(errno.EISDIR)) if is_folder else (errno.EINVAL, "not a regular file")
        raise OSError(number, said, str(path))
    if path.stat().st_size > LARGEST:
        raise OSError(errno.EFBIG, f"more than {LARGEST >> 20} MiB", str(path))
    return path.read_text(encoding="utf-8")
