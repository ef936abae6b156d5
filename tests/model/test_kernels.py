"""The runner on Triton kernels writes what the plain runner writes: interpreted on a CPU, compiled on a GPU."""

import copy
import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from apart import written_by
from each import each
from engine_run import write as run

from hone.engine.params import SampleParams
from hone.engine.requests import Request, RequestOutput
from hone.engine.runners.choose import make_runner
from hone.engine.runners.cuda.runner import why_not_covered
from hone.engine.runners.torch.runner import TorchRunner
from hone.model.config import DecoderConfig
from hone.model.decoder import Decoder
from hone.model.kernels.tiles import INVARIANT, ROWS, cdiv, most_parts, tile
from hone.model.lora import add_lora, lora_parameters, use_adapter
from hone.rollout.local import LocalSampler

pytest.importorskip("triton", reason="Triton is not installed")
CASES = (
    "llama",
    "every option",
    "few rows, cut prompts",
    "adapters",
    "many prompt tokens",
    "many prompt tokens, adapters",
    "next turn",
)


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """All cases in one process of their own."""
    path = tmp_path_factory.mktemp("kernels") / "found.json"
    written_by(Path(__file__).with_name("kernel_cases.py"), path)
    return json.loads(path.read_text())


@each("name", CASES)
def test_kernels_write_what_the_plain_runner_writes(interpreted: dict[str, Any], name: str):
    found = interpreted[name]
    assert found["tokens"]
    assert found["tops"]
    assert found["written"] >= 8
    assert found["apart"] < 2e-5


def test_the_next_turn_finds_what_was_written_in_memory(interpreted: dict[str, Any]):
    assert interpreted["next turn"]["saved"] == [32, 32]


def test_in_the_invariant_mode_other_batches_give_the_same_bits(interpreted: dict[str, Any]):
    assert interpreted["invariant"]["same"]


def test_tiles_fit_the_buffers_and_the_invariant_one_is_the_same_for_all():
    for rows in (1, 16, 17, 64, 128, 129, 256, 512, 1_024, 8_192):
        for cols, depth in ((576, 576), (3_072, 576), (49_152, 576), (896, 4_864)):
            for double in (False, True):
                t = tile(rows, cols, depth, invariant=False, double=double)
                assert ROWS % t.rows == 0
                assert double or cdiv(cols, t.cols) <= most_parts(cols)
                assert tile(rows, cols, depth, invariant=True, double=double) == INVARIANT


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({}, ""),
        ({"dtype": torch.float32}, "float32"),
        ({"head_dim": 24}, "heads of 24"),
        ({"o_bias": True}, "bias"),
    ],
)
def test_what_the_kernels_do_not_cover_runs_in_plain_torch(changes: dict[str, Any], why: str):
    dtype = changes.pop("dtype", torch.bfloat16)
    config = DecoderConfig(**{"vocab_size": 50, "hidden_size": 32, "head_dim": 16, "num_attention_heads": 2} | {
        "num_key_value_heads": 2, **changes
    })  # fmt: skip
    decoder = Decoder(config).to(dtype)
    assert why in why_not_covered(decoder)
    assert bool(why) == bool(why_not_covered(decoder))
    assert isinstance(make_runner(decoder, max_rows=2, capacity=64), TorchRunner)  # there is no GPU under it


# On a GPU.

BIG = DecoderConfig(
    vocab_size=997, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=6,
    num_key_value_heads=2, head_dim=64, max_position_embeddings=512, initializer_range=0.1, qkv_bias=True,
)  # fmt: skip


def on_gpu(**changes: Any) -> Decoder:
    torch.manual_seed(0)
    return Decoder(BIG).to("cuda", torch.bfloat16)


def mixed() -> list[Request]:
    """Many lengths, groups and settings."""
    generator = torch.Generator().manual_seed(1)
    found: list[Request] = []
    for i in range(120):
        length = (1, 2, 31, 32, 33, 63, 64, 65)[i] if i < 8 else int(torch.randint(1, 200, (1,), generator=generator))
        prompt = tuple(torch.randint(0, 997, (length,), generator=generator).tolist())
        params = SampleParams(
            max_tokens=10 + i % 30, temperature=0.0 if i % 2 else 0.9, top_k=5 if i % 7 == 4 else 0, seed=i,
            top_p=0.9 if i % 11 == 4 else 1.0, repetition_penalty=1.2 if i % 13 == 3 else 1.0, stop_ids=frozenset({3}),
        )  # fmt: skip
        found += [Request(id=10 * i + j, prompt=prompt, params=params) for j in range(4 if i % 5 == 0 else 1)]
    return found


write = partial(run, vocab=997)


@pytest.mark.gpu
@pytest.mark.parametrize("invariant", [False, True])
def test_the_same_run_twice_is_bit_identical_and_the_invariant_one_under_any_schedule(invariant: bool):
    decoder = on_gpu()

    def run(rows: int, memory: int, budget: int, asked: list[Request]) -> dict[int, RequestOutput]:
        runner = make_runner(decoder, max_rows=rows, capacity=256, invariant=invariant, memory=memory)
        return write(runner, asked, budget)

    first = run(64, 1 << 30, 1_000, mixed())
    assert first == run(64, 1 << 30, 1_000, mixed())
    other = run(17, 1 << 23, 333, mixed()[::-1])
    if invariant:
        assert first == other
    else:
        changed = sum(first[i].tokens != other[i].tokens for i in first)
        assert changed <= len(first) // 10


def error(exact: Decoder, asked: list[Request], news: dict[int, RequestOutput]) -> float:
    """How far the log-probs of what was written are from a float64 model's, on average."""
    wrong: list[float] = []
    for request in asked:
        tokens = torch.tensor([[*request.prompt, *news[request.id].tokens]])
        with torch.no_grad():
            logp = exact.logits(exact(tokens)).log_softmax(-1)[0, len(request.prompt) - 1 : -1]
        there = logp.gather(-1, tokens[0, len(request.prompt) :, None]).squeeze(-1)
        wrong += (there - torch.tensor(news[request.id].raw)).abs().tolist()
    return sum(wrong) / len(wrong)


@pytest.mark.gpu
def test_log_probs_on_a_gpu_are_as_near_to_the_truth_as_those_of_plain_torch():
    decoder = on_gpu()
    asked = [r for r in mixed() if not r.params.temperature]
    exact = copy.deepcopy(decoder).double().cpu()
    kernels = error(exact, asked, write(make_runner(decoder, max_rows=64, capacity=256), asked, 1_000))
    plain = error(exact, asked, write(TorchRunner(decoder, max_rows=64, capacity=256), asked, 1_000))
    assert kernels < 1.2 * plain


@pytest.mark.gpu
def test_weights_that_move_or_change_are_seen_by_captured_graphs():
    decoder = on_gpu()
    sampler, params = LocalSampler(decoder), SampleParams(max_tokens=8, temperature=0.0, stop_ids=frozenset())

    def raw() -> list[float]:
        return list(sampler.sample([[1, 2, 3]], n=1, params=params)[0][0].raw_logp)

    first = raw()
    with torch.no_grad():
        decoder.model.norm.weight.mul_(0.5)  # in place, as an optimiser does
    second = raw()
    assert second != first
    for p in decoder.parameters():
        p.data = p.data.clone()
    assert raw() == second


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [3, 20, 70])
def test_an_adapter_on_a_gpu_is_as_near_to_the_truth_as_in_plain_torch(rows: int):
    decoder = on_gpu()
    add_lora(decoder, name="one", rank=8, alpha=16.0, targets=("all-linear",))
    with torch.no_grad():
        for p in lora_parameters(decoder):
            p.normal_(std=0.05)
    switch, exact = partial(use_adapter, decoder), copy.deepcopy(decoder).double().cpu()
    asked = [replace(r, adapter="one") for r in mixed() if not r.params.temperature][:rows]
    with switch("one"), use_adapter(exact, "one"):
        kernels = write(make_runner(decoder, max_rows=rows, capacity=256, switch=switch), asked, 1_000)
        plain = write(TorchRunner(decoder, max_rows=rows, capacity=256, switch=switch), asked, 1_000)
        assert error(exact, asked, kernels) < 1.3 * error(exact, asked, plain)
