"""Folders of runs and checkpoints that are damaged, moved or in use, and what each message asks for."""

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import torch
from remedy_world import Case, World, call, given, recipe, settings, typed
from safetensors.torch import save
from torch import nn

import hone
from hone.checkpoint import run_folder, state
from hone.data.collate import collate
from hone.data.feed.source import Source
from hone.demo import journey
from hone.demo.stages import QUICK
from hone.loop import check_algorithm
from hone.rollout.supply import RolloutQueue
from hone.storage import files, names
from hone.storage.files import load_optimizer, load_tensors
from hone.storage.names import AHEAD
from hone.train.guard import Guard, SpikeDetector, load_rows
from hone.types import Rollout

RECIPE = "from hone import Recipe\n\n\ndef recipe():\n    return Recipe()\n"
SMALL = ("algo=sft", "train.prompts=2", "train.device=cpu", "save.every=1", "save.keep=2")


def begin(world: World, *more: str, out: str = "") -> str:
    """A run of two steps."""
    out = out or world.new()
    data = [] if any(word.startswith("data=") for word in more) else [f"data={world / 'answers.jsonl'}"]
    model = [] if any(word.startswith("model.path=") for word in more) else [f"model.path={world / 'model'}"]
    path = world.file(RECIPE, ".py")
    typed(world, "run", path, f"out={out}", *model, *data, *SMALL, "train.steps=2", *more)
    return out


@lru_cache(maxsize=1)
def _finished(world: World) -> str:
    return begin(world)


def a_run(world: World) -> Path:
    """A copy of a run, to be damaged."""
    made = Path(world.new())
    shutil.copytree(_finished(world), made)
    return made


def go_on(world: World, run: Path, *more: str) -> None:
    typed(world, "resume", str(run), "train.steps=3", *more)


def saved(run: Path) -> Path:
    return run / "checkpoints/step-000002"


Damage = Callable[[Path], Any]


def spoilt(damage: Damage, says: str) -> Case:
    """A run that is damaged; the remedy is to copy back what was."""

    def resumed(world: World, damages: Damage) -> None:
        run = a_run(world)
        damages(run)
        go_on(world, run)

    return given(resumed, damage, lambda run: None, says)


def _changed(run: Path) -> None:
    """A setting that nobody knows, in the file that is left."""
    (run / "config.json").unlink()
    path = run / "recipe.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "unheard": 3}))


def _flipped(run: Path) -> None:
    path = run / "config.json"
    path.write_text(path.read_text().replace('"seed": 0', '"seed": 1'))


def _elsewhere(world: World, *, moved: bool) -> None:
    """A run whose folder is renamed while it goes on."""
    run = a_run(world)
    kept = run_folder.FolderGuard(run)
    other = run.rename(world.new())
    go_on(world, other) if moved else kept.check()


def _without_start(world: World, how: str) -> None:
    run = a_run(world)
    kept = run_folder.FolderGuard(run)
    if how != "copied":
        shutil.rmtree(run / "start")
    begin(world, f"model.path={saved(run)}") if how == "new" else kept.check(done="step-000002")


def _removed(world: World, *, again: bool) -> None:
    run = a_run(world)
    kept = run_folder.FolderGuard(run)
    shutil.rmtree(saved(run))
    begin(world) if again else kept.check(done="step-000002")


def _unsettled(run: Path) -> None:
    for name in ("config.json", "recipe.json"):
        (run / name).unlink()


def _python(world: World, *, command: bool) -> None:
    made = replace(recipe(world, "sft", *SMALL[1:]), data=[{"prompt": "a", "completion": "b"}])
    hone.run(made)
    more = replace(made, train=replace(made.train, steps=3))
    typed(world, "resume", str(made.run_dir), "train.steps=3") if command else hone.run(more, resume=True)


def _other_data(world: World, *more: str) -> None:
    """The rows of a run change before it goes on."""
    data = world.rows([{"prompt": "a", "completion": "b"}] * 3)
    run = begin(world, f"data={data}")
    Path(data).write_text('{"prompt": "a", "completion": "c"}\n')
    go_on(world, Path(run), *more)


def _used(world: World, other: bool) -> None:
    run = a_run(world)
    with run_folder.folder_lock(run):
        shutil.copytree(run, copy := Path(world.new()), ignore=shutil.ignore_patterns(names.LOCK))
        go_on(world, copy if other else run)


FOLDERS = [
    call(lambda w: go_on(w, saved(a_run(w))), lambda w: go_on(w, a_run(w)), "continue that one, with `hone resume"),
    call(lambda w: go_on(w, Path(w / "model")), lambda w: go_on(w, a_run(w)), "give the folder of one"),
    call(
        lambda w: (_unsettled(run := a_run(w)), go_on(w, run)),
        lambda w: begin(w, f"model.path={saved(a_run(w))}"),
        "start anew with model.path=",
    ),
    spoilt(_changed, "resume with the one it is of"),
    spoilt(_flipped, "copy it back"),
    call(
        lambda w: (_flipped(run := a_run(w)), go_on(w, run)),
        lambda w: ((run := a_run(w)) / "config.json").unlink() or go_on(w, run),
        "or remove it, to go on by recipe.json",
    ),
    spoilt(
        lambda run: ((run / "config.json").unlink(), (run / "recipe.json").write_text("[]")), "is damaged: copy it back"
    ),
    spoilt(lambda run: (run / "config.json").write_text("{"), "cannot be read"),
    spoilt(lambda run: shutil.rmtree(run / "checkpoints"), "start it again with `hone run`"),
    spoilt(lambda run: [p.unlink() for p in run.glob("checkpoints/*/manifest.json")], "copy one back"),
    spoilt(lambda run: (run / "start/config.json").write_text("{"), "set to a checkpoint"),
    call(lambda w: _python(w, command=True), lambda w: _python(w, command=False), "or hone.run(recipe, resume=True)"),
    call(lambda w: go_on(w, a_run(w), "out=other"), lambda w: go_on(w, a_run(w)), "leave them out"),
    call(
        lambda w: go_on(w, a_run(w), "lora.rank=2"),
        lambda w: begin(w, f"model.path={saved(a_run(w))}", "lora.rank=2"),
        "start a new run with model.path=CHECKPOINT",
    ),
    call(
        lambda w: (_unsettled(run := a_run(w)), begin(w, out=str(run))),
        lambda w: begin(w, out=w.new()),
        "choose another out=",
    ),
    call(
        lambda w: begin(w, out=str(Path(w.file("{}", ".json")).parent / "strange")) if _strange(w) else None,
        begin,
        "that is not of a run: choose another out=",
    ),
    call(lambda w: _elsewhere(w, moved=False), lambda w: _elsewhere(w, moved=True), "where it is now"),
    given(_without_start, "lost", "copied", "copy it back"),
    given(_without_start, "lost", "new", "or go on with model.path="),
    call(lambda w: _removed(w, again=False), lambda w: _removed(w, again=True), "start the run again"),
    call(_other_data, lambda w: _other_data(w, "--allow-change"), "--allow-change goes on"),
    given(_used, False, True, "or set another out="),
    settings("trpo", "train.dtype=bfloat16", "train.dtype=float32", "set train.dtype=float32"),
    settings("a2c", "train.lag=1 train.mismatch=truncate", "train.lag=0", "set train.lag=0"),
]


def _strange(world: World) -> bool:
    folder = Path(world / "strange")
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text("")
    return True


# --- checkpoints ---


def _verified(world: World, damage: Damage) -> None:
    folder = saved(a_run(world))
    files.verify(damage(folder) or folder)


def _manifest(content: str) -> Damage:
    return lambda folder: (folder / names.MANIFEST).write_text(content) and None


def _linked(folder: Path) -> Path:
    link = folder.with_name("step-000009")
    link.symlink_to(folder)
    return link


def _state(world: World, change: Mapping[str, Any]) -> None:
    folder = saved(a_run(world))
    path = folder / names.STATE
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    state.read_state(folder)


def _weights(world: World, tensors: dict[str, torch.Tensor]) -> None:
    state._load_weights({"a": nn.Parameter(torch.ones(2))}, tensors, Path("run"), shards=None)


def _supply(lag: int = 0) -> RolloutQueue:
    return RolloutQueue(cast(Any, Source([1], seed=0)), lag=lag)


def _ahead(world: World, content: bytes | None, lag: int = 1) -> None:
    folder = Path(world.new())
    folder.mkdir()
    supply = _supply(1)
    supply._feed_state = supply.feed.state()
    (folder / AHEAD).write_bytes(supply.saved() if content is None else content)
    _supply(lag).load(folder)


def _guarded(world: World, value: float) -> None:
    Guard().check({"w": torch.tensor([value])}, step=3)


def _skipped(world: World) -> Path:
    """The rows of an update that was skipped."""
    guard = Guard(folder=Path(world.new()))
    rows = [Rollout(tokens=[5, 6], mask=[False, True])]
    guard.record_skip(collate([rows]), step=1, about={"updates": 0}, found=[])
    return next(cast(Path, guard.folder).rglob("*.safetensors"))


def _fits(algo: Any, updates: int) -> None:
    check_algorithm(algo, lag=_supply().lag, updates=updates, corrected=False)


CHECKPOINTS = [
    given(_verified, lambda f: (f / names.MANIFEST).unlink(), lambda f: None, "use an earlier one"),
    given(
        _verified,
        _manifest("{}"),
        lambda f: None,
        "names no file",
    ),
    given(_verified, _linked, lambda f: None, "copy the checkpoint itself there"),
    given(
        _verified,
        _manifest('{"../x": ""}'),
        lambda f: None,
        "which is outside of it",
    ),
    given(_verified, lambda f: (f / "config.json").unlink(), lambda f: None, "is missing or damaged"),
    given(_state, {"format": 999}, {}, "or start a new run with model.path="),
    given(_state, {"updates": "x"}, {}, "use an earlier checkpoint"),
    given(_state, {"updates": -1}, {}, "a count is negative"),
    given(
        lambda w, saved: state._load(Source([1], seed=0), saved), 3, Source([1], seed=0).state(), "its state is damaged"
    ),
    given(_weights, {}, {"a": torch.ones(2)}, "resume with the settings the run was started with"),
    given(_weights, {"a": torch.ones(3)}, {"a": torch.ones(2)}, "has shape (3,), not (2,)"),
    given(
        lambda w, name: load_optimizer(torch.optim.SGD([nn.Parameter(torch.ones(2))]), {name: torch.ones(2)}),
        "7.moment",
        "0.moment",
        "the settings the run was started with",
    ),
    call(
        lambda w: load_tensors(Path(w.file("x", ".safetensors"))),
        lambda w: load_tensors(saved(a_run(w)) / "model.safetensors"),
        "use an earlier checkpoint",
    ),
    call(
        lambda w: files.write_atomically(Path(w / "no/where"), "x"),
        lambda w: files.write_atomically(Path(w.new()), "x"),
        "what was saved before is untouched",
    ),
    given(lambda w, lag: _ahead(w, None, lag), 0, 1, "resume with the same"),
    given(_ahead, b"x", None, "use an earlier checkpoint"),
    given(_ahead, save({}, metadata={"hone": "{}"}), None, "is damaged (KeyError"),
    call(
        lambda w: load_rows(Path(w.file("x", ".safetensors"))),
        lambda w: load_rows(_skipped(w)),
        "is no batch that a run left",
    ),
    given(_guarded, float("nan"), 1.0, "with a lower optim.lr"),
    given(lambda w, s: Guard().load(s), {"row": -1}, {"row": 0, "total": 0}, "the count of skipped updates is damaged"),
    given(
        lambda w, s: SpikeDetector(factor=3.0).load(s), {}, {"usual": [], "tried": []}, "the losses so far are damaged"
    ),
    given(lambda w, n: _fits(hone.algo.a2c(), n), 2, 1, "strictly on policy: set train.epochs=1"),
    given(lambda w, n: _fits(hone.algo.trpo(), n), 2, 1, "set train.epochs=1 and train.minibatches=1"),
]
DEMOS = [
    given(
        lambda w, out: journey.begin(Path(out(w)), QUICK, 0), lambda w: w.folder, lambda w: w.new(), "an empty folder"
    ),
    given(lambda w, text: _demo(w, text), "{", None, "or choose another folder with --out DIR"),
]


def _demo(world: World, content: str | None) -> None:
    out = Path(world.new())
    journey.begin(out, QUICK, 0)
    if content is not None:
        (out / journey.PROGRESS).write_text(content)
    journey.begin(out, QUICK, 0)


RUNS: list[Case] = [*FOLDERS, *CHECKPOINTS, *DEMOS]
