"""One decode step on a GPU, taken apart: the whole, the products alone (no row attends), and what memory would allow.

python -m benchmarks.decode_step [--quick]
"""

import argparse
import json
import statistics
from dataclasses import dataclass

import torch

from benchmarks.form import Row, row, say
from benchmarks.sampling.gpu import bandwidth, limit, make
from hone.demo.summary import machine
from hone.model import cuda_runner
from hone.model.cuda_runner import CudaRunner
from hone.model.decoder import Decoder
from hone.rollout.protocol import SampleParams
from hone.rollout.runner import Part, Seat

PARAMS = SampleParams(max_tokens=4_000, stop_ids=frozenset())
REPLAYS = 8


@dataclass(frozen=True)
class Timed:
    """Microseconds of a captured step."""

    whole: float
    products: float  # no row is active: attention ends at once


def seats(runner: CudaRunner, rows: int, context: int) -> list[Part]:
    """Rows that have read `context` tokens, their blocks scattered."""
    width = runner.rows.table.shape[1]
    order = torch.randperm(rows * width, generator=torch.Generator().manual_seed(0)).tolist()
    parts: list[Part] = []
    for i in range(rows):
        blocks = tuple(order[i * width : (i + 1) * width])
        seat = Seat(row=i, request=i, params=PARAMS, limit=4_000, blocks=blocks)
        parts.append(Part(prompt=(1,) * context, start=context - 1, end=context, blocks=blocks, seats=(seat,)))
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
        torch.cuda.synchronize()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(REPLAYS):
            graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / REPLAYS * 1e3

    whole: list[float] = []
    for _ in range(7):
        runner.rows.seat(begun)
        whole.append(replay())
    runner.rows.stop(range(rows))
    return Timed(statistics.median(whole), statistics.median(replay() for _ in range(7)))


def rows_of(shape: str, rows: int, context: int, rate: float) -> list[Row]:
    decoder = make(shape)
    found = step(decoder, rows, context)
    floor = rows / limit(decoder, rows, context, rate) * 1e6
    layers = decoder.config.num_hidden_layers
    name = f"H200 {shape} {rows} rows at {context}"
    say(f"{name}: {found.whole:.0f} us, products {found.products:.0f}, memory floor {floor:.0f}")
    return [
        row(f"{name}: step", found.whole, unit="us", peer=floor, goal="", ok=True),
        row(f"{name}: products and the rest", found.products, unit="us", goal="", ok=True),
        row(f"{name}: attention a layer", (found.whole - found.products) / layers, unit="us", goal="", ok=True),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one batch size")
    args = parser.parse_args()
    rate = bandwidth()
    cases = [("135M", 256, 192)] if args.quick else [("135M", 256, 192), ("135M", 1_024, 192), ("0.5B", 256, 192)]
    cases += [] if args.quick else [("135M", 1, 192), ("135M", 64, 192), ("135M", 256, 400)]
    rows = [found for case in cases for found in rows_of(*case, rate)]
    print(json.dumps({"rows": rows, "machine": {**machine(), "gpu": torch.cuda.get_device_name()}}))


if __name__ == "__main__":
    main()
