"""Backends: faster ways to compute what the plain code of model/ defines.

Every folder here is a backend. REQUIRES in its `__init__.py` names the packages that it needs. BACKENDS in its
`backend.py` lists what it computes: layers, the attention of rows, the vocabulary's statistics, whole passes. The
`covers` of each returns a reason why it cannot compute something, or None. Without a folder everything works, slower.
Doors: `registry` (Backend, offering, second_order). The registry imports nothing of hone, and nobody imports a
backend by name. May import: model (in the backends).
"""
