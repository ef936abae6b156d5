"""The learner on a GPU: a GRPO step against TRL's, and forward and backward against the chip's own speed."""

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch

from benchmarks.form import Row, note, row, say
from benchmarks.learning import ours
from benchmarks.learning.cpu import divided
from benchmarks.learning.work import Online, Subject
from benchmarks.sampling.gpu import make, twin
from hone.loop import Iteration
from hone.model.decoder import Decoder
from hone.model.policy import Policy
from hone.train.threads import threads
from hone.types import Batch

GRPO = Online(prompts=32, group=8, prompt=64, completion=256)
ROWS, LENGTH = 16, 1_024
SHARE = {"135M": (0.45, 7.0), "0.5B": (0.58, 15.0)}  # of the measured matmul peak, and GB
WANT = frozenset({"logp"})
MICRO, WARM = 131_072, 4  # tokens in memory at once; iterations before those that count
LONGEST, MOST = 131_072, 1_024  # tokens of a row and rows of 1,024 that are tried
Pass = Callable[..., Callable[[], None]]  # decoder, rows, length -> what runs one


def subject(shape: str, *, lora: bool = False) -> Subject:
    """A model of this shape in bfloat16, made anew."""
    return Subject(name=shape + (" (LoRA)" if lora else ""), decoder=lambda: make(shape), lora=lora)


@contextmanager
def as_in_a_run() -> Iterator[None]:
    """With the threads that `hone run` gives the host; TRL and transformers have torch's own number."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads(torch.device("cuda")))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def step_of(iterations: Iterator[Iteration]) -> Iteration:
    with as_in_a_run():
        return next(iterations)


# --- the GRPO step ---


def grpo_step(work: Online, *, times: float, most: float, turns: int, micro: int) -> Row:
    """Seconds of an iteration on both sides; micro: rows that TRL has in memory at once."""
    from benchmarks.learning import peers

    name, model, seen = f"H200 GRPO step, 135M, {work}", subject("135M"), list[Iteration]()
    iterations = warmed(ours.grpo(model, work, micro_tokens=MICRO))
    taken = peers.in_turns(
        peers.grpo(model, work, micro=micro), lambda: seen.append(step_of(iterations)), turns=turns, updates=1
    )
    (mine, _), (peer, _) = taken
    say(f"{name}: {mine:.2f} s, {peers.NAME} {peer:.2f} s, {peer / mine:.1f} x\n  {divided(seen[1:])}")
    goal = f">= {times:g} x, <= {most:g} s"
    return row(name, 1 / mine, unit="steps/s", peer=1 / peer, goal=goal, ok=peer / mine >= times and mine <= most)


def warmed(iterations: Iterator[Iteration]) -> Iterator[Iteration]:
    """After as many as it takes to compile kernels and to record passes."""
    for _ in range(WARM):
        step_of(iterations)
    return iterations


def growth() -> None:
    """How the step's time grows with length, group size and model size."""
    cases = [(f"completion {n}", "135M", replace(GRPO, completion=n)) for n in (64, 256, 1_024)]
    cases += [(f"group {n}", "135M", replace(GRPO, group=n)) for n in (4, 16)]
    for name, shape, work in [*cases, ("0.5B", "0.5B", GRPO)]:
        iterations = warmed(ours.grpo(subject(shape), work, micro_tokens=MICRO))
        say(f"  {name}: {divided([step_of(iterations) for _ in range(2)])}")


def measure_grpo(quick: bool) -> Iterator[Row]:
    """256 and 1,024 completions."""
    turns = 1 if quick else 3
    yield grpo_step(GRPO, times=14, most=0.7, turns=turns, micro=256)
    yield grpo_step(replace(GRPO, prompts=128), times=10, most=1.5, turns=1, micro=256)
    if not quick:
        growth()


# --- forward and backward ---


def peak() -> float:
    """Multiply-adds a second, twice, of a large product."""
    a = torch.randn(8_192, 8_192, device="cuda", dtype=torch.bfloat16)
    return 2 * 8_192**3 / seconds(lambda: a @ a, 20)


def seconds(call: Callable[[], object], repeats: int) -> float:
    """The median of three rounds, after one that warms up."""
    found: list[float] = []
    for _ in range(4):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(repeats):
            call()
        torch.cuda.synchronize()
        found.append((time.perf_counter() - start) / repeats)
    return statistics.median(found[1:])


def table(rows: int, length: int, vocab: int) -> Batch:
    """Random tokens, all but the last of each row trained on; collated on the host, as a loop's are."""
    tokens = torch.randint(2, min(vocab, 20_000), (rows, length + 1))
    full = torch.ones(rows, length, dtype=torch.bool)
    batch = Batch(inputs=tokens[:, :-1], targets=tokens[:, 1:], mask=full, real=full, group=torch.arange(rows))
    return batch.to("cuda")


def our_pass(decoder: Decoder, rows: int, length: int) -> Callable[[], None]:
    policy, batch = Policy(decoder.train()), table(rows, length, decoder.config.vocab_size)

    def step() -> None:
        with as_in_a_run():
            policy(batch, WANT).logp.sum().neg().backward()
        policy.zero_grad(set_to_none=True)

    return step


def their_pass(decoder: Decoder, rows: int, length: int, *, lora: Subject | None = None) -> Callable[[], None]:
    """transformers with its own loss, and PEFT's adapters."""
    model, batch = twin(decoder).train(), table(rows, length, decoder.config.vocab_size)
    if lora is not None:
        from peft import get_peft_model

        from benchmarks.learning import peers

        model = get_peft_model(model, cast(Any, peers.adapters(lora)))

    def step() -> None:
        model(batch.inputs, labels=batch.inputs, use_cache=False).loss.backward()
        model.zero_grad(set_to_none=True)

    return step


def passes(shape: str, best: float, quick: bool) -> Iterator[Row]:
    """Both sides' share of the peak, 6 N FLOPs a token, and memory."""
    found: dict[str, tuple[float, float]] = {}
    for side, made in (("Hone", our_pass), ("transformers", their_pass)):
        decoder = make(shape)
        work = 6 * sum(p.numel() for p in decoder.parameters()) * ROWS * LENGTH
        step = made(decoder, ROWS, LENGTH)
        torch.cuda.reset_peak_memory_stats()
        taken = seconds(step, 2 if quick else 8)
        found[side] = work / taken / best, torch.cuda.max_memory_allocated() / 1e9
        say(f"{shape}, {side}: {1e3 * taken:.1f} ms, {found[side][0]:.1%} of the peak, {found[side][1]:.1f} GB")
        del decoder, step
        torch.cuda.empty_cache()
    (mine, held), (peer, theirs) = found["Hone"], found["transformers"]
    share, most = SHARE[shape]
    name = f"H200 {shape}, forward and backward of {ROWS} x {LENGTH}"
    yield row(f"{name}: share of matmul peak", mine, unit="", peer=peer, goal=f">= {share:.0%}", ok=mine >= share)
    yield row(f"{name}: peak memory", held, unit="GB", peer=theirs, goal=f"<= {most:g} GB", ok=held <= most)


def largest(make_pass: Pass, decoder: Decoder, **fixed: int) -> int:
    """The longest row, or the most rows, that a forward and backward pass has memory for: doubled, then half as many
    more, up to the most that is tried."""
    name = "length" if "rows" in fixed else "rows"
    size, most = (2_048, LONGEST) if name == "length" else (16, MOST)
    fits = 0
    while size <= most and _fits(make_pass, decoder, {**fixed, name: size}):
        fits, size = size, 2 * size
    half = fits + fits // 2
    return half if size <= most and _fits(make_pass, decoder, {**fixed, name: half}) else fits


def _fits(make_pass: Pass, decoder: Decoder, sizes: dict[str, int]) -> bool:
    try:
        make_pass(decoder, **sizes)()
        torch.cuda.synchronize()
    except torch.cuda.OutOfMemoryError:
        return False
    finally:
        gc.collect()
        torch.cuda.empty_cache()
    return True


def measure_passes(quick: bool) -> Iterator[Row]:
    """Speed and memory of both shapes; then what fits."""
    best = peak()
    say(f"measured matmul peak {best / 1e12:.0f} TFLOP/s")
    for shape in SHARE:
        yield from passes(shape, best, quick)
    if quick:
        return
    for lora in (False, True):
        model = replace(subject("0.5B", lora=lora), decoder=lambda: make("0.5B", context=LONGEST))
        for what, fixed in (("longest row", {"rows": 1}), ("most rows of 1,024", {"length": LENGTH})):
            mine = largest(our_pass, ours.decoder_of(model), **fixed)
            peer = largest(partial(their_pass, lora=model if lora else None), model.decoder(), **fixed)
            say(f"{model.name}, {what}: {mine}, transformers {peer}")
            yield note(
                f"H200 {model.name}: {what} in memory", mine, unit="tokens" if "longest" in what else "rows", peer=peer
            )
