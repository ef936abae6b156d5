"""hone chat, serve: a model in the terminal, or behind an OpenAI-compatible server on this machine."""

import argparse
import os
import secrets
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from hone.commands.command import Command, check_port
from hone.errors import HoneError

if TYPE_CHECKING:
    from hone.serve.load import LoadedModel


EXAMPLE = """\
models: {models}
{rows} completions at a time, {context} tokens of context each; Ctrl-C stops the server

  from openai import OpenAI
  client = OpenAI(base_url="{url}/v1", api_key={key})
  client.{call}

  curl {url}/v1/{path} -H "Authorization: Bearer {shell}" \\
    -H "Content-Type: application/json" -d '{body}'
"""


def _chat_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a model folder, or the name of a fetched model")
    parser.add_argument("--adapter", default="", metavar="FOLDER", help="with this LoRA adapter on")
    parser.add_argument("--system", default="", metavar="TEXT", help="the system message")
    parser.add_argument("--temperature", type=float, default=0.7, metavar="T", help="0: greedy (default: 0.7)")
    parser.add_argument("--top-p", type=float, default=1.0, metavar="P", help="default: 1, everything")
    parser.add_argument("--seed", type=int, default=None, metavar="N", help="for the same answers again")
    parser.add_argument("--max-tokens", type=int, default=512, metavar="N", help="an answer (default: 512)")
    add_model_options(parser)


def _chat(arguments: argparse.Namespace) -> None:
    from hone.engine.params import SampleParams
    from hone.serve.chat import Conversation, Terminal

    adapters = {"adapter": arguments.adapter} if arguments.adapter else {}
    settings = SampleParams(
        max_tokens=arguments.max_tokens,
        temperature=arguments.temperature,
        top_p=arguments.top_p,
        stop_ids=frozenset(),
        seed=secrets.randbits(64) if arguments.seed is None else arguments.seed,
    )
    loaded = _load(arguments, adapters, max_rows=1)
    conversation = Conversation(loaded, settings, adapter=loaded.adapters.get("adapter"))
    Terminal(conversation, system=arguments.system).run()


def _serve_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a model folder, or the name of a fetched model")
    parser.add_argument("--host", default="127.0.0.1", metavar="ADDRESS", help="default: 127.0.0.1, this machine only")
    parser.add_argument("--port", type=int, default=8000, metavar="N", help="default: 8000; 0: any that is free")
    parser.add_argument(
        "--token", default="", metavar="TOKEN", help="what clients must send; better in HONE_TOKEN (default: random)"
    )
    parser.add_argument(
        "--adapter", action="append", default=[], metavar="NAME=FOLDER", help="a LoRA adapter, served as model NAME"
    )
    parser.add_argument("--max-rows", type=int, default=32, metavar="N", help="completions at a time (default: 32)")
    parser.add_argument("--max-tokens", type=int, default=0, metavar="N", help="the most a completion may ask for")
    parser.add_argument("--concurrency", type=int, default=64, metavar="N", help="requests at a time (default: 64)")
    parser.add_argument("--timeout", type=float, default=600.0, metavar="S", help="seconds a request (default: 600)")
    add_model_options(parser)


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Options for the device and number format of a model."""
    parser.add_argument("--device", default="auto", metavar="NAME", help="auto, cpu, cuda or cuda:N (default: auto)")
    parser.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16"), help="default: auto")
    parser.add_argument("--invariant", action="store_true", help="no answer depends on what else is served, to the bit")
    parser.add_argument(
        "--int8", action="store_true", help="weights in 8 bits, on a CPU: faster for one answer at a time, less exact"
    )


def _load(arguments: argparse.Namespace, adapters: Mapping[str, str], *, max_rows: int) -> "LoadedModel":
    from hone.serve.load import load

    return load(
        arguments.model,
        adapters=adapters,
        max_rows=max_rows,
        device=arguments.device,
        dtype=arguments.dtype,
        int8=arguments.int8,
        invariant=arguments.invariant,
    )


def _serve(arguments: argparse.Namespace) -> None:
    _check(arguments)
    adapters = dict(map(_named, arguments.adapter))
    if len(adapters) < len(arguments.adapter):
        raise HoneError("two adapters have one name: give each its own, as in --adapter NAME=FOLDER")
    chosen = arguments.token or os.environ.get("HONE_TOKEN", "")
    try:
        import pydantic  # noqa: F401
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError:
        raise HoneError("hone serve needs uvicorn, starlette and pydantic: pip install 'hone[serve]'") from None
    from hone.serve.app import ServerLimits, Service, make_app
    from hone.serve.body import ServedModels
    from hone.serve.dispatcher import Dispatcher
    from hone.serve.http import Access, is_address
    from hone.serve.server import listen, serve

    token = chosen or secrets.token_urlsafe(32)
    access = Access(host=arguments.host, token=token)
    sock = listen(arguments.host, arguments.port)
    loaded = _load(arguments, adapters, max_rows=arguments.max_rows)
    if loaded.name in adapters:
        raise HoneError(f"an adapter has the base model's name {loaded.name}: give it another")
    served = ServedModels(
        tokenizer=loaded.tokenizer,
        adapters={loaded.name: None, **loaded.adapters},
        vocab=loaded.vocab,
        context=loaded.context,
        max_tokens=arguments.max_tokens,
        created=int(time.time()),
    )
    limits = ServerLimits(concurrency=arguments.concurrency, seconds=arguments.timeout)
    dispatcher = Dispatcher(loaded.engine, note=_say)
    if arguments.host != "localhost" and not is_address(arguments.host, loopback=True):
        _say(f"warning: {arguments.host} can be reached from other machines, and what is sent is not encrypted")
    port = sock.getsockname()[1]
    app = make_app(Service(served, dispatcher, access, limits=limits, note=_say))

    def greet() -> None:
        _greet(loaded, arguments.host, port, token="" if chosen else token)

    if not serve(app, dispatcher, sock, ready=greet):
        os._exit(0)  # Python cannot exit while a thread computes


def _check(arguments: argparse.Namespace) -> None:
    for name, value, least in (
        ("max-rows", arguments.max_rows, 1),
        ("concurrency", arguments.concurrency, 1),
        ("max-tokens", arguments.max_tokens, 0),
    ):
        if value < least:
            raise HoneError(f"--{name} is {value}: set it to {least} or more")
    check_port(arguments.port)
    if not 0 < arguments.timeout < 1e9:
        raise HoneError(f"--timeout is {arguments.timeout}: give a positive number of seconds")


def _named(text: str) -> tuple[str, str]:
    name, _, folder = text.partition("=")
    if not name or not folder or not name.isprintable() or name != name.strip():
        raise HoneError(f"--adapter {text}: write NAME=FOLDER")
    return name, folder


def _say(text: str) -> None:
    print(f"hone: {text}", file=sys.stderr, flush=True)


def _greet(loaded: "LoadedModel", host: str, port: int, *, token: str) -> None:
    """Print the address. token: printed this once; "" if the user has chosen it."""
    name = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    url = f"http://[{name}]:{port}" if ":" in name else f"http://{name}:{port}"
    if loaded.tokenizer.chat_template is None:
        path, call = "completions", f'completions.create(model="{loaded.name}", prompt="Once", max_tokens=32)'
        body = f'{{"model": "{loaded.name}", "prompt": "Once", "max_tokens": 32}}'
    else:
        message = '[{"role": "user", "content": "Hello"}]'
        path, call = (
            "chat/completions",
            f'chat.completions.create(model="{loaded.name}", messages={message}, max_tokens=200)',
        )
        body = f'{{"model": "{loaded.name}", "messages": {message}, "max_tokens": 200}}'
    print(f"serving {loaded.name} at {url}/v1" + (f"  token {token}" if token else "  with your token"))
    text = EXAMPLE.format(
        models=", ".join([loaded.name, *loaded.adapters]),
        rows=loaded.rows,
        context=loaded.context,
        url=url,
        key=f'"{token}"' if token else '"YOUR TOKEN"',
        shell=token or "$HONE_TOKEN",
        call=call,
        path=path,
        body=body,
    )
    print(text, flush=True)


COMMANDS = (
    Command(
        name="chat",
        help="talk with a model in the terminal",
        options=_chat_options,
        run=_chat,
        examples=(
            'hone chat smollm2-135m --system "Be brief."',
            'echo "What is 2 + 2?" | hone chat smollm2-135m --temperature 0',
        ),
    ),
    Command(
        name="serve",
        help="serve a model to OpenAI clients on this machine",
        options=_serve_options,
        run=_serve,
        examples=("hone serve smollm2-135m", "hone serve smollm2-135m --adapter maths=ADAPTER_FOLDER --port 0"),
    ),
)
