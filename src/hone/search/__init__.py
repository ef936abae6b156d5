"""Search and sampling that a model's own steps are judged or chosen by.

Doors: `beam.Beam` continues beginnings step by step, and a process model says which to go on with; `label.Labeller`
labels steps by the share of continuations that verify.
May import: types, errors, data.text, engine.params, rollout.local, reward.
"""
