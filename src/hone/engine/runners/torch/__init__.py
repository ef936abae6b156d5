"""The runner in plain torch: the definition of what every runner computes.

`runner.py` is the runner, `layers.py` its layers, `kv_cache.py` the KV cache and attention over it, `rows.py` what each
row is doing. `invariant.py` and `int8.py` are other layers for it.
"""

REQUIRES = ()
