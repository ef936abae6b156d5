"""Every parser of bytes from outside, as a function of bytes: it returns, or raises what it is documented to raise.

Anything else that comes out is a fault. `python -m tests.fuzz.run` feeds them inputs; what once broke one is kept in
corpus/NAME and tried again by every test run.
"""

import json
import os
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import save as to_safetensors

from hone.data.feed.files import File
from hone.data.rows.convert import Grouper, Tasker
from hone.data.text import template
from hone.data.text.chat import encode_turns, render
from hone.data.text.tokenizer import Tokenizer, train_bpe
from hone.errors import HoneError
from hone.model.formats.folder import load_decoder, load_scorer
from hone.model.formats.gguf import load_gguf
from hone.model.formats.llama2c import load_llama2c
from hone.model.formats.peft import read_peft
from hone.reward.sandbox import remote, sandbox
from hone.reward.sandbox.limits import SandboxLimits
from hone.reward.sandbox.protocol import JobOutput
from hone.reward.verify.math.verdict import math_reward
from hone.types import Outcome, Task

CORPUS = Path(__file__).parent / "corpus"
CONFIG: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 8, "hidden_size": 4, "intermediate_size": 6, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 16, "tie_word_embeddings": True,
}  # fmt: skip
ADAPTER = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
LAYER = "base_model.model.model.layers.0.self_attn.q_proj"
torch.set_num_threads(1)


@cache
def scratch() -> Path:
    """A folder in memory where there is one: a file is written for every input."""
    kept = tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None)
    folder = Path(kept.name)
    scratch.kept = kept  # pyright: ignore[reportFunctionMemberAccess]  # removed at the end of the process
    return folder


def folder_of(name: str, files: Mapping[str, bytes]) -> Path:
    """A folder with these files."""
    folder = scratch() / name
    folder.mkdir(exist_ok=True)
    for file, content in files.items():
        (folder / file).write_bytes(content)
    return folder


@cache
def tokenizer() -> Tokenizer:
    specials = ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
    return train_bpe(["a few words of text"], vocab_size=270, specials=specials)


@cache
def small_weights() -> bytes:
    """A decoder of CONFIG's shape, in Hugging Face's format."""
    attention = {"q_proj": (4, 4), "k_proj": (2, 4), "v_proj": (2, 4), "o_proj": (4, 4)}
    shapes = {f"self_attn.{name}": shape for name, shape in attention.items()}
    shapes |= {"mlp.gate_proj": (6, 4), "mlp.up_proj": (6, 4), "mlp.down_proj": (4, 6)}
    shapes |= {"input_layernorm": (4,), "post_attention_layernorm": (4,)}
    named: dict[str, tuple[int, ...]] = {f"model.layers.0.{name}.weight": shape for name, shape in shapes.items()}
    named |= {"model.embed_tokens.weight": (8, 4), "model.norm.weight": (4,)}
    return to_safetensors({name: np.ones(shape, np.float32) for name, shape in named.items()})


# --- the targets ---


def gguf(data: bytes) -> None:
    path = scratch() / "model.gguf"
    path.write_bytes(data)
    with suppress(HoneError):
        load_gguf(path)


def llama2c(data: bytes) -> None:
    """The weights and the vocabulary, with a mark between them."""
    files = [scratch() / name for name in ("model.bin", "words.bin")]
    for path, part in zip(files, data.partition(b"VOCABULARY")[::2], strict=True):
        path.write_bytes(part)
    with suppress(HoneError):
        load_llama2c(*files)


def safetensors(data: bytes) -> None:
    folder = folder_of("weights", {"config.json": json.dumps(CONFIG).encode(), "model.safetensors": data})
    with suppress(HoneError):
        load_decoder(folder)


def config(data: bytes) -> None:
    folder = folder_of("config", {"config.json": data, "model.safetensors": small_weights()})
    for load in (load_decoder, load_scorer):
        with suppress(HoneError):
            load(folder)


def adapter(data: bytes) -> None:
    pair = {
        f"{LAYER}.lora_A.weight": np.ones((2, 4), np.float32),
        f"{LAYER}.lora_B.weight": np.ones((4, 2), np.float32),
    }
    folder = folder_of("adapter", {"adapter_config.json": data, "adapter_model.safetensors": to_safetensors(pair)})
    with suppress(HoneError):
        found = read_peft(folder)
        assert all(0 < found.scale(layer) < float("inf") for layer in found.tensors), "a scale that is no number"


def jsonl(data: bytes) -> None:
    path = scratch() / "rows.jsonl"
    path.write_bytes(data)
    groups, tasks = (kind(tokenizer=tokenizer_with_template(), skip_bad=True) for kind in (Grouper, Tasker))
    with suppress(HoneError):
        for read in File(path=path).read():
            if not read.problem:
                groups(read.row, "row")
                tasks(read.row, "row")


@cache
def tokenizer_with_template() -> Tokenizer:
    found = tokenizer()
    return Tokenizer(found.inner, eos=found.eos, pad=found.pad, chat_template=template.DEFAULT_TEMPLATE)


def _use(folder: Path) -> None:
    with suppress(HoneError):
        found = Tokenizer.load(folder)
        found.decode(found.encode("Some text, 123!\n", specials=True))
        talk = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "yes"}]
        if found.chat_template is not None:
            encode_turns(found, talk)


def tokenizer_json(data: bytes) -> None:
    _use(folder_of("tokenizer", {"tokenizer_config.json": b'{"eos_token": "<eos>"}', "tokenizer.json": data}))


def tokenizer_config(data: bytes) -> None:
    inner = tokenizer().inner.to_str().encode()
    _use(folder_of("tokenizer_config", {"tokenizer_config.json": data, "tokenizer.json": inner}))


def chat_template(data: bytes) -> None:
    found = tokenizer()
    text = data.decode("utf-8", "replace")
    named = Tokenizer(found.inner, eos=found.eos, pad=found.pad, chat_template=text)
    seconds, template.SECONDS = template.SECONDS, 0.5
    try:
        for messages in ([{"role": "user", "content": "hello"}], [{"role": "tool", "content": {"a": [1, None]}}]):
            with suppress(HoneError):
                render(named, messages, generation=True)
    finally:
        template.SECONDS = seconds


def maths(data: bytes) -> None:
    """The gold answer and the completion, with a zero byte between them."""
    gold, _, text = data.decode("utf-8", "replace").partition("\0")
    task = Task(prompt="", answer=gold or "5", id="")
    for completion in (text, f"The final answer is $\\boxed{{{text}}}$."):
        with suppress(HoneError):
            assert isinstance(math_reward(completion, task), Outcome), "no outcome"


def sandbox_protocol(data: bytes) -> None:
    talk = JobOutput(output=1000, result=10_000, most=16)
    for at in range(0, len(data), 7):
        talk.data(data[at : at + 7])
    assert len(talk.records) <= talk.most, "more records than may come"
    sandbox._finished(talk, 1.0, asked=False)
    with suppress(ArithmeticError, KeyError, TypeError, ValueError, RecursionError):  # the service's answer is 400
        remote._read(data, SandboxLimits())


TARGETS: dict[str, Callable[[bytes], None]] = {
    "gguf": gguf,
    "safetensors": safetensors,
    "jsonl": jsonl,
    "tokenizer": tokenizer_json,
    "template": chat_template,
    "maths": maths,
    "sandbox": sandbox_protocol,
    "config": config,
    "adapter": adapter,
    "llama2c": llama2c,
    "tokenizer_config": tokenizer_config,
}


def corpus(name: str) -> list[bytes]:
    """What is tried first, and made others of: seeds, and inputs that once broke something."""
    return [path.read_bytes() for path in sorted((CORPUS / name).iterdir())]
