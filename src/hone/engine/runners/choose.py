"""Which runner samples from a decoder, and how many rows its memory allows."""

import os
from pathlib import Path

import torch

from hone.engine.runner import Runner, Switch
from hone.engine.runners.registry import Needs, runners
from hone.engine.runners.torch.runner import TorchRunner, rows_that_fit
from hone.model.decoder import Decoder

SHARE = 0.5  # of the free memory, where no bound was given: activations and others need some too
MEMINFO = Path("/proc/meminfo")


def make_runner(
    decoder: Decoder,
    *,
    max_rows: int,
    capacity: int,
    switch: Switch | None = None,
    invariant: bool = False,
    memory: int | None = None,
    int8: bool = False,
    support: bool = False,
) -> Runner:
    """At most `max_rows` rows of `capacity` columns, and no more than fit into `memory` bytes (None: half the free).

    int8: sample from a copy of the weights in 8 bits. support: record which tokens could have been drawn.
    """
    memory = int(SHARE * free_memory(decoder.device)) if memory is None else memory
    needs = Needs(
        max_rows=max_rows,
        capacity=capacity,
        memory=memory,
        switch=switch,
        invariant=invariant,
        int8=int8,
        support=support,
    )
    for backend in runners():
        if backend.covers(decoder, needs) is None:
            return backend.make(decoder, needs)
    rows = rows_that_fit(decoder, needs)
    return TorchRunner(decoder, max_rows=rows, capacity=capacity, switch=switch, invariant=invariant, int8=int8)


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
