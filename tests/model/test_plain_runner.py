"""The plain runner against the decoder's own forward pass over the whole sequence."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from each import each

from hone.engine.params import SampleParams
from hone.engine.runner import LaunchResult, PromptChunk, Seat
from hone.engine.runners.choose import make_runner
from hone.engine.runners.torch import runner as plain
from hone.engine.runners.torch.runner import TorchRunner
from hone.errors import HoneError
from hone.model.config import DecoderConfig, Rope
from hone.model.decoder import Decoder
from hone.model.lora import add_lora, use_adapter

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
NATIVE = {"head_dim": 16}  # the native runner takes it where there is a compiler
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
        return Seat(row=row, random_id=request, params=params, limit=limit, blocks=(row,))

    def add(self, written: LaunchResult) -> None:
        for row, token, logp, raw in zip(written.row, written.token, written.logp, written.raw, strict=True):
            request = self.owner[int(row)]
            self.tokens[request].append(int(token))
            self.logp[request].append(float(logp))
            self.raw[request].append(float(raw))

    def move(self, runner: TorchRunner, moves: list[tuple[int, int]]) -> None:
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


@each("head", [{}, NATIVE])
@each("invariant", [False, True])
@each("family", FAMILIES)
def test_greedy_rows_of_unequal_length_equal_the_whole_forward_pass(family, invariant, head):
    decoder = build(**{**FAMILIES[family], **head})
    runner, table = make_runner(decoder, max_rows=8, capacity=CONTEXT, invariant=invariant), Table()
    lengths = (1, 7, 3, 12, 7, 30)
    prompts = {r: prompt_of(n, r) for r, n in enumerate(lengths)}
    parts = [
        PromptChunk(prompt=p, start=0, end=len(p), blocks=(r,), seats=(table.seat(r, r, p, 12),))
        for r, p in prompts.items()
    ]
    table.add(runner.prefill(parts).read())
    for _ in range(11):
        table.add(runner.decode(8).read())
    assert not len(runner.decode(8).read().row)
    for r, p in prompts.items():
        assert len(table.tokens[r]) == 12
        check_greedy(decoder, p, table, r)


def begin(runner: TorchRunner, table: Table, rows: dict[int, tuple[int, ...]], *, limit: int = 10) -> None:
    """A request for each row, numbered like it, whole prompts at once."""
    parts = [
        PromptChunk(prompt=p, start=0, end=len(p), blocks=(r,), seats=(table.seat(r, r, p, limit),))
        for r, p in rows.items()
    ]
    table.add(runner.prefill(parts).read())


def finish(runner: TorchRunner, table: Table) -> None:
    while len((written := runner.decode(runner.max_rows).read()).row):
        table.add(written)


@pytest.fixture(params=[(False, {}), (True, {}), (False, NATIVE)], ids=["fast", "invariant", "in C++"])
def runner(request: pytest.FixtureRequest) -> TorchRunner:
    invariant, settings = request.param
    return make_runner(build(**settings), max_rows=6, capacity=CONTEXT, invariant=invariant)


def test_rows_that_were_used_before_write_the_same(runner):
    long, short = prompt_of(25), prompt_of(2)
    for prompts in ({0: long, 3: short, 5: long}, {0: short, 3: long, 2: short}):
        table = Table()
        begin(runner, table, prompts)
        finish(runner, table)
        for r, p in prompts.items():
            check_greedy(runner.decoder, p, table, r)


def test_a_prompt_read_in_parts_is_the_prompt(runner):
    prompt, table = prompt_of(20), Table()
    for start, end in ((0, 1), (1, 9), (9, 19)):
        assert not len(runner.prefill([PromptChunk(prompt=prompt, start=start, end=end, blocks=(2,))]).read().row)
    seat = table.seat(2, 2, prompt, 10)
    table.add(runner.prefill([PromptChunk(prompt=prompt, start=19, end=20, blocks=(2,), seats=(seat,))]).read())
    finish(runner, table)
    check_greedy(runner.decoder, prompt, table, 2)


def test_a_prompt_longer_than_a_pass_is_read_in_several(runner, monkeypatch):
    monkeypatch.setattr(plain, "PREFILL_TOKENS", 7)
    table, prompts = Table(), {0: prompt_of(20), 1: prompt_of(3), 4: prompt_of(16, 1)}
    begin(runner, table, prompts)
    finish(runner, table)
    for r, p in prompts.items():
        check_greedy(runner.decoder, p, table, r)


def test_a_group_reads_its_prompt_once_and_goes_on_apart(runner):
    prompt, table = prompt_of(11), Table()
    params = SampleParams(max_tokens=8, stop_ids=frozenset(), seed=5)
    seats = tuple(table.seat(r, r, prompt, 8, params) for r in (4, 1, 2))
    table.add(runner.prefill([PromptChunk(prompt=prompt, start=0, end=11, blocks=(4,), seats=seats)]).read())
    finish(runner, table)
    assert len({tuple(table.tokens[r]) for r in (4, 1, 2)}) == 3
    for r in (4, 1, 2):
        check_sampled(runner.decoder, prompt, table, r)


def check_sampled(decoder: Decoder, prompt: tuple[int, ...], table: Table, request: int, t: float = 1.0) -> None:
    """Log-probs are those of the decoder's own forward pass."""
    written = torch.tensor(table.tokens[request])
    with torch.no_grad():
        logits = decoder.logits(decoder(torch.tensor([[*prompt, *table.tokens[request][:-1]]])))[0, len(prompt) - 1 :]
    for z, found in ((logits / t, table.logp), (logits, table.raw)):
        exact = z.log_softmax(-1).gather(-1, written[:, None])[:, 0].tolist()
        assert found[request] == pytest.approx(exact, abs=1e-5)


def test_each_row_has_its_own_temperature(runner):
    table, prompt = Table(), prompt_of(6)
    heat = {0: 0.5, 1: 2.0, 3: 1.0}
    parts = [
        PromptChunk(prompt=prompt, start=0, end=6, blocks=(r,), seats=(table.seat(r, r, prompt, 12, SampleParams(
            max_tokens=12, temperature=t, stop_ids=frozenset())),)) for r, t in heat.items()
    ]  # fmt: skip
    table.add(runner.prefill(parts).read())
    finish(runner, table)
    for r, t in heat.items():
        check_sampled(runner.decoder, prompt, table, r, t)


def test_columns_of_another_row_can_be_copied(runner):
    shared, table = prompt_of(16), Table()
    begin(runner, table, {0: shared}, limit=4)
    prompt = (*shared, *prompt_of(5, 9))
    seat = table.seat(3, 3, prompt, 10)
    part = PromptChunk(prompt=prompt, start=16, end=21, blocks=(3,), seats=(seat,), copy=(0, 3, 16))
    table.add(runner.prefill([part]).read())
    finish(runner, table)
    check_greedy(runner.decoder, shared, table, 0)
    check_greedy(runner.decoder, prompt, table, 3)


def test_rows_move_and_stop_while_others_write(runner):
    table, prompts = Table(), {0: prompt_of(9), 1: prompt_of(4), 5: prompt_of(14)}
    begin(runner, table, prompts)
    table.add(runner.decode(6).read())
    runner.stop([0])
    table.add(runner.decode(6).read())
    table.move(runner, [(5, 0)])
    written = runner.decode(2).read()
    assert written.row.tolist() == [0, 1]
    table.add(written)
    finish(runner, table)
    assert len(table.tokens[0]) == 2
    for r in (1, 5):
        assert len(table.tokens[r]) == 10
        check_greedy(runner.decoder, prompts[r], table, r)


def test_a_hole_writes_nothing_that_is_read(runner):
    table = Table()
    begin(runner, table, {0: prompt_of(5), 1: prompt_of(8)}, limit=4)
    runner.stop([1])
    before = [x[:, 1:, :, :CONTEXT].clone() for x in runner.layers.slab.layers]
    finish(runner, table)
    for x, y in zip(runner.layers.slab.layers, before, strict=True):
        assert torch.equal(x[:, 1:, :, :CONTEXT], y)


def test_stop_tokens_and_limits_end_a_row(runner):
    table, prompt = Table(), prompt_of(7)
    begin(runner, table, {0: prompt}, limit=10)
    finish(runner, table)
    third = table.tokens[0][2]
    at = table.tokens[0].index(third)
    params = SampleParams(max_tokens=10, temperature=0.0, stop_ids=frozenset({third, VOCAB - 1, 5_000}))
    for row, own, length in ((1, params, at + 1), (2, GREEDY, 1)):
        seat = table.seat(row, row, prompt, 10 if row == 1 else 1, own)
        written = runner.prefill([PromptChunk(prompt=prompt, start=0, end=7, blocks=(row,), seats=(seat,))]).read()
        table.add(written)
        assert bool(written.ended[0]) == (length == 1)
        finish(runner, table)
        assert table.tokens[row] == table.tokens[0][:length]


def test_a_row_may_fill_the_whole_context(runner):
    table, prompts = Table(), {0: prompt_of(CONTEXT - 1), 1: prompt_of(1)}
    parts = [
        PromptChunk(prompt=p, start=0, end=len(p), blocks=(r,), seats=(table.seat(r, r, p, CONTEXT - len(p)),))
        for r, p in prompts.items()
    ]
    table.add(runner.prefill(parts).read())
    finish(runner, table)
    assert [len(table.tokens[r]) for r in prompts] == [1, CONTEXT - 1]
    for r, p in prompts.items():
        check_greedy(runner.decoder, p, table, r)


def test_the_most_probable_tokens_are_reported(runner):
    prompt, table = prompt_of(5), Table()
    params = SampleParams(max_tokens=3, temperature=2.0, top_logprobs=4, stop_ids=frozenset())
    written = runner.prefill(
        [PromptChunk(prompt=prompt, start=0, end=5, blocks=(1,), seats=(table.seat(1, 1, prompt, 3, params),))]
    ).read()
    with torch.no_grad():
        best = runner.decoder.logits(runner.decoder(torch.tensor([prompt])))[0, -1].log_softmax(-1).topk(4)
    assert written.top_token[0].tolist() == best.indices.tolist()
    assert written.top_logp[0].tolist() == pytest.approx(best.values.tolist(), abs=1e-5)
    assert runner.decode(6).read().top_token.shape == (1, 4)


def test_a_step_of_the_optimiser_is_seen_by_the_next_launch(runner):
    table, prompt = Table(), prompt_of(6)
    begin(runner, table, {0: prompt})
    parameters = list(runner.decoder.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        runner.decoder.logits(runner.decoder(torch.tensor([prompt]))).logsumexp(-1).sum().backward()
        optimizer.step()
        runner.decode(1).read()
    table = Table()
    begin(runner, table, {0: prompt})
    finish(runner, table)
    check_greedy(runner.decoder, prompt, table, 0)


def test_weights_that_were_replaced_are_found(runner):
    table, prompt, other = Table(), prompt_of(6), build(seed=7, head_dim=runner.decoder.config.head_dim)
    begin(runner, table, {0: prompt})
    runner.decoder.load_state_dict(other.state_dict(), assign=True)
    table = Table()
    begin(runner, table, {0: prompt})
    finish(runner, table)
    check_greedy(other, prompt, table, 0)


def test_a_model_that_diverged_leaves_nothing_behind(runner):
    table, prompts = Table(), {0: prompt_of(30), 1: prompt_of(30, 1)}
    weight = runner.decoder.model.layers[0].self_attn.v_proj.weight
    sound = weight.detach().clone()
    with torch.no_grad():
        weight.fill_(torch.nan)
    begin(runner, table, prompts)
    assert not np.isfinite(table.logp[0][0])
    runner.stop([0, 1])
    with torch.no_grad():
        weight.copy_(sound)
    table, prompts = Table(), {0: prompt_of(3), 2: prompt_of(4)}
    begin(runner, table, prompts)
    table.move(runner, [(2, 1)])
    finish(runner, table)
    for r, p in prompts.items():
        check_greedy(runner.decoder, p, table, r)


@pytest.mark.parametrize("head", [{}, NATIVE])
@pytest.mark.parametrize("invariant", [False, True])
def test_adapters_by_name_and_the_weights_as_they_are(invariant, head):
    decoder, prompt = build(**head), prompt_of(8)
    for seed, name in enumerate(("one", "two")):
        add_lora(decoder, name=name, rank=3, alpha=6.0, targets=("all-linear",), seed=seed)
    torch.manual_seed(3)
    for name, p in decoder.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(p, std=0.3)
    switch = partial(use_adapter, decoder)
    runner = make_runner(decoder, max_rows=2, capacity=CONTEXT, switch=switch, invariant=invariant)
    seen = set()
    for name in ("one", None, "two"):  # as they are: the adapter added last is on
        runner.use(name)
        table = Table()
        begin(runner, table, {1: prompt})
        finish(runner, table)
        with switch(name or "two"):
            check_greedy(decoder, prompt, table, 1)
        seen.add(tuple(table.logp[1]))
    assert len(seen) == 2
    with pytest.raises(HoneError, match=r'no adapter "three": use one of one, two'):
        runner.use("three")
    with pytest.raises(HoneError, match="given no adapters"):
        TorchRunner(decoder, max_rows=2, capacity=CONTEXT).use("one")


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.bfloat16, 0.15)])
@pytest.mark.parametrize("invariant", [False, True])
def test_other_precisions(dtype, tolerance, invariant):
    decoder, prompt = build(qkv_bias=True, qk_norm=True, windows=(0, 6)).to(dtype), prompt_of(9)
    runner, table = make_runner(decoder, max_rows=3, capacity=CONTEXT, invariant=invariant), Table()
    begin(runner, table, {0: prompt, 2: prompt_of(15)})
    finish(runner, table)
    whole = torch.tensor([[*prompt, *table.tokens[0][:-1]]])
    with torch.no_grad():
        logits = decoder.logits(decoder(whole))[0, len(prompt) - 1 :].double()
    exact = logits.log_softmax(-1).gather(-1, torch.tensor(table.tokens[0])[:, None])[:, 0].tolist()
    assert table.raw[0] == pytest.approx(exact, abs=tolerance)


def test_what_cannot_be_is_refused():
    decoder = build()
    for settings, message in (
        ({"max_rows": 0, "capacity": 8}, "max_rows is 0: set it to 1 or more"),
        ({"max_rows": 1, "capacity": 0}, "capacity is 0: set it between 1 and the model's context, 48"),
        ({"max_rows": 1, "capacity": 49}, "capacity is 49: set it between 1 and the model's context, 48"),
        ({"max_rows": 1, "capacity": 8, "invariant": True, "int8": True}, "choose one of invariant and int8"),
    ):
        with pytest.raises(HoneError, match=message):
            TorchRunner(decoder, **settings)
    runner = TorchRunner(decoder, max_rows=1, capacity=8)
    with pytest.raises(ValueError, match="a part from 2 to 2 of a prompt of 2 tokens"):
        runner.prefill([PromptChunk(prompt=(1, 2), start=2, end=2, blocks=(0,))])


def test_threads_are_those_that_pay_and_are_given_back():
    tiny = build()
    assert plain.paying_threads(tiny, 1) == 1
    wide = Decoder(DecoderConfig(vocab_size=8, hidden_size=512, intermediate_size=1024, num_hidden_layers=1))
    assert plain.paying_threads(wide, 64) > 16
    torch.set_num_threads(3)
    try:
        runner, table = make_runner(tiny, max_rows=1, capacity=16), Table()
        begin(runner, table, {0: prompt_of(3)}, limit=2)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(1)
