"""In the invariant mode a request's tokens and log-probs are the same to the bit, whatever is computed with it."""

from typing import Any

import numpy as np
import pytest
import torch

from hone.engine.params import SampleParams
from hone.engine.runner import LaunchResult, PromptChunk, Seat
from hone.engine.runners.choose import make_runner
from hone.engine.runners.native.layers import why_not_covered
from hone.engine.runners.torch.invariant import LANES, TILE, calm, calm_rows, places_agree
from hone.engine.runners.torch.layers import product
from hone.model.config import DecoderConfig
from hone.model.decoder import Decoder
from hone.model.kernels.cpp.library import VARIABLE

torch.set_num_threads(1)
CONTEXT = 160
SHAPES: dict[str, dict[str, Any]] = {
    "plain": {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4},
    "odd sizes": {
        "vocab_size": 131, "hidden_size": 36, "intermediate_size": 50, "num_attention_heads": 6, "windows": (0, 40),
        "num_key_value_heads": 2, "qk_norm": True, "qkv_bias": True,
    },
}  # fmt: skip


def build(shape: str, dtype: torch.dtype) -> Decoder:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = {"num_hidden_layers": 2, "max_position_embeddings": CONTEXT, "initializer_range": 0.25}
        return Decoder(DecoderConfig(**{**config, **SHAPES[shape]})).to(dtype)


Request = tuple[tuple[int, ...], SampleParams, int]  # prompt, settings, limit
Line = list[tuple[int, float, float]]  # token, logp, raw


def requests(vocab: int, count: int) -> list[Request]:
    """Prompts that end in each of the blocks, and every way to draw."""
    rng, made = np.random.default_rng(1), list[Request]()
    for i in range(count):
        params = SampleParams(
            max_tokens=CONTEXT, stop_ids=frozenset(), seed=3, temperature=(1.0, 0.7, 0.0)[i % 3],
            top_p=0.9 if i % 2 else 1.0, top_k=20 if i % 5 == 1 else 0, repetition_penalty=1.2 if i % 7 == 2 else 1.0,
        )  # fmt: skip
        prompt = tuple(rng.integers(0, vocab, rng.integers(1, 140)).tolist())
        made.append((prompt, params, int(rng.integers(1, 18))))
    return made


class Play:
    """Requests through a runner of some size, in some order, with prompts cut anywhere and rows moved about."""

    def __init__(self, decoder: Decoder, made: list[Request], seed: int, *, rows: int, invariant: bool = True) -> None:
        self.runner = make_runner(decoder, max_rows=rows, capacity=CONTEXT, invariant=invariant)
        self.made, self.rng = made, np.random.default_rng(seed)
        self.owner, self.lines = dict[int, int](), dict[int, Line]()

    def run(self, order: list[int]) -> dict[int, Line]:
        waiting = list(order)
        while waiting or self.owner:
            free = [r for r in range(self.runner.max_rows) if r not in self.owner]
            some = min(len(waiting), len(free), int(self.rng.integers(0, 8)))
            rows = self.rng.permutation(free)[:some].tolist()
            self.owner |= {row: waiting.pop(0) for row in rows}
            self.read(dict.fromkeys(rows, 0))
            self.note(self.runner.decode(self.runner.max_rows).read())
            self.shuffle()
        return self.lines

    def read(self, started: dict[int, int]) -> None:
        while started:
            parts, further = list[PromptChunk](), dict[int, int]()
            for row, start in started.items():
                prompt, params, limit = self.made[self.owner[row]]
                end = len(prompt) if self.rng.random() < 0.4 else int(self.rng.integers(start + 1, len(prompt) + 1))
                seat = Seat(row=row, random_id=self.owner[row], params=params, limit=limit, blocks=(row,))
                seats = (seat,) if end == len(prompt) else ()
                parts.append(PromptChunk(prompt=prompt, start=start, end=end, blocks=(row,), seats=seats))
                if not seats:
                    further[row] = end
            self.note(self.runner.prefill(parts).read())
            started = further

    def note(self, w: LaunchResult) -> None:
        for row, token, logp, raw, ended in zip(w.row, w.token, w.logp, w.raw, w.ended, strict=True):
            request = self.owner[int(row)]
            self.lines.setdefault(request, []).append((int(token), float(logp), float(raw)))
            if ended:
                del self.owner[int(row)]

    def shuffle(self) -> None:
        free = [r for r in range(self.runner.max_rows) if r not in self.owner]
        if free and self.owner and self.rng.random() < 0.3:
            a, b = int(self.rng.choice(list(self.owner))), free[0]
            self.runner.move([(a, b)])
            self.owner[b] = self.owner.pop(a)


@pytest.fixture
def in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "0")


@pytest.mark.usefixtures("in_torch")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_request_alone_and_in_any_company_is_the_same_to_the_bit(shape, dtype):
    decoder = build(shape, dtype)
    made = requests(SHAPES[shape]["vocab_size"], 24)
    check_invariant(decoder, made, invariant=True)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("invariant", [False, True])
def test_in_cpp_it_is_so_in_either_mode(invariant, threads):
    decoder = build("plain", torch.float32)
    if why := why_not_covered(decoder):
        pytest.skip(why)
    made = requests(128, 24)
    torch.set_num_threads(threads)
    try:
        check_invariant(decoder, made, invariant=invariant)
    finally:
        torch.set_num_threads(1)


def check_invariant(decoder: Decoder, made: list[Request], *, invariant: bool) -> None:
    alone = Play(decoder, made, 0, rows=1, invariant=invariant).run(list(range(24)))
    for seed, rows in ((1, 3), (2, 11), (3, 24)):
        order = np.random.default_rng(seed).permutation(24).tolist()
        assert Play(decoder, made, seed, rows=rows, invariant=invariant).run(order) == alone


@pytest.mark.usefixtures("in_torch")
def test_the_fast_mode_is_not_so_which_is_why_this_one_exists():
    decoder = build("plain", torch.float32)
    made = requests(128, 24)
    alone = Play(decoder, made, 0, rows=1, invariant=False).run(list(range(24)))
    together = Play(decoder, made, 3, rows=24, invariant=False).run(list(range(24)))
    assert together != alone
    for i in range(24):
        n = next((t for t, (x, y) in enumerate(zip(alone[i], together[i], strict=True)) if x[0] != y[0]), len(alone[i]))
        assert [x[1] for x in together[i][:n]] == pytest.approx([x[1] for x in alone[i][:n]], abs=1e-4)


def test_places_of_a_tile_that_disagree_are_found():
    class Skewed(torch.Tensor):
        """A weight whose product depends on the place: what a library with an odd last row would do."""

        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = super().__torch_function__(func, types, args, kwargs or {})
            if func in (torch.mm, torch.Tensor.mm):
                out[:, -1] += 1e-3
            return out

    weight = torch.randn(8, 12)
    assert places_agree(weight)
    assert not places_agree(weight.as_subclass(Skewed))


def test_where_places_disagree_rows_are_computed_one_by_one():
    decoder = build("odd sizes", torch.float32)
    made = requests(131, 6)
    tiled = Play(decoder, made, 0, rows=6).run(list(range(6)))
    single = Play(decoder, made, 0, rows=6)
    single.runner.layers.alike = Never()
    found = single.run(list(range(6)))
    for i in range(6):
        assert [x[0] for x in found[i]] == [x[0] for x in tiled[i]]
        assert [x[1] for x in found[i]] == pytest.approx([x[1] for x in tiled[i]], abs=1e-4)
    weight, x = torch.randn(20, 36), torch.randn(TILE, 36)
    rows = torch.cat([product(weight, row) for row in x.split(1)])
    assert torch.equal(single.runner.layers.product(weight, x), rows)


class Never(dict[tuple[object, ...], bool]):
    """No kind of weight agrees."""

    def __contains__(self, key: object) -> bool:
        return True

    def __getitem__(self, key: tuple[object, ...]) -> bool:
        return False


@pytest.mark.parametrize("size", [1, LANES - 1, LANES, 3 * LANES, 40_000])
def test_a_number_is_the_same_wherever_it_stands(size):
    x = torch.randn(19, size, generator=torch.Generator().manual_seed(size))
    whole = calm(torch.exp, x)
    order = torch.randperm(19, generator=torch.Generator().manual_seed(0))
    assert torch.equal(calm(torch.exp, x[order]), whole[order])
    assert torch.equal(calm(torch.exp, x[3:4]), whole[3:4])
    assert calm_rows(size) * size <= 32_767 or calm_rows(size) == 1
