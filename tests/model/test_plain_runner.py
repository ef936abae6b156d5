"""The plain runner against the decoder's own forward pass over the whole sequence."""

from typing import Any

import numpy as np
import pytest
import torch

from hone.model.config import DecoderConfig, Rope
from hone.model.decoder import Decoder
from hone.model.plain import PlainRunner
from hone.rollout.protocol import SampleParams
from hone.rollout.runner import Part, Seat, Written

torch.set_num_threads(1)
VOCAB, CONTEXT = 37, 48
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Llama without shared keys": {"num_key_value_heads": 4, "tie_word_embeddings": False},
    "Llama with every bias": {"qkv_bias": True, "o_bias": True, "mlp_bias": True},
    "Llama with yarn": {"rope": Rope(kind="yarn", factor=4.0, original=16, attention=1.2)},
    "Qwen2": {"qkv_bias": True, "num_key_value_heads": 1},
    "Qwen3": {"qk_norm": True, "head_dim": 6},
    "Mistral": {"windows": (5, 5)},
    "Qwen3 with windows": {"qk_norm": True, "windows": (0, 7), "qkv_bias": True},
}
GREEDY = SampleParams(max_tokens=CONTEXT, temperature=0.0, stop_ids=frozenset())


def build(seed: int = 0, **settings: Any) -> Decoder:
    """Random weights, biases and norms too, so that none of them is at a value that hides it."""
    base = {"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    base |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": CONTEXT}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        decoder = Decoder(DecoderConfig(**{**base, "initializer_range": 0.3, **settings}))
        for p in decoder.parameters():
            if p.ndim == 1:
                torch.nn.init.normal_(p, mean=1.0, std=0.3)
    return decoder


def prompt_of(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(np.random.default_rng([length, seed]).integers(0, VOCAB, length).tolist())


class Table:
    """What each request wrote, by request."""

    def __init__(self) -> None:
        self.owner, self.tokens, self.logp, self.raw = dict[int, int](), dict[int, list[int]](), {}, {}

    def seat(self, row: int, request: int, prompt: tuple[int, ...], limit: int, params: SampleParams = GREEDY) -> Seat:
        self.owner[row] = request
        self.tokens[request], self.logp[request], self.raw[request] = [], [], []
        return Seat(row=row, request=request, params=params, limit=limit, blocks=(row,))

    def add(self, written: Written) -> None:
        for row, token, logp, raw in zip(written.row, written.token, written.logp, written.raw, strict=True):
            request = self.owner[int(row)]
            self.tokens[request].append(int(token))
            self.logp[request].append(float(logp))
            self.raw[request].append(float(raw))

    def move(self, runner: PlainRunner, moves: list[tuple[int, int]]) -> None:
        runner.move(moves)
        for a, b in moves:
            self.owner[b] = self.owner.pop(a)


def check_greedy(
    decoder: Decoder, prompt: tuple[int, ...], table: Table, request: int, tolerance: float = 1e-5
) -> None:
    """Tokens are the most probable under the decoder's own forward pass, log-probs are its log-probs."""
    written = table.tokens[request]
    with torch.no_grad():
        logits = decoder.logits(decoder(torch.tensor([[*prompt, *written[:-1]]])))[0, len(prompt) - 1 :]
    assert written == logits.argmax(-1).tolist()
    exact = logits.log_softmax(-1).gather(-1, torch.tensor(written)[:, None])[:, 0].tolist()
    assert table.logp[request] == pytest.approx(exact, abs=tolerance)
    assert table.raw[request] == pytest.approx(exact, abs=tolerance)


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_rows_of_unequal_length_equal_the_whole_forward_pass(family, invariant):
    decoder = build(**FAMILIES[family])
    runner, table = PlainRunner(decoder, max_rows=8, capacity=CONTEXT, invariant=invariant), Table()
    lengths = (1, 7, 3, 12, 7, 30)
    prompts = {r: prompt_of(n, r) for r, n in enumerate(lengths)}
    parts = [
        Part(prompt=p, start=0, end=len(p), blocks=(r,), seats=(table.seat(r, r, p, 12),)) for r, p in prompts.items()
    ]
    table.add(runner.prefill(parts).read())
    for _ in range(11):
        table.add(runner.decode(8).read())
    assert not len(runner.decode(8).read().row)
    for r, p in prompts.items():
        assert len(table.tokens[r]) == 12
        check_greedy(decoder, p, table, r)
