"""The runner on an NVIDIA GPU: Triton kernels over a paged KV cache, launches captured as CUDA graphs.

`runner.py` is the runner and says what it covers; `step.py`, `large.py`, `attention_launch.py` launch the kernels of
`linear.py`, `attention_kernels.py` and `prefill.py`; `draw.py` draws on the device; `rows.py`, `draw_state.py`,
`prompts.py` lay out what they read, and `weights.py` gives them the decoder's own tensors.
May import: engine.params, engine.runner, engine.runners.registry, engine.runners.torch, model, errors.
"""

REQUIRES = ("triton",)
