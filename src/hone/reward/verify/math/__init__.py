"""Mathematical answers, compared without floats.

Door: `verdict.math_reward`. In order: `extract` finds the answers, `normalise` spells them one way, `form` takes them
apart, `match` compares part by part. Single expressions are compared as amounts (`amount`), by exact arithmetic
(`arithmetic`), or by SymPy (`expression` says what may reach it) in processes of its own (`workers`, `symbolic`).
May import: types, errors, reward.outcome, reward.verify.answers, reward.verify.choice, reward.workers.supervisor.
"""
