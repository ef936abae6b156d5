"""The native backend: layers and vocabulary head of small models on a CPU, in C++.

`layer.py` computes a layer at a time, `stack.py` all layers of a small decoder at once, `vocab.py` the head.
`calls.py` calls the library's functions for a layer; the library itself is kernels/cpp/. Where there is no compiler the
backend covers nothing.
May import: model (but no other backend).
"""

REQUIRES = ()
