"""Faults of the fast ways through a model: fused layers, lists without padding, recorded passes, C++."""

from benchmarks.catalogue.fault import fault

GRAPHED, FILLED, JOINED = (
    "model/backends/fused/cuda_graphs.py",
    "model/backends/fused/graph_memory.py",
    "model/backends/fused/fused_linear.py",
)
ELEMENTWISE, CAUSAL = "model/backends/fused/elementwise.py", "model/backends/fused/shared_attention.py"

PASSES = (
    # --- fused layers ---
    fault(
        "the residual's own gradient is left out at a norm", "contract", "learner", JOINED,
        old="plus=passed.contiguous(), again=True", new="again=True",
        tests="model/test_fast.py",
    ),
    fault(
        "the norm's gradient forgets that its scale depends on x", "contract", "learner", ELEMENTWISE,
        old="        dx = (g - n * (g * n).mean(-1, keepdim=True)) * scale", new="        dx = g * scale",
        tests="model/test_fast.py",
    ),
    fault(
        "queries and keys are not turned back", "contract", "learner", ELEMENTWISE,
        old="        return _rotated_(joined, cos, -sin, joined.shape[1] - dv_NKE.shape[1])",
        new="        return _rotated_(joined, cos, sin, joined.shape[1] - dv_NKE.shape[1])",
        tests="model/test_fast.py",
    ),
    fault(
        "an adapter's gradient lacks its scale", "pain 9", "learner", "model/kernels/fused_weights.py",
        old="(given.t() @ h).mul_(low.scale)]", new="(given.t() @ h)]",
        tests="model/test_fast.py",
    ),
    # --- lists ---
    fault(
        "rows of different prompts share their beginning", "contract", "learner", "model/rows.py",
        old="        same = tokens_BW[others, :width] == tokens_BW[first[others], :width]",
        new="        same = np.broadcast_to(np.arange(width) < 2, (len(others), width))",
        tests="model/test_shared.py",
    ),
    fault(
        "a prompt that rows share learns from the first of them alone", "contract", "learner", CAUSAL,
        old="    for n in range(tl.load(BEGIN + row), tl.load(BEGIN + row + 1)):", new="    for n in range(0, 0):",
        tests="model/test_shared_attention.py",
    ),
    fault(
        "a row sees one token of another row after their prompt", "contract", "learner", CAUSAL,
        old="        x = tl.where(key < common, x, nothing)", new="        x = tl.where(key <= common, x, nothing)",
        tests="model/test_shared_attention.py",
    ),
    fault(
        "tokens that fill a list up are answered by nobody", "contract", "learner", "model/rows.py",
        old="    start = np.minimum(U + TILE * (np.arange(R + 1) - B), size)",
        new="    start = np.full(R + 1, U)",
        tests="model/test_spans.py",
    ),
    fault(
        "a filled-up list ends inside the last row", "contract", "learner", FILLED,
        old="        start=torch.cat([spans.start, ends]),", new="        start=torch.cat([spans.start[:-1], ends]),",
        tests="model/test_graphed.py",
    ),
    # --- recordings ---
    fault(
        "a recorded pass does not see weights that moved", "pain 15", "learner", GRAPHED,
        old="    places = tuple([(p.data_ptr(), p.requires_grad) for p in graphs.weights])",
        new="    places = tuple([p.requires_grad for p in graphs.weights])",
        tests="model/test_graphed.py",
    ),
    fault(
        "a recorded pass keeps the adapter that was on", "pain 9", "learner", GRAPHED,
        old="tuple([m.selected if m.enabled else None for m in graphs.adapters])",
        new="tuple([m.selected for m in graphs.adapters])",
        tests="model/test_graphed.py",
    ),
    fault(
        "a second pass overwrites what the first keeps for its gradient", "contract", "learner", GRAPHED,
        old="        if graphs.full or (_needs_grad(decoder) and graphs.busy()):", new="        if graphs.full:",
        tests="model/test_graphed.py",
    ),
    fault(
        "gradients are handed out where the next replay writes", "contract", "learner", GRAPHED,
        old="        copies = torch._foreach_mul(found.totals, 1.0) if found.totals else []  # pyright: ignore",
        new="        copies = [x.detach() for x in found.totals]",
        tests="model/test_graphed.py",
    ),
    # --- C++, which each fault compiles anew ---
    fault(
        "the sampler adds up what attention weighs in another order than the learner", "pain 15", "sampler",
        "model/kernels/cpp/lanes.h",
        old="    for (int step = K; step < LANES; step *= 2) {",
        new="    for (int step = LANES / 2; step >= K; step /= 2) {",
        tests="model/test_same_bits.py",
    ),
    fault(
        "the vocabulary's last tokens, of no whole panel, have no logits", "contract", "learner",
        "model/kernels/cpp/head.cpp",
        old="whole + c < V ? weight[(whole + c) * D + k] : 0.0f;", new="0.0f;",
        tests="model/test_native_head.py",
    ),
)  # fmt: skip
