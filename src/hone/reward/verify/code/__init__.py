"""Programs judged by their tests.

Door: `verdict.code_reward`. `extract` and `parse` find the program in a completion, `tests` reads the task's tests,
`checker` runs tests in one sandbox and the program in another, `settings` are those of a `code:FILE.yaml`.
May import: types, errors, log.samples, data.rows, reward.outcome, reward.sandbox, reward.verify.answers.
"""
