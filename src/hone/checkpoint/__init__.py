"""What a run writes and reads again: its folder, its settings, its checkpoints. Nothing is pickled.

Doors: `names` (the name of every file of a run), `files` (folders that are whole or absent, hashes, tensors, which
checkpoint), `state` (what a checkpoint holds), `saver` (writes beside the loop), `run_folder` (lock, and what has to
stay in it), `record` (settings and versions).
`names` and `files` import only errors and config.textfile, and every room may import them.
`state` and `record` may import: config, model, train, dist, log. `saver`: rollout.overlap.
"""
