"""The vocabulary's numbers: log-probs, entropies and KLs of hidden states, a chunk of positions at a time.

Doors: `token_stats` (token_stats) computes them with gradients, `distribution` (HeadRows, LogRows) says what they are.
May import: types, model.backends.registry.
"""
