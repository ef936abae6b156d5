"""Torture: runs of every loop are killed, starved and lied to; each must end with a clear message and lose nothing.

The full run writes docs/dev/reliability.md. --kills: how many SIGKILLs, a third of them and more inside a save.
"""

import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

import hone
from benchmarks.form import Row, main, note, row, say
from benchmarks.torturing import disk, mishaps
from benchmarks.torturing.case import Case, Try
from benchmarks.torturing.kills import Campaign, campaign
from benchmarks.torturing.page import page
from benchmarks.torturing.world import World, loops, make_world

PAGE = Path(__file__).parents[1] / "docs" / "dev" / "reliability.md"
KILLS, QUICK = 300, 30
SECONDS = 120  # within which a quick run ends, on two cores
QUICK_LOOPS = ("sft", "dpo", "reward_model", "ppo", "grpo", "grpo, sampled ahead", "expert_iteration")


def tries(*, quick: bool) -> dict[str, Try]:
    """Every other way to hurt a run, by a name for it."""

    def few(attempt: Callable[..., Case]) -> Try:
        return partial(attempt, most=2) if quick else attempt

    return {
        "full": disk.full,
        "read-only": disk.read_only,
        "two": disk.two,
        "damaged": partial(disk.damaged, places=200) if quick else disk.damaged,
        "memory": few(mishaps.memory),
        "rewards": mishaps.rewards,
        "sampler": few(mishaps.sampler),
        "nans": few(mishaps.nans),
        "spikes": few(mishaps.spikes),
        "clock": mishaps.clock,
    }


def warm(world: World, folder: Path) -> None:
    """Have everything imported that a run imports, for children are forked from here."""
    torch.set_num_threads(1)
    hone.run(world.recipe("grpo", folder / "warm", "train.reward_apart=never", "train.steps=1"))


def torture(folder: Path, chosen: Sequence[str], kills: int, *, quick: bool) -> tuple[Campaign, list[Case]]:
    """The kills, then everything else."""
    world = make_world(folder / "world")
    warm(world, folder)
    found, cases = campaign(world, folder / "kills", chosen, kills, say=say), list[Case]()
    for name, attempt in tries(quick=quick).items():
        cases.append(attempt(world, folder / name))
        say(f"{cases[-1].name}: {cases[-1].tried} tried, {len(cases[-1].wrong)} wrong: {cases[-1].ends}")
    return found, cases


def measure(quick: bool, *, kills: int = 0) -> list[Row]:
    """All of it; a quick run is a sample."""
    start = time.monotonic()
    place = "/dev/shm" if Path("/dev/shm").is_dir() else None  # a kill is one on every disk, and this one is fast
    with tempfile.TemporaryDirectory(dir=place) as folder:
        chosen = QUICK_LOOPS if quick else loops()
        found, cases = torture(Path(folder), chosen, kills or (QUICK if quick else KILLS), quick=quick)
    seconds = time.monotonic() - start
    for text in (*found.wrong, *(f"{case.name}: {text}" for case in cases for text in case.wrong)):
        say(f"WRONG: {text}")
    if not quick:
        PAGE.write_text(page(found, cases, seconds), encoding="utf-8")
    return rows_of(found, cases, seconds, quick=quick)


def rows_of(found: Campaign, cases: Sequence[Case], seconds: float, *, quick: bool) -> list[Row]:
    """The result."""
    rows = [
        row("kills", found.kills, unit="kills", goal="> 0" if quick else ">= 300", ok=quick or found.kills >= KILLS),
        row("kills inside a save", found.in_saves, unit="kills", goal="> 0" if quick else ">= 100",
            ok=found.in_saves >= (1 if quick else 100)),
        row("broken promises after a kill", len(found.wrong), unit="", goal="0", ok=not found.wrong),
        note("finished runs compared bit by bit", found.compared, unit="runs"),
    ]  # fmt: skip
    rows += [
        row(case.name, len(case.wrong), unit=f"wrong of {case.tried}", goal="0", ok=not case.wrong) for case in cases
    ]
    took = row("time", seconds, unit="s", goal=f"<= {SECONDS}", ok=seconds <= SECONDS)
    return [*rows, took if quick else note("time", seconds, unit="s")]


if __name__ == "__main__":
    sys.exit(main(measure, __doc__ or "", counts={"kills": "SIGKILLs, shared out over the loops (default: 300)"}))
