"""A model folder with its adapters, ready to answer: what `hone serve` and `hone chat` start from."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from hone.data.text.tokenizer import Tokenizer, check_fits
from hone.engine.engine import Engine
from hone.engine.runner import Runner
from hone.engine.runners import choose
from hone.engine.runners.registry import column_bytes
from hone.errors import HoneError
from hone.model.decoder import Decoder
from hone.model.formats.cache import missing_folder, resolve
from hone.model.formats.folder import load_decoder
from hone.model.formats.foreign import Foreign
from hone.model.formats.peft import is_adapter, load_peft
from hone.model.lora import adapted_layers, use_adapter

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """One base model, its tokenizer, and an engine that answers with any of the adapters."""

    name: str
    tokenizer: Tokenizer
    engine: Engine
    vocab: int
    context: int  # prompt and completion of one request
    rows: int  # completions written at the same time
    adapters: Mapping[str, str]  # model name to the engine's name


def load(
    model: str,
    *,
    adapters: Mapping[str, str],
    max_rows: int,
    device: str = "auto",
    dtype: str = "auto",
    int8: bool = False,
    invariant: bool = False,
) -> LoadedModel:
    """MODEL is a folder or the name of a fetched model; adapters: folders by model name."""
    folder = resolve(model)
    if not folder.is_dir():
        raise missing_folder(folder)
    if is_adapter(folder):
        raise HoneError(f"{folder} is an adapter: give its base model, and the adapter with --adapter")
    where, precision = device_and_dtype(device, dtype)
    tokenizer, decoder = Tokenizer.load(folder), load_decoder(folder, dtype=precision)
    if isinstance(decoder, Foreign):
        raise HoneError(f"{folder} runs through transformers, which the engine cannot: use a Llama, Mistral or Qwen")
    check_fits(tokenizer, decoder.config.vocab_size)
    decoder.requires_grad_(False).eval()
    names = {name: f"adapter{i}" for i, name in enumerate(adapters)}
    for name, inner in names.items():
        load_peft(decoder, adapters[name], name=inner, train=False)
    for _, layer in adapted_layers(decoder):
        layer.enabled = False  # a request that names no adapter is answered by the base model
    decoder.to(where)
    runner = make_runner(decoder, max_rows=max_rows, int8=int8, invariant=invariant)
    return LoadedModel(
        name=Path(model).resolve().name if Path(model).exists() else model,
        tokenizer=tokenizer,
        engine=Engine(runner, vocab_size=decoder.config.vocab_size, decode=partial(tokenizer.decode, specials=False)),
        vocab=decoder.config.vocab_size,
        context=runner.capacity,
        rows=runner.max_rows,
        adapters=names,
    )


def make_runner(decoder: Decoder, *, max_rows: int, int8: bool, invariant: bool) -> Runner:
    """A runner whose rows have the model's whole context, or what fits into memory. Short memory means fewer rows."""
    columns = int(choose.SHARE * choose.free_memory(decoder.device)) // column_bytes(decoder)
    capacity = max(2, min(decoder.config.max_position_embeddings, columns - 1))
    switch = partial(use_adapter, decoder)
    return choose.make_runner(
        decoder, max_rows=max_rows, capacity=capacity, switch=switch, invariant=invariant, int8=int8
    )


def device_and_dtype(device: str, dtype: str) -> tuple[torch.device, torch.dtype]:
    """Device and dtype, as asked or as suits the machine."""
    name = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    try:
        where = torch.device(name)
    except RuntimeError:
        raise HoneError(f"--device is {name!r}: use auto, cpu, cuda or cuda:N") from None
    if where.type == "cuda" and not torch.cuda.is_available():
        raise HoneError(f"--device is {name}, but torch sees no GPU here: use --device cpu")
    suggested = "bfloat16" if where.type == "cuda" else "float32"
    return where, DTYPES[suggested if dtype == "auto" else dtype]
