"""Search over a model's own steps, and labels for them.

Doors: `beam.Beam` continues prefixes step by step, and a process model chooses which to keep; `label.Labeller`
labels steps by the share of continuations that verify.
May import: types, errors, data.text, engine.params, rollout.local, reward.
"""
