"""The layers in C++ against the plain ones, and the bits of a token in any company."""

import gc
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from each import each
from torch import Tensor

from hone.engine.draw import draw
from hone.engine.params import SamplingTensors
from hone.engine.runners.choose import make_runner
from hone.engine.runners.native.layers import NativeInvariantLayers, NativeLayers, why_not_covered
from hone.engine.runners.native.runner import NativeRunner
from hone.engine.runners.torch.kv_cache import RowChunk
from hone.engine.runners.torch.layers import Attend, TorchLayers
from hone.model.config import DecoderConfig
from hone.model.decoder import Decoder
from hone.model.kernels.cpp import library as building
from hone.model.kernels.cpp.library import VARIABLE, library
from hone.model.lora import LoRALinear, add_lora

torch.set_num_threads(1)
VOCAB, CONTEXT = 101, 96
SHAPES: dict[str, dict[str, Any]] = {
    "heads of 16": {"hidden_size": 50, "intermediate_size": 70, "head_dim": 16},
    "heads of 32": {"hidden_size": 64, "intermediate_size": 97, "head_dim": 32, "qkv_bias": True, "mlp_bias": True},
    "heads of 48": {"hidden_size": 33, "intermediate_size": 49, "head_dim": 48, "qk_norm": True},
    "heads of 64": {"hidden_size": 128, "intermediate_size": 64, "head_dim": 64, "windows": (0, 20), "o_bias": True},
    "heads of 128": {"hidden_size": 48, "intermediate_size": 48, "head_dim": 128, "tie_word_embeddings": False},
}
LENGTHS = [1, 40, 17, 5, 33, 16, 2, 64, 9, 9, 9, 31, 8, 15, 3, 70, 4, 22, 11]
ADAPTED = [("all-linear",), ("q_proj", "v_proj"), ("k_proj", "up_proj"), ("gate_proj",), ("o_proj", "down_proj")]


def made(shape: str) -> Decoder:
    config = {"vocab_size": VOCAB, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config |= {"max_position_embeddings": CONTEXT, "initializer_range": 0.2}
    with torch.random.fork_rng(), torch.inference_mode(False):
        torch.manual_seed(0)
        decoder = Decoder(DecoderConfig(**{**config, **SHAPES[shape]}))
        for p in decoder.parameters():
            if p.ndim == 1:
                torch.nn.init.normal_(p, mean=1.0, std=0.3)
    if why := why_not_covered(decoder):
        pytest.skip(why)
    return decoder


def adapt(decoder: Decoder, name: str, rank: int, targets: tuple[str, ...] = ("all-linear",)) -> None:
    """Add an adapter that changes what the layers give, and select it."""
    add_lora(decoder, name=name, rank=rank, alpha=2.0 * rank, targets=targets, seed=rank)
    g = torch.Generator().manual_seed(rank)
    for key, p in decoder.named_parameters():
        if f"{name}.lora_B" in key:
            torch.nn.init.normal_(p, std=0.2 * rank**-0.5, generator=g)


def select(decoder: Decoder, name: str | None) -> None:
    for layer in decoder.modules():
        if isinstance(layer, LoRALinear):
            layer.enabled, layer.selected = name is not None, name or layer.selected


class InCpp(NativeLayers):
    """Nothing is left to torch."""

    def _run(self, tokens: Tensor, positions: Tensor, slots: Tensor, attend: Attend) -> Tensor:
        raise AssertionError("the library covers it")


def pieces(lengths: list[int], start: int = 0) -> list[RowChunk]:
    g = torch.Generator().manual_seed(1)
    tokens = [torch.randint(0, VOCAB, (n,), generator=g).tolist() for n in lengths]
    return [RowChunk(row=r, start=start, tokens=tuple(t)) for r, t in enumerate(tokens)]


def steps(layers: TorchLayers, lengths: list[int], count: int) -> Tensor:
    """Hidden states and logits of prompts and of some tokens after them, [1 + count, rows, D + V]."""
    hidden = [layers.read(pieces(lengths))]
    for i in range(count):
        at = torch.tensor(lengths) + i
        tokens = (at * 7 + torch.arange(len(lengths))) % VOCAB
        hidden.append(layers.step(tokens, at, at, columns=int(at.max()) + 1, even=len(set(lengths)) == 1))
    return torch.stack([torch.cat([h, layers.logits(h)], 1) for h in hidden])


def close(found: Tensor, plain: Tensor) -> None:
    """Within 1e-5 of the largest number."""
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.to(plain), plain, rtol=1e-5, atol=1e-5 * float(plain.abs().max()))


def same_as_plain(decoder: Decoder, layers: TorchLayers) -> None:
    """The layers give what the plain ones give, in float32 and in float64."""
    found = steps(layers, LENGTHS, 3)
    close(found, steps(TorchLayers(decoder, len(LENGTHS), CONTEXT), LENGTHS, 3))
    close(found, steps(TorchLayers(decoder.double(), len(LENGTHS), CONTEXT), LENGTHS, 3))
    decoder.float()


@pytest.mark.parametrize("shape", SHAPES)
@torch.inference_mode()
def test_hidden_states_and_logits_are_those_of_the_plain_layers(shape):
    decoder = made(shape)
    same_as_plain(decoder, InCpp(decoder, len(LENGTHS), CONTEXT))


@pytest.mark.parametrize(("heads", "shared"), [(1, 1), (2, 3), (4, 1), (8, 2), (16, 1), (3, 2)])
@torch.inference_mode()
def test_heads_of_one_vector_are_those_of_the_plain_layers(heads, shared, monkeypatch):
    found = library()
    assert not isinstance(found, str)
    lanes = found.hone_lanes()
    sizes = {"num_key_value_heads": heads, "num_attention_heads": heads * shared, "head_dim": lanes}
    monkeypatch.setitem(SHAPES, "woven", {"hidden_size": 40, "intermediate_size": 36, "windows": (0, 7), **sizes})
    decoder = made("woven")
    layers = InCpp(decoder, len(LENGTHS), CONTEXT)
    assert layers.slab.memory[0].shape[2 if lanes % heads else 3] == heads  # neighbours, if they fill a vector
    same_as_plain(decoder, layers)


@each("rank", [1, 3, 16])
@each("targets", ADAPTED)
@each("shape", ["heads of 32", "heads of 48", "heads of 64"])
@torch.inference_mode()
def test_adapters_are_those_of_the_plain_layers(shape, targets, rank):
    decoder = made(shape)
    base = steps(InCpp(decoder, len(LENGTHS), CONTEXT), LENGTHS, 3)
    adapt(decoder, "one", rank, targets)
    layers = InCpp(decoder, len(LENGTHS), CONTEXT)
    assert (steps(layers, LENGTHS, 3) - base).abs().max() > 0.1
    same_as_plain(decoder, layers)


@each(("shape", "adapters"), [("heads of 16", False), ("heads of 32", False), ("heads of 32", True)])
@each("rows", [2, 15, 16, 17, 33, 48, 63, 64, 65, 130])
@torch.inference_mode()
def test_a_row_is_the_same_to_the_bit_with_any_others_and_on_any_number_of_threads(rows, shape, adapters):
    same_in_any_company(rows, shape, adapters)


def same_in_any_company(rows: int, shape: str, adapters: bool) -> None:
    decoder = made(shape)
    if adapters:
        adapt(decoder, "one", 13)
    lengths = [1 + (5 * r) % 23 for r in range(rows)]
    layers = InCpp(decoder, rows, CONTEXT)
    together = steps(layers, lengths, 2)
    for threads, small in ((2, True), (3, False), (4, True)):
        torch.set_num_threads(threads)
        layers.small = small
        assert torch.equal(steps(layers, lengths, 2), together)
        torch.set_num_threads(1)
    few = steps(InCpp(decoder, 2, CONTEXT), lengths[:2], 2)
    assert torch.equal(few[:, 0], together[:, 0])


def test_adapters_are_switched_between_steps():
    decoder, names = made("heads of 16"), ("one", None, "two", "one", None)
    adapt(decoder, "one", 2)
    adapt(decoder, "two", 19, ("v_proj", "down_proj"))
    at = torch.tensor([5, 9])

    def next_of(layers: TorchLayers) -> Tensor:
        select(decoder, None)
        layers.read(pieces([5, 9]))
        found = list[Tensor]()
        for name in names:
            select(decoder, name)
            gc.collect()
            found.append(layers.step(at, at, at, columns=10, even=False))
        return torch.stack(found)

    with torch.inference_mode():
        found, plain = next_of(InCpp(decoder, 2, CONTEXT)), next_of(TorchLayers(decoder, 2, CONTEXT))
    close(found, plain)
    assert torch.equal(found[3:], found[:2])
    assert len({tuple(x.flatten().tolist()) for x in found}) == 3


@pytest.mark.parametrize("moved", [False, True])
def test_what_an_optimiser_does_to_an_adapter_is_seen_at_the_next_step(moved):
    decoder, at = made("heads of 16"), torch.tensor([7])
    adapt(decoder, "one", 4)
    learnt = [p for p in decoder.parameters() if p.requires_grad]
    optimiser = torch.optim.SGD(learnt, lr=0.05)
    layers, plain = InCpp(decoder, 1, CONTEXT), TorchLayers(decoder, 1, CONTEXT)

    def step_of(layers: TorchLayers) -> Tensor:
        with torch.inference_mode():
            return layers.step(at, at, at, columns=8, even=True)

    with torch.inference_mode():
        layers.read(pieces([7]))
        plain.read(pieces([7]))
    before = step_of(layers)
    for p in learnt:
        p.grad = p.detach().sign()
        if moved:
            p.data = p.data.clone()
    optimiser.step()
    after = step_of(layers)
    assert (after - before).abs().max() > 0.1
    close(after, step_of(plain))


@pytest.mark.parametrize("kind", [NativeLayers, NativeInvariantLayers])
@torch.inference_mode()
def test_an_adapter_that_does_not_lie_in_one_piece_is_left_to_torch(kind):
    decoder = made("heads of 16")
    adapt(decoder, "one", 4)
    straight = steps(InCpp(decoder, 3, CONTEXT), [5, 9, 2], 2)
    for key, p in decoder.named_parameters():
        if "lora_A" in key:
            p.data = p.data.t().contiguous().t()
    assert why_not_covered(decoder) == "weights that do not lie in one piece"
    close(steps(kind(decoder, 3, CONTEXT), [5, 9, 2], 2), straight)


@torch.inference_mode()
def test_a_head_that_is_adapted_is_left_to_torch():
    decoder = made("heads of 128")
    adapt(decoder, "one", 5, ("all-linear", "lm_head"))
    same_as_plain(decoder, InCpp(decoder, len(LENGTHS), CONTEXT))


@pytest.mark.parametrize("shape", ["heads of 16", "heads of 64"])
@torch.inference_mode()
def test_a_prompt_read_in_parts_is_the_same_to_the_bit(shape):
    same_in_parts(shape)


def same_in_parts(shape: str) -> None:
    decoder, (whole,) = made(shape), pieces([50])
    at_once, later = NativeLayers(decoder, 1, CONTEXT), NativeLayers(decoder, 1, CONTEXT)
    exact = at_once.read([whole])
    for start, end in ((0, 1), (1, 30), (30, 50)):
        hidden = later.read([RowChunk(row=0, start=start, tokens=whole.tokens[start:end])])
    assert torch.equal(hidden, exact)


@each("vocab", [3, 16, 320, 1024, 1030, 5000])
def test_the_tokens_drawn_are_those_that_torch_draws(vocab):
    layers = NativeLayers(made("heads of 16"), 1, 8)
    g = torch.Generator().manual_seed(vocab)  # a number within rounding of a boundary may give either token
    x, u = torch.randn(64, vocab, generator=g) * 3, torch.rand(64, dtype=torch.float64, generator=g)
    x[0, 0] = x[1] = -torch.inf  # never drawn
    x[1, 1] = 5.0
    u[:4] = torch.tensor([0.0, 0.0, 1.0, 0.0])
    token, logp, _ = draw(x, u, SamplingTensors.plain(64, vocab, "cpu"))
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
    assert isinstance(make_runner(decoder, max_rows=1, capacity=8), NativeRunner)
    monkeypatch.setenv(VARIABLE, "0")
    assert why_not_covered(decoder) == "HONE_NATIVE is 0"
    assert not isinstance(make_runner(decoder, max_rows=1, capacity=8), NativeRunner)
    assert why_not_covered(decoder.double()) == "numbers other than float32"


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
    monkeypatch.setattr(building, "SOURCES", (source,))
    assert str(library()).startswith(("the C++ library was not built: ", "there is no C++ compiler"))
    assert not list(elsewhere.glob("native/*"))


def test_what_was_built_is_found_again_and_only_building_it_is_told(elsewhere, monkeypatch, capsys):
    if isinstance(found := library(), str):
        pytest.skip(found)
    assert capsys.readouterr() == ("", "compiling the CPU kernels, once: about 15 s\n")
    building._library.cache_clear()
    monkeypatch.setattr(subprocess, "run", _no_compiling(subprocess.run))
    assert not isinstance(library(), str)
    assert capsys.readouterr() == ("", "")
    assert len(list(elsewhere.glob("native/*"))) == 1


def _no_compiling(run: Any) -> Any:
    def asked(command: list[str], **how: Any) -> Any:
        assert "--version" in command
        return run(command, **how)

    return asked


COMPILER = """#!/bin/sh
echo once >>"$0.log"
while [ "$1" != -o ]; do shift; done
echo built >"$2"
"""


def test_who_needs_the_library_while_another_builds_it_waits_and_builds_nothing(tmp_path: Path):
    compiler, target = tmp_path / "compiler", tmp_path / "native" / "hone.so"
    compiler.write_text(COMPILER)
    compiler.chmod(0o755)
    threads = [threading.Thread(target=building.compile_library, args=(str(compiler), target)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert target.read_text() == "built\n"
    assert len((tmp_path / "compiler.log").read_text().splitlines()) == len(building.SOURCES) + 1
