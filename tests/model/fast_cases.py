"""Fast layers with their Triton kernels in the interpreter, against plain layers; run as a program of its own, since
Triton must know before it is imported."""

import json
import sys

import interpreted  # noqa: F401 (before Triton)
import torch
from fast_models import MODELS, both_ways, model

from hone.model.backends.fused import elementwise


def main(path: str) -> None:
    elementwise.has_kernels = lambda x: True
    elementwise.PROGRAMS = 5  # fewer than rows, so that each has several
    found = {name: both_ways(model(name, torch.float32)) for name in MODELS}
    with open(path, "w") as file:
        json.dump(found, file)


if __name__ == "__main__":
    main(sys.argv[1])
