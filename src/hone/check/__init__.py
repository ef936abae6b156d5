"""`hone check`: what can be known of a run before its first step.

Doors: `suite.check` makes every check and returns a `report.Report`; `suite.cheap` makes those that sample nothing;
`rewards.prove` tries a reward on right and wrong answers. `probe` is the run under examination, and `perturb` moves
its weights for a moment. The other modules are the checks: data, text, sampling, learning, update, plan, rewards.
May import: every room below it.
"""
