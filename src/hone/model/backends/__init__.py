"""Backends: faster ways to compute what the plain code of model/ defines.

Every folder here is a backend. Its `__init__.py` says in REQUIRES which packages it needs, and its `backend.py` lists
in BACKENDS what it computes: layers, the attention of rows, the vocabulary's statistics, whole passes. Each of these
says what it covers. Delete a folder and everything still works, slower.
Doors: `registry` (Backend, offering, second_order). The registry imports nothing of hone, and nobody imports a
backend by name. May import: model (in the backends).
"""
