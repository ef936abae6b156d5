"""From rollouts or rows to a weight update.

Doors: `annotate` (columns that forward passes fill), `update` (credit, weights of the loss, one optimiser step, and
what it shows), `learner` (what holds the weights and cuts a batch), `trust_region` (TRPO's step).
Behind them: `optim` (AdamW, schedules, float32 copies), `guard` (updates that are not finite), `shards` (weights spread
over ranks), `threads` (what the host gives to a run).
May import: algo, data.collate, model, dist, log.stats, storage, types, errors.
"""
