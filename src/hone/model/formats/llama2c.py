"""Models in the llama2.c format: a header of seven numbers, float32 tensors, and a vocabulary with scores."""

import math
import struct
from pathlib import Path

import numpy as np
import tokenizers
import torch
from tokenizers import AddedToken, decoders, models, normalizers, processors
from torch import Tensor

from hone.data.text.tokenizer import Tokenizer
from hone.errors import HoneError
from hone.model.config import DecoderConfig
from hone.model.decoder import Decoder
from hone.model.formats.folder import assemble

UNKNOWN, BEGIN, END = "<unk>", "<s>", "</s>"
SPACE = "\u2581"  # how pieces write a space


def load_llama2c(weights: str | Path, vocabulary: str | Path) -> tuple[Decoder, Tokenizer]:
    """The model of a .bin file and its tokenizer."""
    data = _read(Path(weights))
    if len(data) < 28:
        raise HoneError(f"{weights} has {len(data)} bytes: it is no llama2.c model, give the path of one")
    dim, hidden, layers, heads, kv_heads, size, context = struct.unpack("<7i", data[:28])
    if min(dim, hidden, layers, heads, kv_heads, abs(size), context) < 1:
        raise HoneError(f"{weights} is no llama2.c model: its header has sizes below 1, give the path of one")
    try:
        config = DecoderConfig(
            vocab_size=abs(size),
            hidden_size=dim,
            intermediate_size=hidden,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            max_position_embeddings=context,
            tie_word_embeddings=size > 0,
        )
    except (ValueError, ZeroDivisionError) as error:
        raise HoneError(f"{weights} is no llama2.c model: its header says {error}, give the path of one") from error
    return assemble(config, _tensors(data, config, str(weights))), _tokenizer(_read(Path(vocabulary)), abs(size))


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise HoneError(f"cannot read {path}: {error.strerror}: check the path") from error


def _tensors(data: bytes, config: DecoderConfig, name: str) -> dict[str, Tensor]:
    """The tensors by Hugging Face's names, cut from the file in its order."""
    D, M, E, P = config.hidden_size, config.intermediate_size, config.head_dim, config.max_position_embeddings
    Q, K = config.num_attention_heads * E, config.num_key_value_heads * E
    shapes = [
        ("input_layernorm", (D,)), ("self_attn.q_proj", (Q, D)), ("self_attn.k_proj", (K, D)),
        ("self_attn.v_proj", (K, D)), ("self_attn.o_proj", (D, Q)), ("post_attention_layernorm", (D,)),
        ("mlp.gate_proj", (M, D)), ("mlp.down_proj", (D, M)), ("mlp.up_proj", (M, D)),
    ]  # fmt: skip
    flat, at = np.frombuffer(data[28 : len(data) - len(data) % 4], np.float32), 0

    def cut(*shape: int) -> Tensor:
        nonlocal at
        part = flat[at : at + math.prod(shape)]
        if len(part) < math.prod(shape):
            raise HoneError(f"{name} ends before its last tensor: copy it again")
        at += len(part)
        return torch.from_numpy(part.reshape(shape).copy())

    found = {"model.embed_tokens.weight": cut(config.vocab_size, D)}
    for kind, shape in shapes:
        stacked = cut(config.num_hidden_layers, *shape)
        for i, x in enumerate(stacked):
            found[f"model.layers.{i}.{kind}.weight"] = _halves(x, E) if kind.endswith(("q_proj", "k_proj")) else x
    found["model.norm.weight"] = cut(D)
    cut(2, P, E // 2)  # skips tables of cosines and sines, which the decoder computes
    if not config.tie_word_embeddings:
        found["lm_head.weight"] = cut(config.vocab_size, D)
    return {key: x.contiguous() for key, x in found.items()}


def _halves(x: Tensor, size: int) -> Tensor:
    """Reorder each head's rows: pairs that rotate together, (0, 1), (2, 3), ..., become (0, E/2), (1, E/2 + 1), ..."""
    return x.view(-1, size // 2, 2, x.shape[1]).transpose(1, 2).reshape(x.shape)


def _tokenizer(data: bytes, size: int) -> Tokenizer:
    """A BPE tokenizer that merges in the order of the pieces' scores; unknown characters become bytes."""
    pieces, at = dict[str, float](), 4
    try:
        for _ in range(size):
            score, length = struct.unpack_from("<fi", data, at)
            text = data[at + 8 : at + 8 + length].decode()
            pieces.setdefault({"\n<s>\n": BEGIN, "\n</s>\n": END}.get(text, text.replace(" ", SPACE)), score)
            at += 8 + length
    except (struct.error, UnicodeDecodeError) as error:
        raise HoneError(f"the vocabulary is no llama2.c one of {size} pieces ({error}): copy it again") from error
    if len(pieces) != size:
        raise HoneError(f"the vocabulary has {len(pieces)} different pieces of {size}: copy it again")
    if missing := [name for name in (UNKNOWN, BEGIN, END) if name not in pieces]:
        raise HoneError(f"the vocabulary has no piece {missing[0]}: copy it again")
    ids = {piece: i for i, piece in enumerate(pieces)}
    inner = tokenizers.Tokenizer(
        models.BPE(vocab=ids, merges=_merges(pieces, ids), unk_token=UNKNOWN, fuse_unk=True, byte_fallback=True)
    )
    inner.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
    inner.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    inner.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in (UNKNOWN, BEGIN, END)])
    inner.post_processor = processors.TemplateProcessing(single=f"{BEGIN} $A", special_tokens=[(BEGIN, ids[BEGIN])])
    return Tokenizer(inner, eos=END, bos=BEGIN, stops=(BEGIN,))  # a story ends where the next one would begin


def _merges(pieces: dict[str, float], ids: dict[str, int]) -> list[tuple[str, str]]:
    found = list[tuple[float, int, int, str, str]]()
    for piece, score in pieces.items():
        for i in range(1, len(piece)):
            left, right = piece[:i], piece[i:]
            if left in ids and right in ids:
                found.append((score, len(left), len(right), left, right))
    found.sort(key=lambda merge: merge[:3], reverse=True)
    return [(left, right) for *_, left, right in found]
