"""The runner in C++: the layers and the drawing of the torch runner, for float32 on a CPU.

`layers.py` computes, `structs.py` says where weights and memory are, `runner.py` says what it covers. The library
itself is model/kernels/cpp/.
May import: engine.runner, engine.runners.registry, engine.runners.torch, model.
"""

REQUIRES = ()
