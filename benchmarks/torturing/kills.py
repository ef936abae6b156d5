"""SIGKILL at moments of every kind, in every loop, and what a run must be after it: as if nothing had happened."""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.torturing import victim
from benchmarks.torturing.points import KINDS, SAVES, likely
from benchmarks.torturing.victim import Told
from benchmarks.torturing.world import STEPS, World, differences, metrics, temporary
from hone.errors import HoneError
from hone.storage import files

ANY = "any moment"  # chosen by a clock, not by what the run does
IN_SAVES, IN_OTHERS = 0.45, 0.4  # shares of the kills; the rest are of any moment
AT_MOST = 4  # kills of one run, so that its end, too, is often reached


@dataclass(slots=True)
class Campaign:
    """What was tried and what went wrong."""

    kinds: Counter[str] = field(default_factory=Counter[str])  # kills, by the kind of moment
    loops: Counter[str] = field(default_factory=Counter[str])  # and by loop
    wrong: list[str] = field(default_factory=list[str])
    compared: int = 0  # finished runs that were compared with undisturbed ones

    @property
    def kills(self) -> int:
        return self.kinds.total()

    @property
    def in_saves(self) -> int:
        return sum(self.kinds[kind] for kind in SAVES)


def campaign(
    world: World, folder: Path, loops: Sequence[str], kills: int, *, seed: int = 0, say: Callable[..., None]
) -> Campaign:
    """So many kills, shared out over the loops."""
    found, rng = Campaign(), random.Random(seed)
    for i, loop in enumerate(loops):
        quota = kills * (i + 1) // len(loops) - kills * i // len(loops)
        _Prey(world, folder / f"loop-{i}", loop, found, rng).hunt(quota)
        say(f"{i + 1}/{len(loops)} {loop}: {found.loops[loop]} kills, {len(found.wrong)} wrong in all")
    return found


class _Prey:
    """The runs of one loop, killed and resumed until they are through."""

    def __init__(self, world: World, folder: Path, loop: str, found: Campaign, rng: random.Random) -> None:
        self.world, self.folder, self.loop, self.found, self.rng = world, folder, loop, found, rng
        folder.mkdir(parents=True)
        told = victim.run(world.recipe(loop, folder / "whole"), folder / "log")
        if told.code:
            raise SystemExit(f"torture: {loop} does not even run undisturbed: {told.said[-500:]}")
        self.counts, self.seconds = told.counts, told.seconds
        self.number, self.struck, self.saved = 0, 0, 0  # which run, its kills, and the last step it had saved

    @property
    def out(self) -> Path:
        return self.folder / f"cut-{self.number}"

    def hunt(self, quota: int) -> None:
        """Kill so often, and let the last run end."""
        for _ in range(quota):
            told = self._strike() if self.struck < AT_MOST else self._run()
            while told.code != -9:
                self._finish(told)
                told = self._strike()
            self._count(told)
        if quota:
            self._finish(self._run())

    def _strike(self) -> Told:
        """The run, killed at some moment if it has that many of the kind."""
        draw, left = self.rng.random(), (STEPS - self._latest()) / STEPS
        if draw > IN_SAVES + IN_OTHERS:
            return self._run(after=self.rng.uniform(0.0, self.seconds * left))
        kinds = SAVES if draw < IN_SAVES else frozenset(KINDS) - SAVES
        kind = self.rng.choice(sorted({kind for kind, _ in likely(self.counts, kinds)}))
        return self._run(kill=(kind, self.rng.randint(1, max(1, round(self.counts[kind] * left)))))

    def _run(self, *, kill: tuple[str, int] | None = None, after: float | None = None) -> Told:
        recipe = self.world.recipe(self.loop, self.out)
        return victim.run(recipe, self.folder / "log", kill=kill, after=after)

    def _latest(self) -> int:
        return max(files.checkpoints(self.out / "checkpoints"), default=0)

    def _count(self, told: Told) -> None:
        """One more kill: what can be seen is whole, and what was saved is there."""
        self.found.kinds[told.killed or ANY] += 1
        self.found.loops[self.loop] += 1
        self.struck, self.saved = self.struck + 1, max(self.saved, told.saved)
        where = f"{self.loop}, killed {self.struck} times, last while {told.killed or ANY}"
        self.found.wrong += [f"{where}: it hung"] * told.hung
        for path in files.checkpoints(self.out / "checkpoints").values():
            try:
                files.verify(path)
            except HoneError as error:
                self.found.wrong.append(f"{where}: a checkpoint in sight is not whole: {error}")
        if self._latest() < self.saved:
            self.found.wrong.append(f"{where}: step {self.saved} was saved, the newest is {self._latest()}")

    def _finish(self, told: Told) -> None:
        """A run that ended: compare it with the undisturbed one, and go on with another."""
        where = f"{self.loop}, killed {self.struck} times"
        if told.code:
            self.found.wrong.append(f"{where}: resumed, it ended with {told.code}: {told.said.strip()[-300:]}")
        else:
            self.found.compared += 1
            self.found.wrong += [f"{where}: other {name}" for name in differences(self.folder / "whole", self.out)]
            self.found.wrong += [f"{where}: left {name}" for name in temporary(self.out)]
            if [row["step"] for row in metrics(self.out)] != list(range(1, STEPS + 1)):
                self.found.wrong.append(f"{where}: steps of the log are missing or there twice")
        self.number, self.struck, self.saved = self.number + 1, 0, 0
