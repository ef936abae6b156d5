"""A trained model put to work: sample from it, score completions, evaluate it, label steps.

Doors: `model.load` and `model.Model` (public as `hone.load` and `hone.Model`), `evaluate.evaluate` (`hone.evaluate`),
`rank.evaluate_ranked` (best of n by a judge), `label.label_steps` (data for a process reward model),
`calibrate.calibrate` (a reward model's mean and deviation), `defaults.Sampling` (how to sample).
May import: algo, data, engine, rollout, model, reward, search, eval, log, storage, launch, types, errors.
"""
