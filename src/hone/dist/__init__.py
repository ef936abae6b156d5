"""The processes of torchrun as ranks. With one process, a share is everything and a sum is the number itself.

Doors: `collect` (shares, sums, agreement between ranks), `join` (how ranks find each other), `spread` (weights in
parts).
May import: errors, model.decoder (for its layers), model.formats.foreign.
"""
