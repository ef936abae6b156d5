"""Do the fused layers earn their place? A training pass beside torch.compile and Liger's kernels, on a GPU.

    python -m benchmarks.fused_layers [--quick]

Every side computes the same layers on the same tokens, forward and backward, in bfloat16, with the same attention of
torch. Liger (https://github.com/linkedin/Liger-Kernel) is found if it is installed or lies in build/peers. The goal is
the project's own: what is not 10 % ahead of the best peer goes.
"""

import copy
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import MethodType

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.form import Row, main, note, row, say
from benchmarks.side_by_side import in_turns
from hone.errors import HoneError
from hone.model.decoder import MLP, Attention, Decoder, RMSNorm

sys.path.append(str(Path(__file__).resolve().parent.parent / "build/peers"))
ROWS, LENGTH = 16, 1_024
TIMES = 10  # replays that are timed together
AHEAD = 1.1  # times as fast as the best peer


def passes(decoder: Decoder, x: Tensor) -> Callable[[], Tensor]:
    """Forward and backward of all layers."""

    def run() -> Tensor:
        decoder.zero_grad(set_to_none=True)
        out = decoder.from_embeddings(x)
        out.backward(torch.ones_like(out))
        return out

    return run


def captured(run: Callable[[], Tensor]) -> Callable[[], None]:
    """The pass as one CUDA graph: a small model's layers are done before the host has launched the next ones, and how
    fast the host is shall decide nothing here. Ten replays a call."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()

    def replay() -> None:
        for _ in range(TIMES):
            graph.replay()

    return replay


def plainly(decoder: Decoder) -> Decoder:
    """A copy whose layers are computed as they are defined."""
    other = copy.deepcopy(decoder)
    other.backends = ()
    return other


def compiled(decoder: Decoder, mode: str) -> Decoder:
    """The plain layers, compiled by torch one at a time: they are alike, so that one compilation serves all."""
    other = plainly(decoder)
    for layer in other.model.layers:
        layer.compile(mode=mode)
    return other


def with_liger(decoder: Decoder) -> Decoder:
    """The plain layers with Liger's norm, rotation and gate, as its own patches of Llama put them there."""
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction  # pyright: ignore[reportMissingImports]
    from liger_kernel.ops.rope import LigerRopeFunction  # pyright: ignore[reportMissingImports]
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction  # pyright: ignore[reportMissingImports]

    def norm(self: RMSNorm, x: Tensor) -> Tensor:
        return LigerRMSNormFunction.apply(x, self.weight, self.eps, 0.0, "llama", False)

    def mlp(self: MLP, x: Tensor) -> Tensor:
        return self.down_proj(LigerSiLUMulFunction.apply(self.gate_proj(x), self.up_proj(x)))

    def attention(self: Attention, x: Tensor, rope: tuple[Tensor, Tensor], mask: None, cache: None) -> Tensor:
        B, T, _ = x.shape
        q, k, v = (p(x).view(B, T, -1, self.E).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        q, k = LigerRopeFunction.apply(q, k, rope[0].reshape(1, T, -1), rope[1].reshape(1, T, -1))
        return self.o_proj(self.attend(q, k, v, mask))

    other = plainly(decoder)
    for kind, forward in ((RMSNorm, norm), (MLP, mlp), (Attention, attention)):
        for module in (m for m in other.modules() if isinstance(m, kind)):
            module.forward = MethodType(forward, module)
    return other


def layers(shape: str, *, quick: bool) -> Iterator[Row]:
    """One row for the time of a pass, one for its memory, and what each peer took."""
    from benchmarks.sampling.gpu import make

    decoder = make(shape)
    decoder.backends = ("fused",)
    x = torch.randn(ROWS, LENGTH, decoder.config.hidden_size, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    mode = "default" if quick else "max-autotune-no-cudagraphs"  # the graph is captured here, for every side alike
    sides = {
        "Hone": decoder,
        "plain torch": plainly(decoder),
        "Liger": with_liger(decoder),
        f"torch.compile, {mode}": compiled(decoder, mode),
    }
    runs, peaks, gap = {name: passes(side, x) for name, side in sides.items()}, dict[str, float](), dict[str, float]()
    exact = _logps(plainly(decoder).float(), x.detach().float())
    for name, run in runs.items():
        say(f"{shape}: {name}")
        for _ in range(2):
            run()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        torch.cuda.synchronize()
        peaks[name] = (torch.cuda.max_memory_allocated() - before) / 1e9
        gap[name] = float((_logps(sides[name], x.detach()) - exact).abs().mean())
    replays = {name: captured(run) for name, run in runs.items()}
    took = in_turns(replays, repeats=5 if quick else 15, warm=3, settle=torch.cuda.synchronize)
    peers = [name for name in took if name != "Hone"]
    best = min(peers, key=took.__getitem__)
    yield row(
        f"H200 {shape}, layers of {ROWS} x {LENGTH} tokens, passes a second beside the best peer ({best})",
        TIMES / took["Hone"], peer=TIMES / took[best], unit="1/s", goal=f">= {AHEAD} x",
        ok=took[best] >= AHEAD * took["Hone"],
    )  # fmt: skip
    for name in took:
        yield note(
            f"{shape}, {name}: milliseconds a pass",
            1e3 * took[name] / TIMES,
            unit="ms",
            peer=1e3 * took["Hone"] / TIMES,
        )
        yield note(f"{shape}, {name}: memory a pass adds", peaks[name], unit="GB", peer=peaks["Hone"])
        yield note(f"{shape}, {name}: mean log-prob gap to float32", gap[name], unit="nats")


@torch.no_grad()
def _logps(decoder: Decoder, x: Tensor) -> Tensor:
    """The log-probs of one token at each place of the first two rows."""
    head = decoder.lm_head.weight
    return F.log_softmax((decoder.from_embeddings(x[:2].to(head.dtype)) @ head.t()).float(), -1)[..., 7]


def measure(quick: bool) -> Iterable[Row]:
    """The rows of a GPU; there are none of a CPU, where these layers are not used."""
    if not torch.cuda.is_available():
        raise HoneError("the fused layers are a GPU's: run this on a machine with an NVIDIA GPU")
    for shape in ("135M", "0.5B"):
        yield from layers(shape, quick=quick)


if __name__ == "__main__":
    sys.exit(main(measure, __doc__ or ""))
