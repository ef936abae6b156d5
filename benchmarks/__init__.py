"""Measurements: `python -m benchmarks.NAME [--quick]`; progress on stderr, one JSON object as the last line."""
