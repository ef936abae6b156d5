"""Disks that are full or may not be written to, a second process, and files that are damaged."""

import os
import random
import re
import resource
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from benchmarks.torturing import victim
from benchmarks.torturing.case import Case
from benchmarks.torturing.points import Points
from benchmarks.torturing.world import World, contents, differences, temporary
from hone.config.recipe import Recipe
from hone.errors import HoneError
from hone.storage import files as checkpoint

PAGE = 4096
LOOP = "grpo, sampled ahead"  # the one whose checkpoints hold most


@contextmanager
def small_disk(folder: Path) -> Iterator[bool]:
    """A file system of 2 MiB on the folder; False where only root may have one."""
    folder.mkdir(parents=True)
    command = ["mount", "-t", "tmpfs", "-o", "size=2m", "none", str(folder)]
    mounted = os.geteuid() == 0 and not subprocess.run(command, capture_output=True).returncode
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", str(folder)], check=True)


def begun(world: World, folder: Path) -> tuple[Recipe, dict[str, bytes]]:
    """A run of two steps that wants a third, and what its checkpoints hold."""
    told = victim.run(world.recipe(LOOP, folder / "run", *EARLIER), folder.parent / "log")
    if told.code:
        raise SystemExit(f"torture: {told.said}")
    return world.recipe(LOOP, folder / "run", *LATER), contents(folder / "run/checkpoints")


EARLIER, LATER = ("train.steps=2", "save.every=1"), ("train.steps=3", "save.every=1")


def undisturbed(world: World, folder: Path) -> Path:
    """The same three steps."""
    recipe, _ = begun(world, folder)
    victim.run(recipe, folder.parent / "log")
    return folder / "run"


def full(world: World, folder: Path) -> Case:
    """The disk is full at one write after the other: the step before stays, and with room the run goes on."""
    folder.mkdir(parents=True)
    whole = undisturbed(world, folder / "whole")
    with small_disk(folder / "disk") as mounted:
        case = Case(f"disk full at each write ({'a small tmpfs' if mounted else 'RLIMIT_FSIZE: no right to mount'})")
        recipe, before = begun(world, folder / "disk")
        rooms = range(0, 2 * sum(map(_pages, before.values())), 1) if mounted else _limits(before)
        for room in rooms:
            told = _cramped(recipe, folder, room, mounted=mounted)
            if told.code == 0:
                break
            case.ended(told, 2, "File too large" if not mounted else "No space left on device")
            case.expect(_kept(folder / "disk/run/checkpoints", before), f"{room}: checkpoints changed")
            case.expect(temporary(folder / "disk/run") == [], f"{room}: left {temporary(folder / 'disk/run')}")
            case.ends = told.words.replace(str(folder), "...")
        (folder / "disk/large").unlink(missing_ok=True)
        victim.run(recipe, folder / "log")
        case.wrong += [f"other {name}" for name in differences(whole, folder / "disk/run", steps=3)]
    return case


def _kept(root: Path, before: dict[str, bytes]) -> bool:
    """What was saved is there as it was, and a checkpoint that has come is whole: only `latest` had no room."""
    now = contents(root)
    return all(now.get(name) == content for name, content in before.items()) and all(
        _is_whole(path) for path in checkpoint.checkpoints(root).values()
    )


def _pages(content: bytes) -> int:
    return -(-len(content) // PAGE)


def _limits(files: dict[str, bytes]) -> list[int]:
    """Just too small for each of the files that are larger than what a child says, the smallest first."""
    return sorted({len(content) - 1 for name, content in files.items() if "/" in name and len(content) > PAGE})


def _cramped(recipe: Recipe, folder: Path, room: int, *, mounted: bool) -> victim.Told:
    """The run with so many pages free, or files of so many bytes at most."""
    if not mounted:
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        return victim.run(
            recipe, folder / "log", prepare=lambda _: resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
        )
    large = folder / "disk/large"
    large.unlink(missing_ok=True)
    free = shutil.disk_usage(folder / "disk").free
    large.write_bytes(bytes(max(0, free - room * PAGE)))
    return victim.run(recipe, folder / "log")


def read_only(world: World, folder: Path) -> Case:
    """A folder that cannot be written to."""
    folder.mkdir(parents=True)
    whole = undisturbed(world, folder / "whole")
    with small_disk(folder / "disk") as mounted:
        case = Case(f"read-only directory ({'remounted' if mounted else 'by its mode'})")
        if not mounted and os.geteuid() == 0:  # who writes whatever the mode
            return replace(case, name="read-only directory", ends="not tried: root without the right to mount")
        recipe, before = begun(world, folder / "disk")
        _writable(folder / "disk", False, mounted=mounted)
        told = victim.run(recipe, folder / "log")
        case.ended(told, 2)
        case.expect(contents(folder / "disk/run/checkpoints") == before, "checkpoints changed")
        case.ends = told.words.replace(str(folder), "...")
        _writable(folder / "disk", True, mounted=mounted)
        victim.run(recipe, folder / "log")
        case.wrong += [f"other {name}" for name in differences(whole, folder / "disk/run", steps=3)]
    return case


def _writable(folder: Path, yes: bool, *, mounted: bool) -> None:
    if mounted:
        subprocess.run(["mount", "-o", f"remount,{'rw' if yes else 'ro'}", str(folder)], check=True)
        return
    for path in (folder / "run", folder / "run/checkpoints"):
        path.chmod(0o755 if yes else 0o555)


MOMENTS = (("sampling", 9), ("torn", 12), ("starting", 3), ("updating", 7), ("renaming", 3))


def two(world: World, folder: Path, *, moments: Sequence[tuple[str, int]] = MOMENTS) -> Case:
    """A second process on a run that is under way: refused, and the first one does not notice."""
    folder.mkdir(parents=True)
    case, whole, recipe = (
        Case("two processes on one run directory"),
        folder / "whole",
        world.recipe(LOOP, folder / "run"),
    )
    victim.run(world.recipe(LOOP, whole), folder / "log")
    for moment in moments:
        shutil.rmtree(folder / "run", ignore_errors=True)
        (folder / "run.go").unlink(missing_ok=True)
        first = victim.start(recipe, folder / "first", prepare=partial(_paused, moment))
        case.expect(first.until("paused"), f"never came to {moment}")
        told = victim.run(recipe, folder / "second")
        case.ended(told, 2, "is in use by process")
        (folder / "run.go").touch()
        case.expect(first.wait().code == 0, "the first one ended badly")
        case.wrong += [f"{moment}: other {name}" for name in differences(whole, folder / "run")]
        case.ends = re.sub(r"process \d+ on \S+:", "process N on HOST:", told.words.replace(str(folder), "..."))
    return case


def _paused(moment: tuple[str, int], points: Points) -> None:
    points.pause = moment


def damaged(world: World, folder: Path, *, places: int = 1000, seed: int = 0) -> Case:
    """Bits flipped and ends cut off, wherever: every one is found; a run goes on from the checkpoint before."""
    folder.mkdir(parents=True)
    case, rng = Case("truncated or bit-flipped checkpoint files"), random.Random(seed)
    whole = folder / "whole"
    victim.run(world.recipe(LOOP, whole), folder / "log")
    newest = whole / "checkpoints/step-000006"
    files = [path for path in sorted(newest.rglob("*")) if path.is_file()]
    for _ in range(places):
        path = rng.choice(files)
        content = path.read_bytes()
        what = _hurt(path, content, rng)
        case.tried += 1
        case.expect(not _is_whole(newest), f"{path.name} {what}: not found")
        path.write_bytes(content)
    case.expect(_is_whole(newest), "an undamaged checkpoint is refused")
    shutil.copytree(whole, folder / "run")
    for path in rng.sample(files, 3):
        hurt = folder / "run/checkpoints/step-000006" / path.relative_to(newest)
        _hurt(hurt, path.read_bytes(), rng)
        told = victim.run(world.recipe(LOOP, folder / "run"), folder / "log")
        case.expect("passed over step-000006" in told.said, f"{path.name}: passed over in silence")
        case.wrong += [f"other {name}" for name in differences(whole, folder / "run")]
        said = next((line for line in told.said.splitlines() if "passed over" in line), "")
        case.ends = case.ends or said.replace(str(folder), "...")
    return case


def _hurt(path: Path, content: bytes, rng: random.Random) -> str:
    if rng.random() < 0.3:
        size = rng.randrange(len(content))
        path.write_bytes(content[:size])
        return f"cut to {size} bytes"
    place, bit = rng.randrange(len(content)), rng.randrange(8)
    path.write_bytes(content[:place] + bytes([content[place] ^ (1 << bit)]) + content[place + 1 :])
    return f"bit {bit} of byte {place} flipped"


def _is_whole(folder: Path) -> bool:
    try:
        checkpoint.verify(folder)
    except HoneError:
        return False
    return True
