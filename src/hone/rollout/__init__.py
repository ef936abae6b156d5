"""From tasks to scored rollouts: the sampler protocol, who implements it, and the supply that the loop asks.

Doors: `supply` (tasks to groups of rollouts, for the loop, now or one iteration ahead), `local` (the sampler in this
process). Behind them: `overlap` (rewards while the sampler goes on), `rollout_file` (rollouts in a checkpoint).
May import: engine, data, dist, log, algo.table, model.decoder, reward.outcome, storage.names, types, errors.
"""
