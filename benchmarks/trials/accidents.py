"""D: what happens to a run's folder and to its process, while it runs and afterwards."""

import contextlib
import hashlib
import io
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.trials.case import Case
from benchmarks.trials.small_runs import World, make_world, settings

TITLE = "Accidents to a run's folder and process"
VALUES: list[Any] = [None, True, [], {}, [[1], {"a": None}], 10**400, 1e308, -7, float("nan"), 0.5, "x", "", "\ud800\0"]
BUG = re.compile(r"a bug in Hone|Traceback|Error ignored|Exception ignored")


def cases(quick: bool) -> Iterator[Case]:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        world = make_world(folder / "world")
        yield from _in_mid_run(world, folder, quick)
        yield from _at_the_start(world, folder, quick)
        made = folder / "made"
        words = ["save.every=1", "train.steps=2", "train.lag=1", "train.mismatch=truncate", "train.max_invalid=1"]
        done = command("run", world.recipe, *settings(world, "grpo", made), *words)
        if done[0]:
            raise RuntimeError(done[1])
        yield from _wrong_values(world, made, folder, quick)
        yield from _damaged(world, made, folder, quick)
        yield from _pointers(world, made, folder)
        yield from _lost_settings(world, made, folder)


def command(*words: str) -> tuple[int, str]:
    """`hone` in this process, which has torch already: its exit code and what it says."""
    from hone.cli import main

    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        code = main(list(words))
    return code, said.getvalue()


def clear(code: int, said: str) -> str | None:
    """None where the command did its work, or ended with one line that says what to do."""
    if code == 0 and not BUG.search(said):
        return None
    last = said.strip().splitlines()[-1] if said.strip() else ""
    good = code == 2 and last.startswith("hone: error: ") and not BUG.search(said)
    return None if good else f"exit code {code}: {last}"


# --- while it runs ---


def _accidents() -> dict[str, Callable[[Path], object]]:
    def renamed(out: Path) -> None:
        out.rename(out.with_name(f"{out.name}-elsewhere"))

    def replaced(out: Path) -> None:
        renamed(out)
        out.mkdir()

    def copied(out: Path) -> None:
        renamed(out)
        shutil.copytree(out.with_name(f"{out.name}-elsewhere"), out)

    def file(name: str) -> Callable[[Path], object]:
        return lambda out: (out / name).unlink()

    def pipe(name: str) -> Callable[[Path], object]:
        return lambda out: ((out / name).unlink(missing_ok=True), os.mkfifo(out / name))

    def loose(name: str) -> Callable[[Path], object]:
        return lambda out: ((out / name).unlink(missing_ok=True), (out / name).symlink_to("no/where"))

    return {
        **{f"{name} a pipe": pipe(name) for name in ("metrics.jsonl", "samples.jsonl", "config.json", "lock")},
        **{f"{name} a loose link": loose(name) for name in ("metrics.jsonl", "samples.jsonl", "config.json", "lock")},
        "removed": lambda out: shutil.rmtree(out, ignore_errors=True), "renamed": renamed, "replaced": replaced,
        "replaced by a copy": copied, "config.json removed": file("config.json"),
        "recipe.json removed": file("recipe.json"), "metrics.jsonl removed": file("metrics.jsonl"),
        "start removed": lambda out: shutil.rmtree(out / "start"),
        "checkpoints removed": lambda out: shutil.rmtree(out / "checkpoints", ignore_errors=True),
    }  # fmt: skip


def _in_mid_run(world: World, folder: Path, quick: bool) -> Iterator[Case]:
    found = _accidents()
    for name in ["removed"] if quick else found:
        for when, every in (("beside a save", 1), ("before the last step", 0)) if not quick else (("early", 0),):
            out = folder / f"{name}-{when}".replace(" ", "-")
            attempt = partial(_struck, world, out, found[name], every)
            yield Case("the run's folder changed in mid-run", f"{name}, {when}", attempt)


def _struck(world: World, out: Path, accident: Callable[[Path], object], every: int) -> str | None:
    """The run must end with an error, or with all that it needs to be resumed."""
    words = [*settings(world, "grpo", out), f"reward={world.folder / 'rewards.py'}:slow", "train.steps=14"]
    process = _start("run", world.recipe, *words, f"save.every={every}")
    log, end = out / "metrics.jsonl", time.monotonic() + 60
    while not (log.exists() and log.read_bytes().count(b"\n") >= (12 if not every else 5)):
        if process.poll() is not None or time.monotonic() > end:
            return f"the run did not get so far: {process.communicate()[1][-150:]}"
        time.sleep(0.01)
    accident(out)
    said = process.communicate(timeout=60)[1]
    if process.returncode:
        return clear(process.returncode, said)
    lacking = [name for name in ("config.json", "recipe.json", "start") if not (out / name).exists()]
    if lacking:
        return f"ended with 0 and without {', '.join(lacking)}"
    return clear(*command("resume", str(out), "train.steps=15"))


def _start(*words: str) -> "subprocess.Popen[str]":
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "hone", *words], text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env=environment,
    )  # fmt: skip


def _at_the_start(world: World, folder: Path, quick: bool) -> Iterator[Case]:
    points = [0.1 + 0.04 * n for n in range(10)] + [0.5 + 0.25 * n for n in range(11)]
    for point in points[6::9] if quick else points:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            attempt = partial(_interrupted, world, folder / "interrupted", point, number)
            yield Case(f"{number.name} in the first three seconds", f"after {point:.2f} s", attempt)


def _interrupted(world: World, out: Path, seconds: float, number: signal.Signals) -> str | None:
    process = _start("run", world.recipe, *settings(world, "grpo", out), "train.steps=100000")
    time.sleep(seconds)
    process.send_signal(number)
    said = process.communicate(timeout=60)[1]
    shutil.rmtree(out, ignore_errors=True)
    codes = (130, 128 + number)  # 130: a run that had done a step is saved
    if process.returncode in codes and not BUG.search(said) and "hone: interrupted; " in said.splitlines()[-1]:
        return None
    if "hone/" not in said and process.returncode not in codes:
        return None  # Python itself had not started yet
    return f"exit code {process.returncode}: {said[-120:]}"


# --- afterwards ---


def _changed(document: Any, generator: random.Random) -> tuple[str, Any]:
    """The document with one value replaced, and where."""
    places = list(_places(document))
    place, value = generator.choice(places), generator.choice(VALUES)
    if not place:
        return f"all = {value!r:.20}", value
    copy = json.loads(json.dumps(document))
    node = copy
    for key in place[:-1]:
        node = node[key]
    node[place[-1]] = value
    return f"{'.'.join(map(str, place))} = {value!r:.20}", copy


def _places(document: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield above
    items = (
        document.items() if isinstance(document, dict) else enumerate(document) if isinstance(document, list) else ()
    )
    for key, value in items:
        yield from _places(value, (*above, key))


def _wrong_values(world: World, made: Path, folder: Path, quick: bool) -> Iterator[Case]:
    generator = random.Random(0)
    files = ("checkpoints/step-000002/state.json", "config.json", "metrics.jsonl", "samples.jsonl")
    for number in range(12 if quick else 160):
        file = files[number % len(files)]
        text = (made / file).read_text()
        what, changed = _changed(json.loads(text.splitlines()[0] if file.endswith("l") else text), generator)
        attempt = partial(_wrong, world, made, folder / "wrong", file, changed)
        yield Case("wrong types and nested values in a run's files", f"{file}: {what}", attempt)


def _wrong(world: World, made: Path, work: Path, file: str, changed: Any) -> str | None:
    shutil.rmtree(work, ignore_errors=True)
    shutil.copytree(made, work)
    if file == "config.json" and isinstance(changed, dict) and isinstance(changed.get("recipe"), dict):
        plain = json.dumps(changed["recipe"], sort_keys=True).encode("utf-8", "surrogatepass")
        changed = {**changed, "digest": hashlib.sha256(plain).hexdigest()}  # as if it had been written so
    line = json.dumps(changed, ensure_ascii=False).encode("utf-8", "backslashreplace")
    rest = (work / file).read_bytes().split(b"\n", 1)[1] if file.endswith(".jsonl") else b""
    (work / file).write_bytes(line + (b"\n" + rest if rest else b""))
    if "checkpoints/" in file:
        _sign((work / file).parent)
        shutil.rmtree(work / "checkpoints/step-000001", ignore_errors=True)
    words = ("report", str(work)) if file.endswith(".jsonl") else ("resume", str(work), "train.steps=3")
    return clear(*command(*words))


def _sign(saved: Path) -> None:
    files = {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in saved.iterdir() if p.name != "manifest.json"}
    (saved / "manifest.json").write_text(json.dumps(files))


DAMAGE: dict[str, Callable[[Path], object]] = {
    "emptied": lambda path: path.write_bytes(b""),
    "cut in half": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "random bytes": lambda path: path.write_bytes(random.Random(1).randbytes(200)),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
    "removed": lambda path: path.unlink(),
    "not UTF-8": lambda path: path.write_bytes(b"\xff\xfe" + path.read_bytes()),
}


def _damaged(world: World, made: Path, folder: Path, quick: bool) -> Iterator[Case]:
    files = sorted(p for p in made.rglob("*") if p.is_file() and "step-000001" not in str(p))
    pairs = [(file.relative_to(made), how) for file in files for how in DAMAGE]
    for file, how in random.Random(0).sample(pairs, 6 if quick else 60):
        attempt = partial(_used, world, made, folder / "damaged", file, how)
        yield Case("damaged files: resume, eval and report", f"{file} {how}", attempt)


def _used(world: World, made: Path, work: Path, file: Path, how: str) -> str | None:
    """Every command that reads the folder."""
    for words in (("resume", "RUN", "train.steps=3"), ("eval", "RUN", "DATA", "--max-tokens", "2"), ("report", "RUN")):
        shutil.rmtree(work, ignore_errors=True)
        shutil.copytree(made, work)
        DAMAGE[how](work / file)
        told = command(*(word.replace("RUN", str(work)).replace("DATA", world.data("problems")) for word in words))
        if why := clear(*told):
            return f"hone {words[0]}: {why}"
    return None


def _pointers(world: World, made: Path, folder: Path) -> Iterator[Case]:
    outside = folder / "outside"
    shutil.copytree(made / "checkpoints/step-000002", outside)
    texts = {
        "a path out of the run": "../../outside", "a whole path": str(outside), "up and down": "step-000002/../../..",
        "nothing": "", "a folder that is not there": "step-000099", "a NUL": "\0", "long": "x" * 5000,
    }  # fmt: skip
    for name, text in texts.items():
        yield Case("checkpoints/latest points inside the run", name, partial(_points, world, made, folder, text=text))
    for name in ("latest", "step-000002"):
        attempt = partial(_points, world, made, folder, link=name)
        yield Case("checkpoints/latest points inside the run", f"{name} is a link out of it", attempt)


def _points(world: World, made: Path, folder: Path, *, text: str = "", link: str = "") -> str | None:
    work = folder / "pointing"
    shutil.rmtree(work, ignore_errors=True)
    shutil.copytree(made, work)
    pointer = work / "checkpoints" / "latest"
    if link:
        place = work / "checkpoints" / link
        shutil.rmtree(place) if place.is_dir() else place.unlink()
        place.symlink_to(folder / "outside")
    else:
        pointer.write_text(text)
    code, said = command("eval", str(work), world.data("problems"), "--max-tokens", "2")
    return "what it points to was loaded" if code == 0 else clear(code, said)


def _lost_settings(world: World, made: Path, folder: Path) -> Iterator[Case]:
    for lost in (("config.json",), ("recipe.json",), ("config.json", "recipe.json")):
        attempt = partial(_without, world, made, folder / "without", lost)
        yield Case("a run without its settings: the remedy works", " and ".join(lost), attempt)


def _without(world: World, made: Path, work: Path, lost: tuple[str, ...]) -> str | None:
    """It goes on, or says what to do, and that works."""
    shutil.rmtree(work, ignore_errors=True)
    shutil.copytree(made, work)
    for name in lost:
        (work / name).unlink()
    code, said = command("resume", str(work), "train.steps=3")
    if code == 0:
        return None
    named = re.search(r"model\.path=(\S+)", said)
    if named is None:
        return f"no remedy: {said.strip()}"
    words = [*settings(world, "grpo", work.with_name("anew")), f"model.path={named[1]}", "train.steps=1"]
    shutil.rmtree(work.with_name("anew"), ignore_errors=True)
    return clear(*command("run", world.recipe, *words))
