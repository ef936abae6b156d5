"""The kernels compute what vocab/distribution.py computes in float64: interpreted on a CPU, compiled on a GPU."""

from pathlib import Path
from typing import Any

import pytest
import torch
from apart import written_by
from each import each
from safetensors.torch import load_file
from torch import Tensor
from vocab_cases import SETTINGS, case, on, outcome, outcomes, support_of

from hone.engine.params import SampleParams
from hone.model.vocab import distribution
from hone.model.vocab.distribution import HeadRows
from hone.model.vocab.token_stats import token_stats

triton = pytest.importorskip("triton", reason="Triton is not installed")
torch.set_num_threads(1)


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    """All cases in one process of their own, for it must know before Triton is imported."""
    path = tmp_path_factory.mktemp("vocab") / "found.safetensors"
    written_by(Path(__file__).with_name("vocab_cases.py"), path)
    return load_file(path)


def check(name: str, got: dict[str, Tensor]) -> None:
    chunk, upstream = case(**SETTINGS[name])
    want = outcome(distribution, on(chunk, "cpu", torch.float64), upstream)
    # a logit's rounding is a number's error: float32's eps times the greatest
    scale = max(1.0, chunk.logits[chunk.logits.isfinite()].abs().max().item() / 30)
    half = chunk.logits.dtype != torch.float32
    for what, value in want.items():
        assert not got[what].isnan().any(), what
        close = {"rtol": 1e-2, "atol": 2e-3} if half and what[0] == "d" else {"rtol": 2e-5, "atol": 2e-5 * scale}
        torch.testing.assert_close(got[what].double(), value, **close, msg=lambda m, w=what: f"{w}: {m}")


@each("name", SETTINGS)
def test_interpreted_kernels_compute_what_torch_computes(name: str, interpreted: dict[str, Tensor]):
    got = {key.removeprefix(f"{name}: "): x for key, x in interpreted.items() if key.startswith(f"{name}: ")}
    assert got
    check(name, got)


@pytest.mark.slow
@pytest.mark.parametrize("compared", [False, True])
def test_kernels_compile_for_a_gpu_that_is_not_here(compared: bool, tmp_path: Path, monkeypatch):
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from hone.model.backends.fused import vocab

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    flags = dict.fromkeys(("HAS_ENTROPY", "HAS_REF", "HAS_OLD", "CUT", "OLD_GIVEN"), compared)
    size = vocab.COMPARED_SIZE if compared else vocab.SIZE
    fixed: dict[str, Any] = {**flags, "HAS_LOGP": True, "REF_GIVEN": False, "SIZE": size}
    kinds = {"X": "*bf16", "REF": "*bf16", "TARGET": "*i64", "V": "i32", "stride": "i32", "blocks": "i32"}
    kinds |= dict.fromkeys(("inverse", "ref_inverse", "old_inverse"), "fp32")
    for kernel in (vocab.vocab_stats, vocab.vocab_grad):
        names = kernel.arg_names
        constants = {(names.index(name),): value for name, value in fixed.items() if name in names}
        signature = {name: "constexpr" if name in fixed else kinds.get(name, "*fp32") for name in names}
        source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
        options = {"num_warps": vocab.WARPS}
        assert triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["cubin"]


# On a GPU.


@pytest.mark.gpu
def test_compiled_kernels_compute_what_torch_computes():
    from hone.model.backends.fused import vocab

    found = dict(outcomes(vocab, "cuda"))
    for name in SETTINGS:
        check(name, {key.removeprefix(f"{name}: "): x for key, x in found.items() if key.startswith(f"{name}: ")})


def big(dtype: torch.dtype, N: int = 700, D: int = 64, V: int = 49_152) -> tuple[Tensor, ...]:
    """Hidden states, head and targets, and those of a reference."""
    g = torch.Generator().manual_seed(0)
    h, w, r = (torch.randn(*shape, generator=g) for shape in ((N, D), (V, D), (N, D)))
    targets = torch.randint(0, V, (N,), generator=g)
    return (*(x.to("cuda", dtype) for x in (h, w * 0.3, h + 0.1 * r)), targets.cuda())


@pytest.mark.gpu
@pytest.mark.parametrize("restrict", [None, {"top_k": 40}, {"top_p": 0.9}])
@pytest.mark.parametrize("chunk", [None, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_statistics_on_a_gpu_against_float64(dtype: torch.dtype, chunk: int | None, restrict: dict[str, Any] | None):
    setting = None if restrict is None else SampleParams(max_tokens=1, stop_ids=frozenset(), **restrict)
    h, w, r, targets = big(dtype)
    support = None if setting is None else support_of((h.float() @ w.float().T), setting).to(h.device)
    want = frozenset({"logp", "entropy", "ref_kl"} if restrict is None else {"entropy"})
    found = []
    for kind in (dtype, torch.float64):
        hidden, weight = h.to(kind).requires_grad_(), w.to(kind).requires_grad_()
        ref = HeadRows(r.to(kind), w.to(kind))
        got = token_stats(
            hidden, weight, targets, want=want, chunk=chunk, against={"ref_kl": ref}, support=support
        )  # fmt: skip
        total = sum((x.sum() for x in got.values()), torch.zeros((), device="cuda"))
        found.append((got, *torch.autograd.grad(total, (hidden, weight))))
    (got, *grads), (exact, *exact_grads) = found
    loose = 0.05 if dtype == torch.bfloat16 else 1e-4
    for name in want:
        assert (got[name] - exact[name]).abs().mean() < loose, name
    for a, b in zip(grads, exact_grads, strict=True):
        assert a.dtype == dtype
        assert (a.double() - b).norm() < loose * b.norm()


@pytest.mark.gpu
def test_a_target_outside_the_vocabulary_is_nan_on_a_gpu():
    h, w, _, targets = big(torch.bfloat16, N=3)
    targets[1] = len(w)
    assert token_stats(h, w, targets, want=frozenset({"logp"}))["logp"].isnan().tolist() == [False, True, False]
