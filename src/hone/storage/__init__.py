"""Files and folders on disk, of whatever is in them. Nothing is pickled.

Doors: `names` (the name of every file and folder that a run writes), `files` (folders that are whole or absent, hashes,
tensors, which checkpoint is the newest), `textfile` (texts that others wrote).
May import: errors.
"""
