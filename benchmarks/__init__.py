"""Measurements: `python -m benchmarks.NAME [--quick]`; progress on stderr, one JSON object as the last line."""

import os

# before torch, as `hone` does: threads that wait by spinning are slow on cores that others use too
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
