"""The runner in plain torch: the definition of what every runner computes.

`runner.py` is the runner and keeps what each row is doing, `layers.py` its layers, `kv_cache.py` the KV cache and
attention over it. `invariant.py` and `int8.py` are other layers for it.
May import: engine.draw, engine.params, engine.runner, engine.runners.registry, model, errors.
"""

REQUIRES = ()
