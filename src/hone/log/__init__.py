"""What a run says while it goes: metrics, samples, warnings, progress.

Doors: `stats.Stats` adds up a step's numbers, `stats.Laps` its seconds; `rollouts.describe` says what rollouts show;
`sinks` writes metrics, `samples` and `invalid` what is to be read of rollouts; `monitor.Monitor` warns or stops by the
limits of `limits.LimitSpec`; `progress.Progress` shows a line a step, `progress.say` any other.
May import: types, errors, storage.names. So every room above may import it.
"""
