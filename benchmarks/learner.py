"""On a CPU, DPO, SFT and reward-model steps with TRL in the same run; on a GPU, forward and backward passes with
transformers in the same run, against what the chip can do, and what fits its memory beside TRL.

python -m benchmarks.learner [--quick]
"""

import sys
from collections.abc import Iterable

import torch

from benchmarks.form import Row, main


def measure(quick: bool) -> Iterable[Row]:
    """The rows of the machine at hand."""
    if torch.cuda.is_available():
        from benchmarks.learning import gpu

        return gpu.measure_passes(quick)
    from benchmarks.learning import cpu

    return cpu.measure_offline(quick)


if __name__ == "__main__":
    sys.exit(main(measure, __doc__ or ""))
