"""The sampler's figures: on a GPU where there is one, otherwise on the CPU; transformers in the same run.

python -m benchmarks.sampler [--quick]
"""

import sys
from collections.abc import Sequence

import torch

from benchmarks.form import Row, main


def measure(quick: bool) -> Sequence[Row]:
    """The rows of the machine at hand."""
    if torch.cuda.is_available():
        from benchmarks.sampling.gpu import measure as on_gpu

        return on_gpu(quick)
    from benchmarks.sampling.cpu import measure as on_cpu

    return on_cpu(quick)


if __name__ == "__main__":
    sys.exit(main(measure, __doc__ or ""))
