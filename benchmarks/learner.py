"""DPO, SFT and reward-model steps: TRL in the same run, on the same model, shapes and precision.

python -m benchmarks.learner [--quick]
"""

import sys
from collections.abc import Sequence

from benchmarks.form import Row, main


def measure(quick: bool) -> Sequence[Row]:
    """The rows of the CPU."""
    from benchmarks.learning.cpu import measure_offline

    return measure_offline(quick)


if __name__ == "__main__":
    sys.exit(main(measure, __doc__ or ""))
