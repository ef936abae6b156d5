"""A GRPO step's figures: TRL in the same run, on the same model, shapes and precision, with as many updates.

python -m benchmarks.grpo_step [--quick]
"""

import sys
from collections.abc import Sequence

from benchmarks.form import Row, main


def measure(quick: bool) -> Sequence[Row]:
    """The rows of the CPU."""
    from benchmarks.learning.cpu import measure_grpo

    return measure_grpo(quick)


if __name__ == "__main__":
    sys.exit(main(measure, __doc__ or ""))
