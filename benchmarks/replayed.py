"""The time of a recorded CUDA graph, by the device's own clock."""

import torch


def microseconds(graph: torch.cuda.CUDAGraph, times: int) -> float:
    """Of one replay, among so many one after the other."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    for _ in range(times):
        graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / times * 1e3
