"""One decode step on a GPU, taken apart: the whole, the products alone (no row attends), each kernel, and what memory
would allow."""

import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.form import Row, main, note, say
from benchmarks.replayed import microseconds
from benchmarks.sampling.gpu import bandwidth, limit, make
from hone.engine.params import SampleParams
from hone.engine.runner import PromptChunk, Seat
from hone.engine.runners.cuda import runner as cuda_runner
from hone.engine.runners.cuda.runner import CudaRunner
from hone.model.decoder import Decoder

PARAMS = SampleParams(max_tokens=4_000, stop_ids=frozenset())
REPLAYS = 8


@dataclass(frozen=True)
class Timed:
    """Microseconds of a captured step."""

    whole: float
    products: float  # no row is active: attention ends at once
    kernels: dict[str, float]  # by name; they start before the one ahead has ended, so the sum may exceed the whole


def seats(runner: CudaRunner, rows: int, context: int) -> list[PromptChunk]:
    """Rows that have read `context` tokens, their blocks scattered."""
    width = runner.rows.table.shape[1]
    order = torch.randperm(rows * width, generator=torch.Generator().manual_seed(0)).tolist()
    parts: list[PromptChunk] = []
    for i in range(rows):
        blocks = tuple(order[i * width : (i + 1) * width])
        seat = Seat(row=i, random_id=i, params=PARAMS, limit=4_000, blocks=blocks)
        parts.append(PromptChunk(prompt=(1,) * context, start=context - 1, end=context, blocks=blocks, seats=(seat,)))
    return parts


@torch.inference_mode()
def step(decoder: Decoder, rows: int, context: int, *, invariant: bool = False) -> Timed:
    """Median over batches of replays."""
    capacity = context + 64
    blocks = rows * -(-capacity // cuda_runner.BLOCK)
    runner = CudaRunner(decoder, max_rows=rows, capacity=capacity, num_blocks=blocks, invariant=invariant)
    runner.use(None)
    runner.memory.pool.normal_()
    begun = seats(runner, rows, context)
    runner.rows.seat(begun)
    runner.decode(rows).read()
    (graph,) = runner.graphs.values()

    def replay() -> float:
        return microseconds(graph, REPLAYS)

    whole: list[float] = []
    for _ in range(7):
        runner.rows.seat(begun)
        whole.append(replay())
    runner.rows.seat(begun)
    parts = kernels(replay)
    runner.rows.stop(range(rows))
    return Timed(statistics.median(whole), statistics.median(replay() for _ in range(7)), parts)


def kernels(replay: Callable[[], float]) -> dict[str, float]:
    """Microseconds a step of each kernel, the longest first."""
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        replay()
    spent = {e.key: e.self_device_time_total / REPLAYS for e in seen.key_averages() if e.self_device_time_total}
    return dict(sorted(spent.items(), key=lambda item: -item[1]))


def rows_of(shape: str, rows: int, context: int, rate: float) -> list[Row]:
    decoder = make(shape)
    found = step(decoder, rows, context)
    floor = rows / limit(decoder, rows, context, rate) * 1e6
    layers = decoder.config.num_hidden_layers
    name = f"H200 {shape} {rows} rows at {context}"
    say(f"{name}: {found.whole:.0f} us, products {found.products:.0f}, memory floor {floor:.0f}")
    for kernel, spent in found.kernels.items():
        say(f"{spent:10.1f} us  {kernel[:90]}")
    return [
        note(f"{name}: step", found.whole, unit="us", peer=floor),
        note(f"{name}: products and the rest", found.products, unit="us"),
        note(f"{name}: attention a layer", (found.whole - found.products) / layers, unit="us"),
        *(note(f"{name}: {kernel[:60]}", spent, unit="us") for kernel, spent in found.kernels.items() if spent >= 1),
    ]


def measure(quick: bool) -> list[Row]:
    """Case by case; quick: one batch size."""
    if not torch.cuda.is_available():
        sys.exit("decode_step: there is no GPU here; `python -m benchmarks.sampler` measures a CPU")
    rate = bandwidth()
    cases = [("135M", 256, 192), ("135M", 1_024, 192), ("0.5B", 256, 192)]
    cases += [("135M", 1, 192), ("135M", 64, 192), ("135M", 128, 192), ("135M", 256, 400)]
    return [found for case in cases[: 1 if quick else None] for found in rows_of(*case, rate)]


if __name__ == "__main__":
    raise SystemExit(main(measure, __doc__ or ""))
