"""The fused backend: layers in few products, attention and vocabulary statistics as Triton kernels, CUDA graphs.

`layer.py` and `fused_linear.py` compute a layer, `shared_attention.py` the attention of rows that share their prompt,
`vocab.py` the vocabulary's statistics, `cuda_graphs.py` replays whole passes, `streams.py` runs two beside each other.
"""

REQUIRES = ("triton",)
