"""Numbers about a model: pass@k, majority vote and standard errors, and the scaling law of a training budget.

Doors: `sample_metrics.mean_pass_at_k`, `mean_and_error` and `majority_at`; `scaling.optimum` and `scaling.fit`.
May import: types, errors, reward.verify.
"""
