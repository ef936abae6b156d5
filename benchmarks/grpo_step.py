"""A GRPO step's figures: TRL in the same run, on the same model, shapes and precision, with as many updates.

python -m benchmarks.grpo_step [--quick]
"""

import sys
from collections.abc import Iterable

import torch

from benchmarks.form import Row, main


def measure(quick: bool) -> Iterable[Row]:
    """The rows of the machine at hand."""
    if torch.cuda.is_available():
        from benchmarks.learning import gpu

        return gpu.measure_grpo(quick)
    from benchmarks.learning import cpu

    return cpu.measure_grpo(quick)


if __name__ == "__main__":
    sys.exit(main(measure, __doc__ or ""))
