"""The layers in C++ against the plain ones, and the bits of a token in any company."""

import subprocess
from typing import Any

import pytest
import torch
from torch import Tensor

from hone.model.config import DecoderConfig
from hone.model.decoder import Decoder
from hone.model.native import build as building
from hone.model.native.build import OFF, library
from hone.model.native.layers import Native, NativeLayers, uncovered
from hone.model.plain import PlainRunner
from hone.model.plain_attention import Piece
from hone.model.plain_layers import PlainLayers
from hone.rollout.draw import Knobs, draw

torch.set_num_threads(1)
VOCAB, CONTEXT = 101, 96
SHAPES: dict[str, dict[str, Any]] = {
    "heads of 16": {"hidden_size": 50, "intermediate_size": 70, "head_dim": 16},
    "heads of 32": {"hidden_size": 64, "intermediate_size": 97, "head_dim": 32, "qkv_bias": True, "mlp_bias": True},
    "heads of 48": {"hidden_size": 33, "intermediate_size": 49, "head_dim": 48, "qk_norm": True},
    "heads of 64": {"hidden_size": 128, "intermediate_size": 64, "head_dim": 64, "windows": (0, 20), "o_bias": True},
    "heads of 128": {"hidden_size": 48, "intermediate_size": 48, "head_dim": 128, "tie_word_embeddings": False},
}


def made(shape: str) -> Decoder:
    config = {"vocab_size": VOCAB, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config |= {"max_position_embeddings": CONTEXT, "initializer_range": 0.2}
    with torch.random.fork_rng(), torch.inference_mode(False):
        torch.manual_seed(0)
        decoder = Decoder(DecoderConfig(**{**config, **SHAPES[shape]}))
        for p in decoder.parameters():
            if p.ndim == 1:
                torch.nn.init.normal_(p, mean=1.0, std=0.3)
    if why := uncovered(decoder):
        pytest.skip(why)
    return decoder


def pieces(lengths: list[int], start: int = 0) -> list[Piece]:
    g = torch.Generator().manual_seed(1)
    tokens = [torch.randint(0, VOCAB, (n,), generator=g).tolist() for n in lengths]
    return [Piece(row=r, start=start, tokens=tuple(t)) for r, t in enumerate(tokens)]


def steps(layers: PlainLayers, lengths: list[int], count: int) -> Tensor:
    """Hidden states and logits of prompts and of some tokens after them, [1 + count, rows, D + V]."""
    hidden = [layers.read(pieces(lengths))]
    for i in range(count):
        at = torch.tensor(lengths) + i
        tokens = (at * 7 + torch.arange(len(lengths))) % VOCAB
        hidden.append(layers.step(tokens, at, at, columns=int(at.max()) + 1, even=len(set(lengths)) == 1))
    return torch.stack([torch.cat([h, layers.logits(h)], 1) for h in hidden])


@pytest.mark.parametrize("shape", SHAPES)
@torch.inference_mode()
def test_hidden_states_and_logits_are_those_of_the_plain_layers(shape):
    decoder, lengths = made(shape), [1, 40, 17, 5, 33, 16, 2, 64, 9, 9, 9, 31, 8, 15, 3, 70, 4, 22, 11]
    exact = steps(PlainLayers(decoder.double(), len(lengths), CONTEXT), lengths, 3)
    found = steps(NativeLayers(decoder.float(), len(lengths), CONTEXT), lengths, 3)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), exact, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("rows", [2, 15, 16, 17, 33, 48, 63, 64, 65, 130])
@torch.inference_mode()
def test_a_row_is_the_same_to_the_bit_with_any_others_and_on_any_number_of_threads(rows):
    decoder = made("heads of 32")
    lengths = [1 + (5 * r) % 23 for r in range(rows)]
    layers = NativeLayers(decoder, rows, CONTEXT)
    together = steps(layers, lengths, 2)
    for threads, small in ((2, True), (3, False), (4, True)):
        torch.set_num_threads(threads)
        layers.small = small
        assert torch.equal(steps(layers, lengths, 2), together)
        torch.set_num_threads(1)
    few = steps(NativeLayers(decoder, 2, CONTEXT), lengths[:2], 2)
    assert torch.equal(few[:, 0], together[:, 0])


@torch.inference_mode()
def test_a_prompt_read_in_parts_is_the_same_to_the_bit():
    decoder, (whole,) = made("heads of 64"), pieces([50])
    at_once, later = NativeLayers(decoder, 1, CONTEXT), NativeLayers(decoder, 1, CONTEXT)
    exact = at_once.read([whole])
    for start, end in ((0, 1), (1, 30), (30, 50)):
        hidden = later.read([Piece(row=0, start=start, tokens=whole.tokens[start:end])])
    assert torch.equal(hidden, exact)


@pytest.mark.parametrize("vocab", [3, 16, 320, 1024, 1030, 5000])
def test_the_tokens_drawn_are_those_that_torch_draws(vocab):
    layers = NativeLayers(made("heads of 16"), 1, 8)
    x, u = torch.randn(64, vocab) * 3, torch.rand(64, dtype=torch.float64)
    x[0, 0] = x[1] = -torch.inf  # never drawn
    x[1, 1] = 5.0
    u[:4] = torch.tensor([0.0, 0.0, 1.0, 0.0])
    token, logp, _ = draw(x, u, Knobs.plain(64, vocab, "cpu"))
    found = layers.draw(x, u)
    assert found[0].tolist() == token.tolist()
    torch.testing.assert_close(found[1], logp, rtol=1e-6, atol=1e-6)
    x[2, 1] = torch.nan
    x[3, 0] = torch.inf
    found = layers.draw(x, u)
    assert not found[1][2:4].isfinite().any()
    assert found[0].min() >= 0
    assert found[0].max() < vocab


def test_it_is_chosen_where_it_can_be_and_can_be_turned_off(monkeypatch):
    decoder = made("heads of 16")
    assert isinstance(PlainRunner(decoder, max_rows=1, capacity=8).layers, Native)
    monkeypatch.setenv(OFF, "0")
    assert uncovered(decoder) == "HONE_NATIVE is 0"
    assert not isinstance(PlainRunner(decoder, max_rows=1, capacity=8).layers, Native)
    assert uncovered(decoder.double()) == "numbers other than float32"


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path):
    """Nothing is built yet."""
    building._library.cache_clear()
    monkeypatch.setenv("HONE_HOME", str(tmp_path))
    yield tmp_path
    building._library.cache_clear()


def test_without_a_compiler_the_reason_is_said(elsewhere, monkeypatch):
    monkeypatch.setenv("PATH", str(elsewhere))
    assert library() == "there is no C++ compiler"


def test_a_source_that_does_not_compile_leaves_nothing_behind(elsewhere, monkeypatch):
    source = elsewhere / "decode.cpp"
    source.write_text("int main( {")
    monkeypatch.setattr(building, "SOURCE", source)
    assert str(library()).startswith(("decode.cpp was not built: ", "there is no C++ compiler"))
    assert not list(elsewhere.glob("native/*"))


def test_what_was_built_is_found_again(elsewhere, monkeypatch):
    if isinstance(found := library(), str):
        pytest.skip(found)
    building._library.cache_clear()
    monkeypatch.setattr(subprocess, "run", _no_compiling(subprocess.run))
    assert not isinstance(library(), str)
    assert len(list(elsewhere.glob("native/*"))) == 1


def _no_compiling(run: Any) -> Any:
    def asked(command: list[str], **how: Any) -> Any:
        assert "--version" in command
        return run(command, **how)

    return asked
