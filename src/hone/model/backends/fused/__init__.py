"""The fused backend: layers in few products, attention and vocabulary statistics as Triton kernels, CUDA graphs.

`fused_linear.py` computes a layer, `shared_attention.py` the attention of rows that share their prompt,
`elementwise.py` norm, rotation and gate, `vocab.py` the vocabulary's statistics. `cuda_graphs.py` replays whole passes,
`graph_memory.py` is the memory that they read, `streams.py` runs two beside each other.
May import: model (but no other backend).
"""

REQUIRES = ("triton",)
