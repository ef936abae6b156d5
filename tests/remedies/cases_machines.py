"""What another library, another machine or a whole run refuses, and what each message asks for."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import torch
from cases_formats import gguf_file, with_pieces
from cases_models import foreign_folder
from cases_runs import RECIPE, begin, go_on
from remedy_world import Case, World, call, given, lacks, typed

from hone.data.text.tokenizer import Tokenizer
from hone.model.formats.folder import load_decoder
from hone.model.formats.gguf import load_gguf
from hone.model.formats.hf_config import config_from_hf
from hone.reward.learned.load import reward_model
from hone.reward.sandbox.limits import BackendOptions, interpreter
from hone.reward.sandbox.native import NativeSandbox
from hone.reward.sandbox.remote import TOKEN, RemoteBackend, SandboxService
from hone.reward.sandbox.sandbox import Sandbox, SandboxLimits
from hone.reward.verify.math.verdict import math_reward
from hone.serve.load import load
from hone.types import Task

SIZES = {"model_type": "qwen3", "vocab_size": 9, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
WINDOWED = {
    **SIZES,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "use_sliding_window": True,
    "sliding_window": 4,
}
SECRET = "a secret of the tests"


@contextmanager
def token(value: str) -> Iterator[None]:
    before = os.environ.pop(TOKEN, None)
    os.environ.update({TOKEN: value} if value else {})
    try:
        yield
    finally:
        os.environ.pop(TOKEN, None)
        os.environ.update({TOKEN: before} if before is not None else {})


class _Other(BaseHTTPRequestHandler):
    """A server that knows nothing of programs."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"[]")

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""


def _wanted(**limits: Any) -> BackendOptions:
    return BackendOptions(limits=SandboxLimits(**limits), slots=1, python=interpreter(), packages=())


def _served(world: World, use: Callable[[str], Any], *, other: bool = False) -> None:
    """A service of programs, or a server of something else, while it is used."""
    pool = None if other else NativeSandbox(_wanted())
    made = HTTPServer(("127.0.0.1", 0), _Other) if pool is None else _service(pool)
    with made as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            use(f"http://127.0.0.1:{server.server_port}")
        finally:
            server.shutdown()
            thread.join()
            if pool is not None:
                pool.close()


def _service(pool: NativeSandbox) -> SandboxService:
    return SandboxService(pool, SandboxLimits(), host="127.0.0.1", port=0, token=SECRET)


def _opened(world: World, secret: str = SECRET, *, other: bool = False, url: str = "", **limits: Any) -> None:
    with token(secret):
        _served(world, lambda there: RemoteBackend(url or there, _wanted(**limits)), other=other)


def _asked(world: World, backend: str) -> None:
    """A conversation with a program, of which each word depends on its answer."""

    def use(url: str) -> None:
        with Sandbox(backend=backend or url, slots=1) as sandbox:
            sandbox.converse(b"", most=1, seconds=1, ask=lambda records: None)

    with token(SECRET):
        _served(world, use)


SERVICES = [
    given(lambda w, secret: _opened(w, secret), "", SECRET, "put it into the environment as"),
    given(lambda w, n: _opened(w, processes=n), 3, 32, "or ask for no other"),
    given(lambda w, url: _opened(w, url=url), "http://127.0.0.1:1", "", "is it running?"),
    given(lambda w, other: _opened(w, other=other), True, False, "name another service"),
    given(_asked, "", "native", "use the backend native"),
]


def _labels(world: World, count: int, activation: str) -> None:
    """A reward model of transformers."""
    from transformers import LlamaConfig, LlamaForSequenceClassification

    folder = world.folder_of("model")
    shape = {"vocab_size": 258, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    heads = {
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "num_labels": count,
        "pad_token_id": 0,
        "hidden_act": activation,
    }
    LlamaForSequenceClassification(LlamaConfig(**shape, **heads)).save_pretrained(folder)
    reward_model([str(folder)], Tokenizer.load(folder), device="cpu")


def _computed(world: World, **more: Any) -> None:
    load_decoder(foreign_folder(world))(torch.ones(1, 3, dtype=torch.long), **more)


LIBRARIES = [
    given(
        lambda w, kind: config_from_hf({**SIZES, "num_attention_heads": 1, "model_type": kind}),
        "x",
        "llama",
        "use one of these",
    ),
    given(
        lambda w, kind: config_from_hf({**WINDOWED, "layer_types": [kind]}), "x", "full_attention", "use another model"
    ),
    given(lambda w, on: _computed(w, checkpoint_layers=on), True, False, "set train.layout=padded"),
    given(
        lambda w, model: load(str(model(w)), adapters={}, max_rows=1, device="cpu"),
        foreign_folder,
        lambda w: w / "model",
        "use a Llama, Mistral or Qwen",
    ),
    given(lambda w, n: _labels(w, n, "silu"), 2, 1, "use a model with one label"),
    given(lambda w, n: _labels(w, n, "relu"), 2, 1, "use a model with one label"),
    lacks(
        "transformers",
        lambda w: load_gguf(gguf_file(w, with_pieces())),
        "this GGUF file's tokenizer needs transformers",
    ),
    lacks("sympy", lambda w: math_reward("\\boxed{x+1}", Task(prompt="a", answer="1+x")), "pip install 'hone[math]'"),
]


def _check(world: World, reward: str) -> None:
    words = [f"model.path={world / 'model'}", f"data={world / 'problems.jsonl'}", "algo=grpo", "train.device=cpu"]
    words += [f"reward={world / 'rewards.py'}:{reward}", "sample.max_tokens=2", "train.prompts=2", "sample.group=2"]
    typed(world, "check", world.file(RECIPE, ".py"), f"out={world.new()}", *words, "train.steps=2")


def _stopped(world: World, *, on: bool) -> None:
    """A run that ends at a limit, and goes on with another."""
    out = world.new()
    words = ("algo=grpo", f"data={world / 'problems.jsonl'}", f"reward={world / 'rewards.py:length'}", "sample.group=2")
    limits = ("limits.truncated_stop=0.0", "limits.patience_stop=1", "sample.max_tokens=2")
    try:
        begin(world, *words, *limits, out=out)
    except Exception:
        if not on:
            raise
        go_on(world, Path(out), "limits.truncated_stop=1.0")


RUNS = [
    given(_check, "raises", "length", "do what each of them says"),
    call(lambda w: _stopped(w, on=False), lambda w: _stopped(w, on=True), "the run is saved in"),
]
MACHINES: list[Case] = [*SERVICES, *LIBRARIES, *RUNS]
