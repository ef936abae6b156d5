"""Attention by the kernels in Triton's interpreter, against tables in float64: how far apart each case is, in a file.

Run as a program of its own, since Triton must know before it is imported.
"""

import json
import sys
from pathlib import Path

import interpreted  # noqa: F401 (before Triton)
import torch
from row_cases import CASES, differences

if __name__ == "__main__":
    found = {str(how): differences(**how, dtype=torch.float32, device="cpu") for how in CASES}
    Path(sys.argv[1]).write_text(json.dumps(found))
