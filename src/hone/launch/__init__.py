"""From a recipe to a run: every part is built before the first step, then the loop turns, logs, watches and saves.

Doors: `train` (run), `job` (the objects of a run and its checkpoint), `build` (settings to algorithm, model and
learner), `feeds` (settings to data), `rewards` (settings to rewards), `measure` (held-out evaluation), `replay` (a
skipped update again).
Behind them: `rescue` (steps that go wrong), `signals` (Ctrl-C and SIGTERM).
May import: every room below it.
"""
