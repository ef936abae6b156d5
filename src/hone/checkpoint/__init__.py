"""What a run saves and reads again: its folder, its settings, its checkpoints. Nothing is pickled.

Doors: `state` (what a checkpoint holds), `saver` (writes beside the loop), `run_folder` (lock, and what has to stay in
it), `record` (settings and versions). Names and whole-or-absent folders are those of `storage`.
May import: config, model, train, data.text, dist, log, storage, rollout.overlap, errors.
"""
