"""8-bit weights: exact where they can be, close where they cannot, and never older than the learner's."""

import pytest
import torch

from hone.engine.params import SampleParams
from hone.engine.runner import PromptChunk, Seat
from hone.engine.runners.torch.int8 import Int8, Int8Layers, int8_weights, rounded
from hone.engine.runners.torch.runner import TorchRunner
from hone.model.config import DecoderConfig
from hone.model.decoder import Decoder
from hone.model.lora import add_lora

torch.set_num_threads(1)
PROMPT = (3, 1, 4, 1, 5, 9, 2, 6)


def build() -> Decoder:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = DecoderConfig(
            vocab_size=40, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=32, initializer_range=0.15,
        )  # fmt: skip
        return Decoder(config)


def first_raw(runner: TorchRunner) -> tuple[int, float, float]:
    """Token, logp and raw after the prompt, greedily."""
    params = SampleParams(max_tokens=4, temperature=0.0, stop_ids=frozenset())
    seat = Seat(row=0, random_id=0, params=params, limit=4, blocks=(0,))
    written = runner.prefill([PromptChunk(prompt=PROMPT, start=0, end=8, blocks=(0,), seats=(seat,))]).read()
    return int(written.token[0]), float(written.logp[0]), float(written.raw[0])


def test_whole_numbers_up_to_127_are_kept_exactly():
    generator = torch.Generator().manual_seed(0)
    weight = torch.randint(-126, 127, (6, 32), generator=generator).float()
    x = torch.randint(-126, 127, (5, 32), generator=generator).float()
    weight[:, 0], x[:, 0] = 127, -127
    scale = 2.0 ** torch.arange(6)[:, None]
    assert torch.equal(Int8.of(weight * scale).product(x / 8), (x @ weight.t()) * scale.t() / 8)


def test_the_error_of_a_number_is_half_a_step_of_its_row():
    x = torch.randn(7, 50, generator=torch.Generator().manual_seed(0)) * torch.logspace(-20, 20, 7)[:, None]
    whole, scale = rounded(x)
    assert whole.dtype == torch.int8
    assert whole.abs().amax(-1).tolist() == [127] * 7
    assert bool(((whole * scale - x).abs() <= 0.5001 * scale).all())


def test_a_row_of_zeros_is_zero():
    zero = torch.zeros(2, 8)
    assert torch.equal(Int8.of(zero).product(torch.randn(3, 8)), torch.zeros(3, 2))
    assert torch.equal(Int8.of(torch.randn(2, 8)).product(torch.zeros(3, 8)), torch.zeros(3, 2))


def test_log_probs_are_close_and_those_of_the_rounded_model():
    decoder = build()
    exact = first_raw(TorchRunner(decoder, max_rows=2, capacity=32))
    runner = TorchRunner(decoder, max_rows=2, capacity=32, int8=True)
    near = first_raw(runner)
    assert near[0] == exact[0]
    assert near != exact
    assert near[1:] == pytest.approx(exact[1:], abs=0.05)
    assert len(runner.decode(1).read().row) == 1


def test_every_product_has_its_copy_at_a_quarter_of_the_memory():
    decoder = build()
    runner = TorchRunner(decoder, max_rows=1, capacity=32, int8=True)
    first_raw(runner)
    layers = runner.layers
    assert isinstance(layers, Int8Layers)
    assert layers.copies.keys() == int8_weights(layers.weights).keys()
    assert len(layers.copies) == 2 * 4 + 1
    numbers = sum(w.numel() for w in layers._bases())
    assert sum(c.whole.nbytes + c.scale.nbytes for c in layers.copies.values()) - numbers < 0.1 * numbers


def test_a_step_of_the_optimiser_is_followed():
    decoder = build()
    runner = TorchRunner(decoder, max_rows=1, capacity=32, int8=True)
    before = first_raw(runner)
    kept = runner.layers.copies if isinstance(runner.layers, Int8Layers) else None
    assert first_raw(runner) == before
    assert isinstance(runner.layers, Int8Layers)
    assert runner.layers.copies is kept  # nothing changed, nothing was rounded again
    optimizer = torch.optim.SGD(decoder.parameters(), lr=0.5)
    decoder.logits(decoder(torch.tensor([PROMPT])))[0, -1].log_softmax(-1)[before[0]].backward()
    optimizer.step()
    after = first_raw(runner)
    assert after != before
    token, _, raw = first_raw(TorchRunner(decoder, max_rows=1, capacity=32))
    assert after[0] == token
    assert after[2] == pytest.approx(raw, abs=0.05)


def test_adapters_are_not_rounded():
    decoder = build()
    plain = first_raw(TorchRunner(decoder, max_rows=1, capacity=32, int8=True))
    add_lora(decoder, rank=2, alpha=4.0, targets=("all-linear",))
    runner = TorchRunner(decoder, max_rows=1, capacity=32, int8=True)
    assert first_raw(runner) == plain  # B is zero
    for name, p in decoder.named_parameters():
        if name.endswith("lora_B"):
            torch.nn.init.constant_(p, 0.05)
    token, _, raw = first_raw(runner)
    exact = first_raw(TorchRunner(decoder, max_rows=1, capacity=32))
    assert token == exact[0]
    assert raw == pytest.approx(exact[2], abs=0.05)
    assert raw != plain[2]
