"""The kernels draw what draw.py draws: interpreted on a CPU, compiled on a GPU; and they compile where none is."""

from pathlib import Path
from typing import Any

import pytest
import torch
from apart import written_by
from draw_cases import CASES, NAMES, READ, Case, expected, launched
from each import each
from safetensors.torch import load_file
from torch import Tensor

from hone.engine.params import SampleParams
from hone.engine.runners.cuda.draw_state import DrawOut, DrawState, chunk_of
from hone.errors import HoneError

triton = pytest.importorskip("triton", reason="Triton is not installed")
torch.set_num_threads(1)


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    """All cases in one process of their own, for it must know before Triton is imported."""
    path = tmp_path_factory.mktemp("drawn") / "drawn.safetensors"
    written_by(Path(__file__).with_name("draw_cases.py"), path)
    return load_file(path)


def check(case: Case, got: dict[str, Tensor], atol: float) -> None:
    want = expected(case)
    assert got["flag"].tolist() == want["flag"].tolist()
    fine = torch.ones(len(case.rows), dtype=torch.bool)
    fine[[row for row, value in case.bad.items() if value != -torch.inf]] = False
    assert not got["logp"][:, ~fine].isfinite().any()
    assert ((got["token"] >= 0) & (got["token"] < case.vocab)).all()
    assert got["token"][:, fine].tolist() == want["token"][:, fine].tolist()
    for name in ("logp", "raw"):
        torch.testing.assert_close(got[name][:, fine], want[name][:, fine], rtol=1e-6, atol=atol)
    written = (want["flag"] > 0).sum(0)
    seated = torch.tensor([row is not None for row in case.rows])
    assert got["state count"].tolist() == (case.start * seated + written).tolist()
    assert got["state position"].tolist() == (len(READ[: case.vocab]) * seated + written).tolist()
    assert got["state active"].tolist() == (seated & ~(want["flag"] == 2).any(0)).int().tolist()
    last = torch.where(written > 0, want["token"].gather(0, (written - 1).clamp(min=0)[None])[0], 0.0)
    assert got["state token"][fine].tolist() == last[fine].tolist()


@each("name", CASES)
def test_interpreted_kernels_draw_what_torch_draws(name: str, interpreted: dict[str, Tensor]):
    got = {key.removeprefix(f"{name}: "): x for key, x in interpreted.items() if key.startswith(f"{name}: ")}
    assert set(NAMES) <= set(got)
    check(CASES[name], got, atol=1e-5)


def test_cases_end_by_stop_token_and_by_limit():
    # what the comparison above rests on: rows end, others go on, and some write nothing
    assert {0, 1, 2} == set(expected(CASES["stop tokens"])["flag"].flatten().tolist())
    assert expected(CASES["a limit"])["flag"][:, 0].tolist() == [1, 1, 2, 0]


LARGE = {
    "49,152 tokens": Case(vocab=49_152, rows=[{}, {"temperature": 0.7}, {"temperature": 0.0}, None] * 64, scale=2.0),
    "151,936 tokens": Case(vocab=151_936, rows=[{}, {"temperature": 0.7}] * 8, scale=2.0),
    "an odd vocabulary": Case(vocab=50_257, rows=[{}, {"top_p": 0.9}, {"top_k": 50}, {"min_p": 0.05}] * 8),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*CASES, *LARGE])
def test_compiled_kernels_draw_what_torch_draws(name: str):
    case = {**CASES, **LARGE}[name]
    if name not in LARGE:
        check(case, launched(case, "cuda"), atol=1e-5)
        return
    got, want = launched(case, "cuda"), expected(case)
    same = got["token"] == want["token"]
    # a number within rounding of the edge between two tokens may fall on the other side
    assert (~same).sum() <= max(1, same.numel() // 200)
    torch.testing.assert_close(got["logp"][same], want["logp"][same], rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(got["raw"][same], want["raw"][same], rtol=1e-5, atol=2e-5)


@pytest.mark.gpu
def test_a_row_on_the_gpu_draws_what_it_would_draw_alone():
    settings: list[dict[str, Any]] = [{"temperature": 0.8}, {"top_p": 0.9}, {"top_k": 20, "min_p": 0.01}]
    whole = Case(vocab=49_152, rows=settings * 40, dtype=torch.bfloat16)
    together = launched(whole, "cuda")
    again = launched(whole, "cuda")
    few = launched(Case(vocab=49_152, rows=[*settings, *[None] * 117], dtype=torch.bfloat16), "cuda")
    for name in NAMES:
        assert torch.equal(together[name], again[name])
        assert torch.equal(together[name][:, :3], few[name][:, :3])


@pytest.mark.gpu
def test_a_launch_can_be_captured_and_replayed():
    from hone.engine.runners.cuda.draw import launch

    case = Case(vocab=9001, rows=[{"temperature": 0.8}, {"top_p": 0.9}, None, {"temperature": 0.0}] * 4, steps=1)
    logits = case.logits()[0].cuda()
    want, states = [], []
    for captured in (False, True):
        state, out = DrawState.empty(16, 9001, "cuda"), DrawOut.empty(16, "cuda")
        launch(logits, state, out, 16, restrict=True, penalty=False, bias=False)  # compiled; no row is seated
        graph = torch.cuda.CUDAGraph()
        if captured:
            with torch.cuda.graph(graph):
                launch(logits, state, out, 16, restrict=True, penalty=False, bias=False)
        for row, p in enumerate(case.params):
            if p is not None:
                state.seat(row, p, request=row, limit=9, read=READ)
        tokens = []
        for _ in range(5):
            graph.replay() if captured else launch(logits, state, out, 16, restrict=True, penalty=False, bias=False)
            tokens.append(out.token.tolist())
        want.append(tokens)
        states.append(state.count.tolist())
    assert want[0] == want[1]
    assert states[0] == states[1] == [0 if p is None else 5 for p in case.params]


@pytest.mark.slow
@pytest.mark.parametrize("marked", [False, True])
@pytest.mark.parametrize("vocab", [49_152, 151_936])
def test_kernels_compile_for_a_gpu_that_is_not_here(marked: bool, vocab: int, tmp_path: Path, monkeypatch):
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from hone.engine.runners.cuda import draw as draw_triton

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    size = chunk_of(vocab)
    chunks = -(-vocab // size)
    fixed = {
        "V": vocab, "HAS_BIAS": marked, "HAS_SEEN": marked, "SIZE": size, "chunks": chunks,
        "CHUNKS": triton.next_power_of_2(chunks), "RESTRICT": marked, "INNER": 128, "MANY": 8,
    }  # fmt: skip
    other = {"stride": "i32", "plane": "i32", "LOGITS": "*bf16", "SEED": "*i64", "REQUEST": "*i64"}
    other |= {"BIAS": "*fp32", "SEEN": "*u8"} if marked else {"BIAS": "*bf16", "SEEN": "*bf16"}
    whole = {"ACTIVE", "LOW", "TOP_K", "TOKEN", "POSITION", "COUNT", "LIMIT", "STOPS_", "OUT_TOKEN", "OUT_FLAG"}
    for kernel in (draw_triton._scan, draw_triton._cut, draw_triton._pick):
        names = kernel.arg_names
        kinds = {name: other.get(name, "*i32" if name in whole else "*fp32") for name in names}
        constants = {(names.index(name),): value for name, value in fixed.items() if name in names}
        source = ASTSource(
            fn=kernel, signature={n: "constexpr" if n in fixed else kinds[n] for n in names}, constexprs=constants
        )
        assert triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["cubin"]


def test_a_state_refuses_what_it_cannot_hold():
    state = DrawState.empty(2, 10, "cpu")
    plain = {"max_tokens": 1, "stop_ids": frozenset()}
    for settings, words in (
        ({"bias": {1: 1.0}}, "bias=True"),
        ({"banned": frozenset({1})}, "bias=True"),
        ({"repetition_penalty": 2.0}, "seen=True"),
    ):
        with pytest.raises(ValueError, match=words):
            state.seat(0, SampleParams(**{**plain, **settings}), request=0, limit=1, read=())
    with pytest.raises(HoneError, match="9 stop tokens are more than a GPU looks for: give at most 8"):
        state.seat(0, SampleParams(max_tokens=1, stop_ids=frozenset(range(9))), request=0, limit=1, read=())
