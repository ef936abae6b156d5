"""The learner on a CPU against TRL, in one process, float32 on both sides, taking turns."""

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from benchmarks.form import Row, note, say
from benchmarks.learning import ours, peers
from benchmarks.learning.work import Offline, Online, Subject, adapted, demo
from hone.demo.sizes import FULL
from hone.loop import Iteration

STAGES = ("sample", "score", "annotate", "update", "publish")
SMALL = Online(prompts=24, group=8, prompt=16, completion=FULL.completion, minibatches=4, beta=0.01)
BIG = Online(prompts=4, group=4, prompt=32, completion=64)
SHORT = Offline(groups=32, prompt=16, low=8, high=44)
BRIEF = replace(BIG, prompts=2, completion=24)  # what two minutes allow
LONG = Offline(groups=4, prompt=32, low=32, high=96)
STRETCH = 3  # steps of the small model that follow each other on a side


def with_goal(found: Row, times: float) -> Row:
    return {**found, "goal": f">= {times:g} x", "ok": found["ratio"] >= times}


def compared(name: str, taken: tuple[peers.Took, peers.Took], times: float) -> Row:
    """Steps a second on both sides."""
    (mine, cpu), (peer, peer_cpu) = taken
    say(f"{name}: {1e3 * mine:,.1f} ms, {peers.NAME} {1e3 * peer:,.1f} ms, {peer / mine:.2f} x")
    say(f"  time of all cores {1e3 * cpu:,.1f} ms and {1e3 * peer_cpu:,.1f} ms, {peer_cpu / cpu:.2f} x")
    return with_goal(note(name, 1 / mine, unit="steps/s", peer=1 / peer), times)


# --- the GRPO step ---


def grpo_step(subject: Subject, work: Online, *, turns: int, stretch: int = 1) -> Row:
    name = f"CPU GRPO step, {subject.name}, {work}"
    seen = list[Iteration]()
    iterations = ours.grpo(subject, work)
    taken = peers.in_turns(
        peers.grpo(subject, work),
        lambda: seen.append(next(iterations)),
        turns=turns,
        updates=work.minibatches,
        stretch=stretch,
    )
    say(f"  {divided(seen[stretch:])}")
    return compared(name, taken, 3)


def divided(seen: Sequence[Iteration]) -> str:
    """The medians of the stages, in milliseconds, and their shares."""
    taken = defaultdict[str, list[float]](list)
    for iteration in seen:
        for stage in (*STAGES, "all"):
            key = "seconds" if stage == "all" else f"seconds_{stage}"
            taken[stage].append(1e3 * iteration.metrics[key])
    middle = {stage: statistics.median(taken[stage]) for stage in taken}
    shares = [f"{stage} {middle[stage]:,.1f} ({middle[stage] / middle['all']:.0%})" for stage in STAGES]
    return f"{middle['all']:,.1f} ms: {', '.join(shares)}"


def growth(quick: bool) -> None:
    """How the step's time grows with length, group size and model size."""
    base = replace(SMALL, minibatches=1)
    most = 2 if quick else 4
    cases = [(f"completion {n}", demo(), replace(base, completion=n)) for n in (22, 44, 88, 176)[:most]]
    cases += [(f"group {n}", demo(), replace(base, group=n)) for n in (4, 8, 16, 32)[:most]]
    for layers, width in ((1, 128), (4, 128), (4, 256), (8, 256))[:most]:
        shape = demo(num_hidden_layers=layers, hidden_size=width, intermediate_size=3 * width)
        cases.append((f"{layers} layers, width {width}", shape, base))
    for name, subject, work in cases:
        iterations = ours.grpo(subject, work)
        seen = [next(iterations) for _ in range(3 if quick else 6)]
        say(f"  {name}: {divided(seen[1:])}")


def measure_grpo(quick: bool) -> Sequence[Row]:
    """Both figures with their goals; how time divides and grows goes to stderr."""
    rows = [grpo_step(demo(), SMALL, turns=3 if quick else 7, stretch=STRETCH)]
    rows.append(grpo_step(adapted(), BRIEF if quick else BIG, turns=1 if quick else 3))
    growth(quick)
    return rows


# --- offline steps ---


def offline_step(method: str, subject: Subject, work: Offline, *, turns: int, stretch: int = 1) -> Row:
    name = f"CPU {method} step, {subject.name}, {work}"
    step = ours.turn_of(ours.steps(method, subject, work))
    taken = peers.in_turns(peers.METHODS[method](subject, work), step, turns=turns, stretch=stretch)
    return compared(name, taken, 2)


def measure_offline(quick: bool) -> Sequence[Row]:
    """DPO, SFT and reward models, on the demo's model and on the 135M with adapters."""
    small, big = demo(), adapted()
    turns = 4 if quick else 10
    rows = [offline_step(method, small, SHORT, turns=turns, stretch=STRETCH) for method in peers.METHODS]
    work, turns = (replace(LONG, groups=2), 1) if quick else (LONG, 5)
    return rows + [offline_step(method, big, work, turns=turns) for method in peers.METHODS]
