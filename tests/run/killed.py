"""`hone` with passes recorded wherever they can be; it may kill itself in the middle of a checkpoint.

killed.py TOLD STEP FILE COMMAND...: at the FILE-th of STEP's checkpoint that is made safe, or never where that is 0.
The file TOLD is given the number of passes that were recorded.
"""

import os
import signal
import sys
from itertools import count
from pathlib import Path
from typing import Any

from hone.cli import main
from hone.model.backends.fused import cuda_graphs
from hone.model.decoder import Decoder
from hone.storage import files


def at_each_pass(told: Path) -> None:
    """Count what is recorded; on a CPU, where nothing is, the same steps are taken."""
    made, number, before = cuda_graphs.RecordedPass.__init__, count(1), Decoder.backends

    def counted(*arguments: Any, **named: Any) -> None:
        made(*arguments, **named)
        told.write_text(str(next(number)))

    cuda_graphs.RecordedPass.__init__ = counted  # pyright: ignore[reportAttributeAccessIssue]
    assert before is None, "a GPU decides for itself"
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        Decoder.backends = ("fused", "graphs")


def at_each_file(step: int, file: int) -> None:
    """Be killed as the power cord would do it."""
    sync, number = files.sync, count(1)

    def struck(path: Path) -> None:
        if f".{files.name_of(step)}." in str(path) and next(number) == file:
            os.kill(os.getpid(), signal.SIGKILL)
        sync(path)

    files.sync = struck


if __name__ == "__main__":
    at_each_pass(Path(sys.argv[1]))
    at_each_file(int(sys.argv[2]), int(sys.argv[3]))
    sys.exit(main(sys.argv[4:]))
