"""Runners: what reads prompts and writes tokens with a model's weights and a KV cache.

Every folder is a runner. Its `__init__.py` says in REQUIRES which packages it needs, and its `runner.py` lists in
BACKENDS what it covers. torch/ is the definition and takes the rest. Delete another folder and everything still works,
slower.
Doors: `choose` (make_runner), `registry`. Only `choose` and the other runners import torch/; nobody imports
another runner by name.
May import: engine, model, errors.
"""
