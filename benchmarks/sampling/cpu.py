"""The sampler on a CPU against transformers, in one process, on the same float32 weights, taking turns.

A group's prompt is read once, as in training: 8 samples of 8 prompts, and 4 of 4 for the 135M model. The same without
groups is there too. Both sides have torch's own number of threads.
"""

import statistics
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from benchmarks.form import Row, main, note, say
from benchmarks.side_by_side import in_turns
from hone.data.collate import collate
from hone.engine.engine import Engine
from hone.engine.params import SampleParams
from hone.engine.requests import Request
from hone.engine.runners.choose import make_runner
from hone.errors import HoneError
from hone.model.config import DecoderConfig
from hone.model.decoder import Decoder
from hone.model.formats.cache import resolve
from hone.model.formats.folder import load_decoder
from hone.model.policy import Policy
from hone.rollout.local import LocalSampler
from hone.types import Group

SMALL = DecoderConfig(
    vocab_size=320, hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=8,
    num_key_value_heads=8, max_position_embeddings=256,
)  # fmt: skip
BIG = DecoderConfig(
    vocab_size=49_152, hidden_size=576, intermediate_size=1_536, num_hidden_layers=30, num_attention_heads=9,
    num_key_value_heads=3, max_position_embeddings=2_048,
)  # fmt: skip
NAME = "smollm2-135m"


def random_decoder(config: DecoderConfig) -> Decoder:
    torch.manual_seed(0)
    return Decoder(config).eval()


def big_decoder() -> tuple[Decoder, str]:
    """The real model if it has been fetched, else random weights of its shape; and which it is."""
    try:
        return load_decoder(resolve(NAME)).float().eval(), "SmolLM2-135M"
    except HoneError:
        return random_decoder(BIG), "135M shape"


def twin(decoder: Decoder) -> Any:
    """The same model in transformers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    c = decoder.config
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
             "num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings")  # fmt: skip
    rope = {"rope_type": "default", "rope_theta": c.rope.theta}
    model = LlamaForCausalLM(LlamaConfig(**{name: getattr(c, name) for name in names}, rope_parameters=rope))
    model.load_state_dict(decoder.state_dict(), strict=False)
    return model.float().eval()


def prompts(count: int, length: int, vocab: int, seed: int = 0) -> list[list[int]]:
    return np.random.default_rng(seed).integers(3, min(vocab, 20_000), (count, length)).tolist()


def sampling(decoder: Decoder, asked: list[list[int]], n: int, new: int, **how: Any) -> Callable[[], list[Group]]:
    sampler = LocalSampler(decoder, max_rows=len(asked) * n, **how)
    params = SampleParams(max_tokens=new, stop_ids=frozenset())
    return lambda: sampler.sample(asked, n=n, params=params)


def generating(model: Any, asked: list[list[int]], n: int, new: int) -> Callable[[], object]:
    tokens = torch.tensor([prompt for prompt in asked for _ in range(n)])
    how = {"do_sample": True, "top_k": 0, "pad_token_id": 0, "eos_token_id": None}
    how |= {"min_new_tokens": new, "max_new_tokens": new}
    return lambda: model.generate(tokens, attention_mask=torch.ones_like(tokens), **how)


def against(name: str, decoder: Decoder, model: Any, shape: tuple[int, int, int, int], repeats: int) -> Row:
    """Tokens a second on both sides for (prompts, samples of each, prompt length, new tokens)."""
    count, n, length, new = shape
    asked = prompts(count, length, decoder.config.vocab_size)
    sides = {"ours": sampling(decoder, asked, n, new), "peer": generating(model, asked, n, new)}
    mine, peer = in_turns(sides, repeats=repeats).values()
    tokens = count * n * new
    say(f"{name}: {tokens / mine:,.0f} tokens/s, transformers {tokens / peer:,.0f}, {peer / mine:.2f} x")
    return note(name, tokens / mine, unit="tokens/s", peer=tokens / peer)


def with_goal(found: Row, times: float) -> Row:
    return {**found, "goal": f">= {times:g} x", "ok": found["ratio"] >= times}


def small(quick: bool) -> list[Row]:
    decoder, repeats = random_decoder(SMALL), 5 if quick else 15
    model = twin(decoder)
    return [
        with_goal(against("CPU 0.8M, 64 x 48, prompt 16", decoder, model, (8, 8, 16, 48), repeats), 6),
        against("CPU 0.8M, 64 x 48, prompt 16, no groups", decoder, model, (64, 1, 16, 48), repeats),
        against("CPU 0.8M, 64 x 48, prompt 128", decoder, model, (8, 8, 128, 48), repeats),
    ]


def big(quick: bool) -> list[Row]:
    (decoder, what), repeats = big_decoder(), 1 if quick else 3
    model = twin(decoder)
    rows = [with_goal(against(f"CPU {what}, 16 x 64, prompt 32", decoder, model, (4, 4, 32, 64), repeats), 3)]
    if not quick:
        rows.append(against(f"CPU {what}, 16 x 64, no groups", decoder, model, (16, 1, 32, 64), repeats))
    return rows


def modes(name: str, decoder: Decoder, shape: tuple[int, int, int, int], repeats: int) -> list[Row]:
    """The batch-invariant mode and 8-bit weights against the fast mode."""
    count, n, length, new = shape
    asked = prompts(count, length, decoder.config.vocab_size)
    sides = {
        "fast": sampling(decoder, asked, n, new),
        "invariant": sampling(decoder, asked, n, new, invariant=True),
        "int8": engine_run(decoder, [p for p in asked for _ in range(n)], new, int8=True),
    }
    fast, same, eight = in_turns(sides, repeats=repeats).values()
    tokens = count * n * new
    return [
        note(f"{name}: batch-invariant against fast", tokens / same, unit="tokens/s", peer=tokens / fast),
        note(f"{name}: 8-bit weights against float32", tokens / eight, unit="tokens/s", peer=tokens / fast),
    ]


def engine_run(decoder: Decoder, asked: list[list[int]], new: int, **how: Any) -> Callable[[], dict[int, list[float]]]:
    """Every request through an engine over a runner of its own; its raw log-probs by request."""
    capacity = min(len(asked[0]) + new, decoder.config.max_position_embeddings)
    runner = make_runner(decoder, max_rows=len(asked), capacity=capacity, **how)
    params = SampleParams(max_tokens=new, stop_ids=frozenset())

    def call() -> dict[int, list[float]]:
        engine, found = Engine(runner, vocab_size=decoder.config.vocab_size), dict[int, list[float]]()
        engine.submit([Request(id=i, prompt=tuple(prompt), params=params) for i, prompt in enumerate(asked)])
        while len(found) < len(asked):
            found |= {news.id: list(news.raw) for news in engine.step() if news.stop is not None}
        return found

    return call


@torch.no_grad()
def gaps(name: str, decoder: Decoder, groups: list[Group]) -> list[Row]:
    """How far the sampler's log-probs are from the learner's; small models have none."""
    batch = collate(groups)
    found = Policy(decoder)(batch, frozenset({"logp"})).logp
    apart = (found - batch.gen_logp)[batch.mask].abs().tolist()
    return [
        note(f"{name}: gap to the learner's log-probs, mean", statistics.fmean(apart), unit="nats"),
        note(f"{name}: gap to the learner's log-probs, largest", max(apart), unit="nats"),
    ]


@torch.inference_mode()
def int8_gap(name: str, decoder: Decoder, length: int) -> Row:
    """The mean over tokens of |log-prob in 8 bits - log-prob in float32|, on text that the model wrote itself."""
    asked = prompts(2, length, decoder.config.vocab_size)
    params = SampleParams(max_tokens=32, stop_ids=frozenset())
    apart: list[float] = []
    for group in LocalSampler(decoder).sample(asked, n=1, params=params):
        tokens = tuple(group[0].tokens)
        runner = make_runner(decoder, max_rows=1, capacity=len(tokens), int8=True)
        hidden = [runner.layers.read([piece]) for piece in pieces(tokens)]
        logp = runner.layers.logits(torch.cat(hidden)).log_softmax(-1)
        exact = decoder.logits(decoder(torch.tensor([tokens[:-1]])))[0].log_softmax(-1)
        at = torch.arange(length - 1, len(tokens) - 1)
        picked = torch.tensor(tokens)[at + 1]
        apart += (logp[at, picked] - exact[at, picked]).abs().tolist()
    return note(f"{name}: log-prob gap of 8-bit weights, mean", statistics.fmean(apart), unit="nats")


def pieces(tokens: tuple[int, ...]) -> list[Any]:
    from hone.engine.runners.torch.kv_cache import Piece

    return [Piece(row=0, start=i, tokens=tokens[i : i + 1]) for i in range(len(tokens) - 1)]


def differing(name: str, decoder: Decoder, count: int, length: int, new: int) -> Row:
    """First differing tokens a million, when the same requests are sampled 64 and 13 rows at a time."""
    asked = prompts(count, length, decoder.config.vocab_size, seed=5)
    params = SampleParams(max_tokens=new, stop_ids=frozenset(), seed=1)
    runs = [LocalSampler(decoder, max_rows=rows).sample(asked, n=1, params=params) for rows in (64, 13)]
    tokens = differ = 0
    for one, other in zip(*runs, strict=True):
        pairs = list(zip(one[0].tokens[length:], other[0].tokens[length:], strict=True))
        same = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
        tokens, differ = tokens + same, differ + (same < len(pairs))
    return note(f"{name}: differing tokens in the fast mode, of {tokens:,}", 1e6 * differ / tokens, unit="a million")


def growth(name: str, decoder: Decoder, sizes: Sequence[int], lengths: Sequence[int], new: int) -> list[Row]:
    """How cost grows with the batch and with the context, and the time to the first token."""
    rows: list[Row] = []
    vocab = decoder.config.vocab_size
    for size in sizes:
        (seconds,) = in_turns({"ours": sampling(decoder, prompts(size, 16, vocab), 1, new)}, repeats=1).values()
        rows.append(note(f"{name}: {size} rows, prompt 16", size * new / seconds, unit="tokens/s"))
    for length in lengths:
        asked = prompts(1, length, vocab)
        sides = {"first": sampling(decoder, asked, 8, 1), "whole": sampling(decoder, asked, 8, 1 + new)}
        first, whole = in_turns(sides, repeats=1).values()
        rows.append(note(f"{name}: first token, prompt {length}", 1e3 * first, unit="ms"))
        rows.append(note(f"{name}: 8 rows at context {length}", 8 * new / (whole - first), unit="tokens/s"))
    runner = make_runner(decoder, max_rows=64, capacity=256)
    weights = sum(p.nbytes for p in decoder.parameters()) / 2**20
    rows.append(note(f"{name}: weights, which are the learner's", weights, unit="MiB"))
    rows.append(note(f"{name}: keys and values of 64 x 256", runner.layers.slab.nbytes / 2**20, unit="MiB"))
    return rows


def measure(quick: bool) -> Sequence[Row]:
    """The two figures with a goal, then what is worth knowing."""
    rows = small(quick) + big(quick)
    little, (large, what) = random_decoder(SMALL), big_decoder()
    rows += modes("CPU 0.8M", little, (8, 8, 16, 48), 3)
    rows += gaps("CPU 0.8M", little, sampling(little, prompts(8, 16, 320), 4, 48)())
    rows.append(differing("CPU 0.8M", little, 200 if quick else 2_000, 16, 48))
    rows += growth("CPU 0.8M", little, (1, 4, 16, 64, 256), (16, 64, 192), 32)
    rows += gaps(f"CPU {what}", large, sampling(large, prompts(2, 32, 20_000), 2, 16)())
    rows.append(int8_gap(f"CPU {what}", large, 32))
    if not quick:
        rows += modes(f"CPU {what}", large, (4, 4, 32, 32), 1)
        rows += growth(f"CPU {what}", large, (1, 4, 16, 32), (64, 512), 16)
    return rows


if __name__ == "__main__":
    sys.exit(main(measure, __doc__ or ""))
