"""Device code that the backends of model/ and the runners of engine/ share.

Doors: `fused_weights` (weights that lie side by side), `elementwise` and `tiles` (Triton), `recording` (CUDA graphs),
`cpp` (the C++ library). `elementwise` needs triton: only what requires triton imports it.
May import: model.decoder, model.lora, storage.names.
"""
