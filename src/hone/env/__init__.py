"""What an episode is played in: environments and tools, and the processes that they run in.

Doors: `protocol` (what an environment is).
May import: types.
"""
