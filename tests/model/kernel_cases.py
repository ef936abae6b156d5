"""What the kernels compute in Triton's interpreter, against the plain runner; run as a program of its own, since Triton
must know before it is imported."""

import json
import sys
from dataclasses import replace
from functools import partial
from typing import Any

import interpreted  # noqa: F401 (before Triton)
import torch
from engine_run import go
from engine_run import write as run

from hone.engine.engine import Engine
from hone.engine.params import SampleParams
from hone.engine.requests import Request, RequestOutput
from hone.engine.runner import Runner
from hone.engine.runners.cuda import large
from hone.engine.runners.cuda.runner import CudaRunner
from hone.engine.runners.torch.runner import TorchRunner
from hone.model.config import DecoderConfig
from hone.model.decoder import Decoder
from hone.model.lora import add_lora, lora_parameters, use_adapter

VOCAB = 61
write = partial(run, vocab=VOCAB)
CONFIG = DecoderConfig(
    vocab_size=VOCAB, hidden_size=40, intermediate_size=56, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, max_position_embeddings=128, initializer_range=0.2,
)  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"num_attention_heads": 3, "num_key_value_heads": 1},
    "every option": {"qkv_bias": True, "tie_word_embeddings": False, "qk_norm": True, "windows": (0, 20)},
}


def model(name: str) -> Decoder:
    torch.manual_seed(0)
    decoder = Decoder(replace(CONFIG, **MODELS[name]))
    with torch.no_grad():
        for p in decoder.parameters():
            if p.ndim == 1:  # gains and biases
                p.copy_(torch.rand_like(p) + 0.5)
    return decoder


def requests(adapter: str | None = None) -> list[Request]:
    """Prompts at the edges of blocks, a group, and settings of every kind."""
    generator = torch.Generator().manual_seed(1)
    found: list[Request] = []
    for i, (length, samples) in enumerate(((1, 1), (33, 2), (32, 1), (65, 1))):
        prompt = tuple(torch.randint(0, VOCAB, (length,), generator=generator).tolist())
        params = SampleParams(
            max_tokens=2 + i % 2, temperature=(0.0, 0.9, 1.0)[i % 3], top_k=5 if i == 2 else 0, top_logprobs=2,
            repetition_penalty=1.3 if i == 1 else 1.0, bias={5: 2.0} if i == 3 else {}, stop_ids=frozenset({3}), seed=i,
        )  # fmt: skip
        found += [Request(id=10 * i + j, prompt=prompt, params=params, adapter=adapter) for j in range(samples)]
    return found


def compare(ours: dict[int, RequestOutput], plain: dict[int, RequestOutput]) -> dict[str, Any]:
    pairs = [(ours[i], plain[i]) for i in plain]
    numbers = [
        (a, b)
        for x, y in pairs
        for name in ("logp", "raw")
        for a, b in zip(getattr(x, name), getattr(y, name), strict=True)
    ]
    tops = [(a, b) for x, y in pairs for p, q in zip(x.top, y.top, strict=True) for a, b in zip(p, q, strict=True)]
    return {
        "tokens": all(x.tokens == y.tokens and x.stop == y.stop for x, y in pairs),
        "apart": max([abs(a - b) for a, b in numbers] + [abs(a[1] - b[1]) for a, b in tops]),
        "tops": all(a[0] == b[0] for a, b in tops),
        "written": sum(len(x.tokens) for x, _ in pairs),
    }


def case(name: str, *, rows: int, blocks: int, budget: int) -> dict[str, Any]:
    decoder = model(name)
    runner = CudaRunner(decoder, max_rows=rows, capacity=80, num_blocks=blocks)
    return compare(
        write(runner, requests(), budget), write(TorchRunner(decoder, max_rows=8, capacity=80), requests(), 400)
    )


def adapters() -> dict[str, Any]:
    """Every linear layer has an adapter; the base model and the adapter take turns on one runner."""
    decoder = model("llama")
    add_lora(decoder, name="one", rank=4, alpha=8.0, targets=("all-linear",))
    with torch.no_grad():
        for p in lora_parameters(decoder):
            p.normal_(std=0.3)
    switch = partial(use_adapter, decoder)
    runners: list[Runner] = [
        CudaRunner(decoder, max_rows=8, capacity=80, num_blocks=24, switch=switch),
        TorchRunner(decoder, max_rows=8, capacity=80, switch=switch),
    ]
    with torch.no_grad(), switch(None):
        asked = requests("one")[:3] + [replace(r, id=100 + r.id, adapter=None) for r in requests()[:2]]
        return compare(*(write(runner, asked, 400) for runner in runners))


def invariant() -> dict[str, Any]:
    """The same bits with other rows, blocks and budgets."""
    decoder = model("every option").to(torch.bfloat16)
    runs = [
        write(CudaRunner(decoder, max_rows=r, capacity=80, num_blocks=b, invariant=True), asked, budget)
        for r, b, budget, asked in ((8, 24, 400, requests()[1:]), (2, 6, 50, requests()[:0:-1]))
    ]
    return {"same": all(runs[0][i] == runs[1][i] for i in runs[0])}


def next_turn() -> dict[str, Any]:
    """Written tokens fill a block in which the prompt ended, and the next turn begins with it."""
    decoder = model("llama")
    params = SampleParams(max_tokens=5, top_logprobs=2, stop_ids=frozenset())
    found, saved = list[dict[int, RequestOutput]](), list[int]()
    for runner in (
        CudaRunner(decoder, max_rows=2, capacity=80, num_blocks=12),
        TorchRunner(decoder, max_rows=2, capacity=80),
    ):
        engine = Engine(runner, vocab_size=VOCAB)
        first = Request(id=0, prompt=tuple(range(30)), params=params, keep=True)
        told = go(engine, [first])
        turn = replace(first, id=1, prompt=(*first.prompt, *told[0].tokens, 7, 8))
        found.append(told | go(engine, [turn]))
        saved.append(engine.counts.saved)
    return {**compare(*found), "saved": saved}


def main(path: str) -> None:
    found = {name: case(name, rows=8, blocks=24, budget=400) for name in MODELS}
    found["few rows, cut prompts"] = case("llama", rows=3, blocks=9, budget=50)
    large.TOKENS = 24
    found["many prompt tokens"] = case("every option", rows=8, blocks=24, budget=400)
    found["many prompt tokens, adapters"] = adapters()
    large.TOKENS = 1_536
    found |= {"adapters": adapters(), "invariant": invariant(), "next turn": next_turn()}
    with open(path, "w") as file:
        json.dump(found, file)


if __name__ == "__main__":
    main(sys.argv[1])
