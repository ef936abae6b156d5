"""The learner on a CPU against TRL, float32 on both sides, each in a process of its own, taking turns.

What a process runs is found by name, so that only TRL's loads TRL.
"""

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial

from benchmarks.form import Row, note, say
from benchmarks.learning import ours
from benchmarks.learning.turns import Clock, Side, apart, run
from benchmarks.learning.work import Offline, Online, Subject, adapted, demo
from hone.demo.stages import FULL
from hone.loop import Iteration

STAGES = ("sample", "score", "annotate", "update", "publish")
SMALL = Online(prompts=24, group=8, prompt=16, completion=FULL.completion, minibatches=4, beta=0.01)
BIG = Online(prompts=4, group=4, prompt=32, completion=64)
SHORT = Offline(groups=32, prompt=16, low=8, high=44)
BRIEF = replace(BIG, prompts=2, completion=24)  # what two minutes allow
LONG = Offline(groups=4, prompt=32, low=32, high=96)
METHODS = ("dpo", "sft", "reward_model")
STRETCH = 3  # steps of the small model that follow each other on a side
Make = Callable[[], Subject]  # in the process that trains it


@cache
def name_of(subject: Make) -> str:
    return subject().name


def with_goal(found: Row, times: float) -> Row:
    return {**found, "goal": f">= {times:g} x", "ok": found["ratio"] >= times}


def against(name: str, sides: tuple[Side, Side], *, times: float, turns: int, stretch: int) -> Row:
    """Steps a second of ours and TRL's."""
    import transformers  # these load their trainers when asked: here for the result's versions alone
    import trl

    peer = f"TRL {trl.__version__} on transformers {transformers.__version__}"
    (mine, cpu), (theirs, their_cpu) = apart({"Hone": sides[0], peer: sides[1]}, turns=turns, stretch=stretch)
    say(f"{name}: {1e3 * mine:,.1f} ms, {peer} {1e3 * theirs:,.1f} ms, {theirs / mine:.2f} x")
    say(f"  time of all cores {1e3 * cpu:,.1f} ms and {1e3 * their_cpu:,.1f} ms, {their_cpu / cpu:.2f} x")
    return with_goal(note(name, 1 / mine, unit="steps/s", peer=1 / theirs), times)


# --- the GRPO step ---


def our_grpo(subject: Make, work: Online, clock: Clock) -> None:
    """Tells how the step's time divides."""
    seen, iterations = list[Iteration](), ours.grpo(subject(), work)
    run(lambda: seen.append(next(iterations)), clock)
    say(f"  {divided(seen[clock.stretch :])}")


def their_grpo(subject: Make, work: Online, clock: Clock) -> None:
    from benchmarks.learning import peers

    peers.train(peers.grpo(subject(), work), clock, updates=work.minibatches)


def grpo_step(subject: Make, work: Online, *, turns: int, stretch: int = 1) -> Row:
    name = f"CPU GRPO step, {name_of(subject)}, {work}"
    sides = partial(our_grpo, subject, work), partial(their_grpo, subject, work)
    return against(name, sides, times=3, turns=turns, stretch=stretch)


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


def measure_grpo(quick: bool) -> Iterator[Row]:
    """Both figures with their goals; how time divides and grows goes to stderr."""
    yield grpo_step(demo, SMALL, turns=3 if quick else 7, stretch=STRETCH)
    yield grpo_step(adapted, BRIEF if quick else BIG, turns=1 if quick else 3)
    growth(quick)


# --- offline steps ---


def our_steps(method: str, subject: Make, work: Offline, clock: Clock) -> None:
    run(ours.turn_of(ours.steps(method, subject(), work)), clock)


def their_steps(method: str, subject: Make, work: Offline, clock: Clock) -> None:
    from benchmarks.learning import peers

    peers.train(peers.METHODS[method](subject(), work), clock)


def offline_step(method: str, subject: Make, work: Offline, *, turns: int, stretch: int = 1) -> Row:
    name = f"CPU {method} step, {name_of(subject)}, {work}"
    sides = partial(our_steps, method, subject, work), partial(their_steps, method, subject, work)
    return against(name, sides, times=2, turns=turns, stretch=stretch)


def measure_offline(quick: bool) -> Iterator[Row]:
    """DPO, SFT and reward models, on the demo's model and on the 135M with adapters."""
    for method in METHODS:
        yield offline_step(method, demo, SHORT, turns=3 if quick else 10, stretch=STRETCH)
    work, turns = (replace(LONG, groups=2), 1) if quick else (LONG, 5)
    for method in METHODS:
        yield offline_step(method, adapted, work, turns=turns)
