"""Times of the decode kernels for each tile size, to choose model/kernels/tiles.py by. Needs an NVIDIA GPU.

python -m benchmarks.kernels [--quick]: every candidate tile on the shapes of a 135M and a 0.5B model, beside cuBLAS.
"""

import argparse
import itertools
import json
import multiprocessing
import statistics
import sys

import torch

SHAPES = {  # hidden, intermediate, heads, key-value heads, vocabulary
    "135M": (576, 1536, 9, 3, 49152),
    "0.5B": (896, 4864, 14, 2, 151936),
}


def _grid(rows, cols, depths, warps, stages):
    sizes = itertools.product(rows, cols, depths, warps, stages, (False, True))
    return [t for t in sizes if (t[0] + t[1]) * t[2] * t[4] * 2 <= 220_000]


CANDIDATES = {  # rows, columns, depth, warps, stages, whether the copy engine loads
    16: _grid((16,), (16, 32, 64), (64, 128), (4,), (3, 5)),
    64: _grid((16, 64), (32, 64), (64, 128), (4,), (3, 4)),
    128: _grid((64, 128), (32, 64), (64, 128), (4,), (3, 4)),
    256: _grid((64, 128), (32, 64, 128), (64, 128), (4,), (3, 4)),
    512: _grid((64, 128), (32, 64, 128), (64, 128), (4, 8), (3, 4)),
    1024: _grid((64, 128), (64, 128, 256), (64, 128), (4, 8), (3, 4)),
    4096: _grid((128,), (64, 128, 256), (64,), (4, 8), (3, 4)),
}


def products(shape: str) -> dict[str, tuple[str, int, int]]:
    """name -> (kernel, N, K)"""
    D, M, H, KV, V = SHAPES[shape]
    E = D // H
    return {
        "qkv": ("linear", (H + 2 * KV) * E, D),
        "out": ("residual", D, H * E),
        "gated": ("gated", M, D),
        "down": ("residual", D, M),
        "head": ("head", V, D),
    }


def launch(kind, t, x, w, gain, y, rows, N, K, *, warm=False):
    from triton.tools.tensor_descriptor import TensorDescriptor

    from hone.engine.runners.cuda import linear as k

    bm, bn, bk, warps, stages, tma = t
    A, W = (TensorDescriptor.from_tensor(x, [bm, bk]), TensorDescriptor.from_tensor(w, [bn, bk])) if tma else (x, w)
    grid = (-(-rows // bm), -(-N // bn))
    squares = x.new_ones(len(x), 32, dtype=torch.float32) if warm else SQUARES[: len(x)]
    kernel, args, flags = {
        "linear": (k.linear, (A, squares, W, w, w, y, N, K, 16, 1e-5, K, N), {"P": 32, "HAS_BIAS": False}),
        "head": (k.linear, (A, squares, W, w, w, y, N, K, 16, 1e-5, K, N), {"P": 32, "HAS_BIAS": False}),
        "residual": (k.residual, (A, W, w, y, gain, SCALED if not warm else y, squares, 1.0, N, K, K, N), {"P": 32}),
        "gated": (k.gated, (A, squares, W, w, y, N, K, 16, 1e-5), {"P": 32}),
    }[kind]
    flags |= {"TMA": tma, "EVEN": K % bk == 0 and N % bn == 0, "PDL": True, "BM": bm, "BN": bn, "BK": bk}
    options = {"num_warps": warps, "num_stages": stages, "launch_pdl": True}
    if warm:
        kernel.warmup(*args, grid=grid, **flags, **options)
    else:
        kernel[grid](*args, **flags, **options)


def inputs(kind, rows, N, K, copies):
    make = lambda *s: torch.randn(*s, device="cuda", dtype=torch.bfloat16)  # noqa: E731
    rows = -(-rows // 256) * 256
    w = [make(2 * N if kind == "gated" else N, K) * 0.05 for _ in range(copies)]
    y = torch.zeros(rows, N, device="cuda", dtype=torch.float32 if kind == "head" else torch.bfloat16)
    return make(rows, K), w, make(K), y


def compile_some(jobs):
    for kind, t, even in jobs:
        K = 576 if even else 576 + 16
        x, w, gain, y = inputs(kind, 16, 1024, K, 1)
        try:
            launch(kind, t, x, w[0], gain, y, 16, 1024, K, warm=True)
        except Exception as error:  # out of shared memory: the candidate is left out when it is timed
            print(kind, t, type(error).__name__, file=sys.stderr)


def graph_time(fn, repeats: int) -> float:
    """Microseconds a call, from a captured graph that calls it over all weights."""
    torch.cuda.synchronize()  # the other stream must not read what is still being made
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        fn()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            fn()
        graph.replay()
        stream.synchronize()
        times = []
        for _ in range(5):
            a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            a.record(stream)
            graph.replay()
            b.record(stream)
            b.synchronize()
            times.append(a.elapsed_time(b) * 1e3)
    return statistics.median(times) / repeats


def reference(kind, x, w, gain, y, rows):
    x32 = x[:rows].float()
    n = x32 * (16 / x.shape[1] + 1e-5) ** -0.5  # every sum of squares is 1, and there are 16
    if kind in ("linear", "head"):
        return n @ w.float().T
    if kind == "residual":
        return y[:rows].float() + x32 @ w.float().T
    gate, up = (n @ w.float().T).chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


def sweep(shape: str, name: str, rows: int) -> dict:
    kind, N, K = products(shape)[name]
    copies = 3 if name == "head" else max(2, min(30, int(3e8 / (N * K * 2))))
    x, w, gain, y = inputs(kind, rows, N, K, copies)
    global SQUARES, SCALED
    SQUARES, SCALED = torch.ones(len(x), 32, device="cuda"), torch.empty_like(y)
    results = {}
    for t in CANDIDATES[rows]:
        if (kind == "gated" and t[0] * t[1] > 128 * 64) or (name == "head" and t[0] < min(rows, 64)):
            continue
        try:
            y.zero_()
            SQUARES.fill_(1.0)
            launch(kind, t, x, w[0], gain, y, rows, N, K)
            expected = reference(kind, x, w[0], gain, torch.zeros_like(y), rows)
            error = ((y[:rows].float() - expected).norm() / expected.norm()).item()
            if not error < 8e-3:
                results[t] = (float("inf"), f"wrong {error:.1e}")
                continue
            us = graph_time(lambda: [launch(kind, t, x, a, gain, y, rows, N, K) for a in w], copies)  # noqa: B023
            results[t] = (us, f"{error:.0e}")
        except Exception as error:
            results[t] = (float("inf"), type(error).__name__)
    out = torch.empty(len(x), w[0].shape[0], device="cuda", dtype=torch.bfloat16)
    cublas = graph_time(lambda: [torch.mm(x, a.T, out=out) for a in w], copies)
    best = sorted(results.items(), key=lambda kv: kv[1][0])[:4]
    wrong = [(t, e) for t, (us, e) in results.items() if us == float("inf")]
    print(
        f"{shape} {name:5} rows {rows:4}: cuBLAS alone {cublas:6.2f}  "
        + "  ".join(f"{t} {us:.2f}" for t, (us, _) in best),
        f"failed {len(wrong)} {wrong[:1]}",
        flush=True,
    )
    return {
        "shape": shape,
        "name": name,
        "rows": rows,
        "cublas_us": cublas,
        "best": [[list(t), us] for t, (us, _) in best],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--rows", type=int, nargs="*", default=[16, 64, 256, 1024])
    args = parser.parse_args()
    tiles = sorted({t for rows in args.rows for t in CANDIDATES[rows]})
    jobs = [(kind, t, True) for t in tiles for kind in ("linear", "head", "residual", "gated")]
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=compile_some, args=(jobs[i::14],)) for i in range(14)]
    for p in workers:
        p.start()
    for p in workers:
        p.join()
    print("compiled", len(jobs), file=sys.stderr, flush=True)
    rows = [sweep(s, n, r) for s in SHAPES for r in args.rows for n in products(s)]
    print(json.dumps({"rows": rows, "machine": torch.cuda.get_device_name()}))


if __name__ == "__main__":
    main()
