"""Mutants of algo/ that no test can or need kill, each with the reason. The program counts them apart, and says so when
one is killed after all or no longer exists."""

# No input tells them from the original.
EQUIVALENT: dict[str, str] = {}

# They differ, but in nothing that is promised.
ACCEPTED: dict[str, str] = {}
