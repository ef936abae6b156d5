"""Which runner samples from a decoder, and how many rows its memory allows."""

import os
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import nn

from hone.engine.runner import Runner, Switch
from hone.engine.runners.torch.invariant import BLOCK as INVARIANT_BLOCK
from hone.engine.runners.torch.runner import PlainRunner
from hone.errors import HoneError
from hone.model.decoder import Decoder

SHARE = 0.5  # of the free memory, where no bound was given: activations and others need some too
BLOCK = 32  # columns of a block of the kernels' memory
HAS_TRITON = find_spec("triton") is not None  # it comes with PyTorch for NVIDIA GPUs
MEMINFO = Path("/proc/meminfo")


def make_runner(
    decoder: Decoder,
    *,
    max_rows: int,
    capacity: int,
    switch: Switch | None = None,
    invariant: bool = False,
    memory: int | None = None,
    support: bool = False,
) -> Runner:
    """At most `max_rows` rows of `capacity` columns, and no more than fit into `memory` bytes (None: half the free).

    support: it has to record which tokens could have been drawn.
    """
    room = int(SHARE * free_memory(decoder.device)) if memory is None else memory
    if decoder.device.type == "cuda" and capacity > BLOCK and HAS_TRITON and not support and not uncovered(decoder):
        return _on_kernels(decoder, max_rows, capacity, room, switch=switch, invariant=invariant)
    columns = capacity + 1  # as PlainRunner allocates them
    needed = column_bytes(decoder) * (-(-columns // INVARIANT_BLOCK) * INVARIANT_BLOCK if invariant else columns)
    rows = min(max_rows, room // needed)
    if rows < 1:
        raise _too_little(capacity, needed, room)
    return PlainRunner(decoder, max_rows=rows, capacity=capacity, switch=switch, invariant=invariant)


def _on_kernels(
    decoder: Decoder, max_rows: int, capacity: int, room: int, *, switch: Switch | None, invariant: bool
) -> Runner:
    from hone.engine.runners.cuda.runner import CudaRunner

    each, block = -(-capacity // BLOCK), BLOCK * column_bytes(decoder)
    blocks = min(max_rows * each, room // block)
    if blocks < each:
        raise _too_little(capacity, each * block, room)
    return CudaRunner(
        decoder, max_rows=max_rows, capacity=capacity, num_blocks=blocks, switch=switch, invariant=invariant
    )


def _too_little(capacity: int, needed: int, room: int) -> HoneError:
    return HoneError(
        f"keys and values of one sequence of {capacity} tokens take {needed / 2**20:.1f} MiB, "
        f"{room / 2**20:.1f} MiB are there: shorten prompts or max_tokens, or give more memory"
    )


def column_bytes(decoder: Decoder) -> int:
    """Keys and values of one token in every layer."""
    config, size = decoder.config, decoder.model.embed_tokens.weight.element_size()
    return 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * size


def free_memory(device: torch.device) -> int:
    """Bytes that could be allocated there now."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    if MEMINFO.exists():
        for line in MEMINFO.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return 1024 * int(line.split()[1])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def uncovered(decoder: Decoder) -> str:
    """Why the kernels cannot compute this decoder; "" if they can."""
    c, weight = decoder.config, decoder.model.embed_tokens.weight
    for odd, why in (
        (weight.dtype not in (torch.bfloat16, torch.float16), f"weights in {weight.dtype}"),
        (c.head_dim not in (16, 32, 64, 128, 256), f"heads of {c.head_dim} dimensions"),
        (c.o_bias or c.mlp_bias, "a bias in the output or MLP projections"),
        (decoder.finish is not None, "logits that are changed at the end"),
        (type(decoder.lm_head) is not nn.Linear, "an adapter on the vocabulary head"),
    ):
        if odd:
            return why
    return ""
