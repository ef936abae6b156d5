"""Processes that compute rewards, so that one that hangs or crashes takes nothing else with it.

Doors: `reward_worker.in_workers` puts functions into a pool of processes; `supervisor.supervise` ends a worker whose
time is up and forks another; `process_tree` bounds memory and ends what a worker has started.
May import: types, errors, reward (of the sandbox: cgroups, namespaces and protocol).
"""
