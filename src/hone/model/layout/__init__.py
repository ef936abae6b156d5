"""A batch as the decoder is fed it: padded, packed, or as one list in which a shared prompt stands once.

Doors: `forward` (lines_of, hidden_states, run_passes) lays a batch out and reads it, `rows` (Rows) is such a list and
the attention over it. `rows` imports only the registry of backends: the decoder imports it. `forward` imports the
decoder. May import: types, errors, model.backends.registry, model.config, model.decoder.
"""
