"""Triton kernels of the decode step. Each does what model/decoder.py does, on rows of a batch with paged KV memory."""
