"""The sampler on a GPU against transformers: tokens a second, the share of the memory bandwidth, and how cost grows."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch

from benchmarks.form import Row, note, row, say
from benchmarks.side_by_side import in_turns
from hone.data.collate import collate
from hone.engine.engine import Engine
from hone.engine.params import SampleParams
from hone.engine.requests import Request
from hone.engine.runners.choose import make_runner
from hone.model.config import DecoderConfig
from hone.model.decoder import Decoder
from hone.model.policy import Policy
from hone.rollout.local import LocalSampler

SHAPES = {
    "135M": DecoderConfig(
        vocab_size=49_152, hidden_size=576, intermediate_size=1_536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, max_position_embeddings=2_048,
    ),
    "0.5B": DecoderConfig(
        vocab_size=151_936, hidden_size=896, intermediate_size=4_864, num_hidden_layers=24, num_attention_heads=14,
        num_key_value_heads=2, max_position_embeddings=2_048,
    ),
}  # fmt: skip
PROMPT, NEW = 64, 256
WARM = 1  # whole calls of each side before those that count, after the one that shows whether it works
Call = Callable[[], object]
SHARPER = 4.0  # times the logits of random weights, whose deviation is 1: about as peaked as a language model's


def make(shape: str, *, context: int = 2_048) -> Decoder:
    """Random weights in bf16."""
    torch.manual_seed(0)
    return Decoder(replace(SHAPES[shape], max_position_embeddings=context)).to("cuda", torch.bfloat16).eval()


def twin(decoder: Decoder) -> Any:
    """The same model in transformers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    c = decoder.config
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
             "num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings")  # fmt: skip
    with torch.device("cuda"):
        model = LlamaForCausalLM(LlamaConfig(**{name: getattr(c, name) for name in names}))
    model.load_state_dict(decoder.state_dict(), strict=False)
    return cast(Any, model).to(torch.bfloat16).eval()


def prompts(rows: int, length: int = PROMPT, *, vocab: int, seed: int = 0) -> list[list[int]]:
    return np.random.default_rng(seed).integers(0, vocab, (rows, length)).tolist()


def timed(call: Callable[[], object], repeats: int) -> float:
    """Median seconds, after one call that warms up."""
    return in_turns({"ours": call}, repeats=repeats, settle=torch.cuda.synchronize)["ours"]


def bandwidth() -> float:
    """Bytes a second that a copy reads and writes."""
    x = torch.empty(1 << 30, dtype=torch.int32, device="cuda")
    y = torch.empty_like(x)
    return 2 * x.nbytes / timed(lambda: y.copy_(x), 9)


def limit(decoder: Decoder, rows: int, context: float, rate: float) -> float:
    """Tokens a second if a step did nothing but read the weights and the keys and values once."""
    c = decoder.config
    weights = 2 * sum(p.numel() for p in decoder.parameters())
    cache = rows * context * c.num_hidden_layers * 2 * c.num_key_value_heads * c.head_dim * 2
    return rows * rate / (weights + cache)


def sampling(decoder: Decoder, rows: int, *, new: int = NEW, length: int = PROMPT, **how: Any) -> Call:
    """Ours, prompts and results included."""
    sampler = LocalSampler(decoder, max_rows=rows, **how)
    params = SampleParams(max_tokens=new, stop_ids=frozenset())
    asked = prompts(rows, length, vocab=decoder.config.vocab_size)
    return lambda: sampler.sample(asked, n=1, params=params)


def ours(decoder: Decoder, rows: int, *, new: int = NEW, repeats: int = 3, **how: Any) -> float:
    """Tokens a second of `sample`."""
    return rows * new / timed(sampling(decoder, rows, new=new, **how), repeats)


def generating(decoder: Decoder, rows: int, **how: Any) -> Call:
    """transformers' generate"""
    model, asked = twin(decoder), torch.tensor(prompts(rows, vocab=decoder.config.vocab_size), device="cuda")
    how |= {"do_sample": True, "top_k": 0, "pad_token_id": 0, "eos_token_id": None, "max_new_tokens": NEW}
    return lambda: model.generate(asked, attention_mask=torch.ones_like(asked), **how)


SIDES = {  # the faster of transformers' ways is the peer; its continuous batching is slower (docs/dev/log.md)
    "Hone": sampling,
    "generate": generating,
    "generate, static cache, compiled": lambda decoder, rows: generating(decoder, rows, cache_implementation="static"),
}


def working(decoder: Decoder, rows: int) -> dict[str, Call]:
    """The sides that write at all: a way of transformers that fails here is named, and costs no row."""
    found = dict[str, Call]()
    for name, side in SIDES.items():
        try:
            call = side(decoder, rows)
            call()
            found[name] = call
        except Exception as error:  # whatever a library raises
            if name == "Hone":
                raise
            say(f"transformers' {name} failed: {type(error).__name__}: {str(error).partition(chr(10))[0]}")
    return found


def fixed(shape: str, rows: int, goal: float, *, times: float, share: float, rate: float, repeats: int) -> list[Row]:
    """A figure with a goal: so many rows of 256 new tokens after prompts of 64."""
    decoder = make(shape)
    torch.cuda.empty_cache()  # what the figure before has used
    taken = in_turns(working(decoder, rows), repeats=repeats, warm=WARM, settle=torch.cuda.synchronize)
    speed = {side: rows * NEW / seconds for side, seconds in taken.items()}
    mine, bound = speed.pop("Hone"), limit(decoder, rows, PROMPT + NEW / 2, rate)
    best = max(speed, key=speed.__getitem__)
    told = ", ".join(f"transformers' {side} {found:,.0f}" for side, found in speed.items())
    say(f"{shape} {rows} x {NEW}: {mine:,.0f} tokens/s, {told}, limit {bound:,.0f}")
    goals = (
        [f">= {goal / 1e3:.0f} k"]
        + [f">= {times:.0f} x"] * bool(times)
        + [f">= {share:.0%} of the limit"] * bool(share)
    )
    ok = mine >= goal and mine >= times * speed[best] and mine >= share * bound
    name = f"H200 {shape} {rows} x {NEW}"
    return [
        row(name, mine, unit="tokens/s", peer=speed[best], goal=", ".join(goals), ok=ok),
        *(
            note(f"{name} against transformers' {side}", mine, unit="tokens/s", peer=found)
            for side, found in speed.items()
        ),
        note(f"{name}: share of the bandwidth limit", mine / bound, unit="", peer=None),
    ]


def ragged(decoder: Decoder, rows: int, requests: int, repeats: int) -> float:
    """Useful tokens a second with prompts of 16 to 512 and lengths geometric with mean 128, at most 512."""
    rng = np.random.default_rng(1)
    limits = np.minimum(rng.geometric(1 / 128, requests), 512).tolist()
    asked = [tuple(rng.integers(0, decoder.config.vocab_size, n).tolist()) for n in rng.integers(16, 513, requests)]
    runner = make_runner(decoder, max_rows=rows, capacity=1_024)
    params = {n: SampleParams(max_tokens=n, stop_ids=frozenset()) for n in set(limits)}

    def run() -> None:
        engine = Engine(runner, vocab_size=decoder.config.vocab_size)
        engine.submit(
            [Request(id=i, prompt=p, params=params[n]) for i, (p, n) in enumerate(zip(asked, limits, strict=True))]
        )
        while engine.busy:
            engine.step()

    with torch.inference_mode():
        return sum(limits) / timed(run, repeats)


def unequal(decoder: Decoder, rows: int, same: float, repeats: int) -> Row:
    """Against what as many rows of one length gave."""
    mixed = ragged(decoder, rows, 2_048, repeats)
    say(f"ragged, {rows} rows: {mixed:,.0f} tokens/s, of one length {same:,.0f}")
    name, ok = f"H200 135M ragged, {rows} rows", mixed >= 0.7 * same
    return row(name, mixed, unit="tokens/s", peer=same, goal=">= 70 % of fixed", ok=ok)


def gap(decoder: Decoder) -> tuple[float, float]:
    """Mean and greatest distance between the sampler's log-probs and the learner's."""
    params = SampleParams(max_tokens=64, stop_ids=frozenset())
    groups = LocalSampler(decoder).sample(prompts(32, vocab=decoder.config.vocab_size), n=2, params=params)
    batch = collate(groups).to("cuda")
    with torch.no_grad():
        logp = Policy(decoder)(batch, frozenset({"logp"})).logp
    apart = (logp - batch.gen_logp)[batch.mask].abs().float()
    return apart.mean().item(), apart.max().item()


def differing(decoder: Decoder, rows: int) -> float:
    """Tokens in a million that another batch changes in the fast mode, counted up to the first one of a completion."""
    params = SampleParams(max_tokens=64, stop_ids=frozenset())
    asked = prompts(rows, vocab=decoder.config.vocab_size)
    together = LocalSampler(decoder, max_rows=rows).sample(asked, n=1, params=params)
    apart = LocalSampler(decoder, max_rows=rows // 4 + 1).sample(asked, n=1, params=params)
    changed = total = 0
    for (a,), (b,) in zip(together, apart, strict=True):
        pairs = [x != y for x, y in zip(a.tokens, b.tokens, strict=True)][PROMPT:]
        total += pairs.index(True) + 1 if any(pairs) else len(pairs)
        changed += any(pairs)
    return 1e6 * changed / total


def know(decoder: Decoder, repeats: int) -> list[Row]:
    """Without goals: the invariant mode, growth with rows and context, the first token, memory, the learner's gap."""
    fast = ours(decoder, 256, repeats=repeats)
    rows = [
        note(
            "H200 135M 256 x 256, batch-invariant",
            ours(decoder, 256, repeats=repeats, invariant=True),
            unit="tokens/s",
            peer=fast,
        )
    ]
    for n in (1, 16, 64):
        rows.append(note(f"H200 135M {n} x 128", ours(decoder, n, new=128, repeats=repeats), unit="tokens/s"))
    for length in (512, 1_536):
        rows.append(
            note(
                f"H200 135M 256 x 64 after {length}",
                ours(decoder, 256, new=64, length=length, repeats=repeats),
                unit="tokens/s",
            )
        )
    rows.append(
        note("H200 135M first token, 1 prompt of 512", 1e3 / ours(decoder, 1, new=1, length=512, repeats=5), unit="ms")
    )
    mean, most = gap(decoder)
    rows.append(note("H200 135M sampler against learner, log-prob, mean", mean, unit="nats"))
    rows.append(note("H200 135M sampler against learner, log-prob, most", most, unit="nats"))
    changed = "H200 135M tokens in a million that another batch changes"
    rows.append(note(f"{changed}, nearly uniform logits", differing(decoder, 1_024), unit="tokens"))
    sharp = make("135M")
    sharp.model.norm.weight.data *= SHARPER
    rows.append(note(f"{changed}, logits as peaked as a language model's", differing(sharp, 1_024), unit="tokens"))
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    ours(decoder, 256, new=64, repeats=1)
    rows.append(
        note(
            "H200 135M 256 x 128: memory beside the weights",
            (torch.cuda.max_memory_allocated() - before) / 2**20,
            unit="MiB",
        )
    )
    return rows


def measure(quick: bool) -> Sequence[Row]:
    """The figures with a goal, then what is worth knowing."""
    repeats = 1 if quick else 3
    rate = bandwidth()
    say(f"copy bandwidth {rate / 1e12:.2f} TB/s")
    rows = fixed("135M", 256, 280e3, times=28, share=0.36, rate=rate, repeats=repeats)
    same = rows[0]["ours"]
    decoder = make("135M")
    rows.append(unequal(decoder, 256, same, repeats))
    rows.append(unequal(decoder, 64, ours(decoder, 64, repeats=repeats), repeats))
    rows += fixed("135M", 1_024, 500e3, times=0, share=0.55, rate=rate, repeats=repeats)
    rows += fixed("0.5B", 256, 250e3, times=0, share=0, rate=rate, repeats=repeats)
    if not quick:
        rows += know(decoder, repeats)
    return rows
