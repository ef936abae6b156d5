"""The learner on a GPU: a GRPO step against TRL's, and forward and backward against the chip's own speed."""

import statistics
import time
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, replace

import torch

from benchmarks.form import Row, note, row, say
from benchmarks.learning import fits, ours
from benchmarks.learning.cpu import divided
from benchmarks.learning.work import Online, Subject
from benchmarks.sampling.gpu import make, twin
from hone.loop import Iteration
from hone.model.decoder import Decoder
from hone.model.policy import Policy
from hone.train.threads import freeze_objects
from hone.types import Batch

GRPO = Online(prompts=32, group=8, prompt=64, completion=256)
ROWS, LENGTH = 16, 1_024
SHARE = {"135M": (0.45, 7.0), "0.5B": (0.58, 15.0)}  # of the matmul peak that is measured beside it, and GB
WANT = frozenset({"logp"})
MICRO, TRL_ROWS = 69_632, 256  # in memory at once: tokens here, rows there if they fit
SPELL, REST, BURST = 1.0, 3.0, 0.02  # seconds of passes or products at a stretch; without work; and right after that
WARM = 4  # iterations of each side before those that count: Hone compiles kernels and records passes in them
LONGEST = 131_072  # tokens of a row; a longer one takes minutes
KINDS = (
    fits.Kind(name="most rows of 1,024", unit="rows", sizes=lambda n: (n, LENGTH), most=1_024, near=64, near_again=512),
    fits.Kind(name="longest row", unit="tokens", sizes=lambda n: (1, n), most=LONGEST, near=65_536, near_again=LONGEST),
)
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # a CPU only tries the code out


def subject(shape: str, *, lora: bool = False) -> Subject:
    """A model of this shape in bfloat16, made anew."""
    return Subject(name=shape + (" (LoRA)" if lora else ""), decoder=lambda: make(shape), lora=lora)


def step_of(iterations: Iterator[Iteration]) -> Iteration:
    with ours.as_in_a_run(DEVICE):
        return next(iterations)


# --- the GRPO step ---


def compared(name: str, model: Subject, work: Online, *, turns: int, half: bool = False) -> Row:
    """Iterations a second on both sides; half: TRL's weights and moments in bfloat16, which is less than Hone's."""
    from benchmarks.learning import peers

    fits.forget()
    seen = list[Iteration]()
    iterations = ours.grpo(model, work, micro_tokens=MICRO, again=False)

    def taken(rows: int) -> tuple[peers.Took, peers.Took]:
        seen.clear()
        trainer = peers.grpo(model, work, micro=rows, half=half)
        with freeze_objects():
            return peers.in_turns(trainer, lambda: seen.append(step_of(iterations)), turns=turns, warm=WARM)

    (mine, _), (peer, _) = fits.halved(taken, min(TRL_ROWS, work.rows))
    say(f"{name}: {mine:.2f} s, {peers.NAME} {peer:.2f} s, {peer / mine:.1f} x\n  {divided(seen[WARM:])}")
    return note(name, 1 / mine, unit="steps/s", peer=1 / peer)


def grpo_step(model: Subject, work: Online, *, times: float, most: float, turns: int) -> Row:
    """In the same precision: computed in bfloat16; weights, gradients and moments in float32."""
    found = compared(f"H200 GRPO step, {model.name}, {work}", model, work, turns=turns)
    met = found["ratio"] >= times and 1 / found["ours"] <= most
    return found | {"goal": f">= {times:g} x, <= {most:g} s", "ok": met}


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
        fits.forget()
        iterations = warmed(ours.grpo(subject(shape), work, micro_tokens=MICRO, again=False))
        say(f"  {name}: {divided([step_of(iterations) for _ in range(2)])}")


def measure_grpo(quick: bool) -> Iterator[Row]:
    """256 and 1,024 completions; then those with less precision on TRL's side."""
    model, many = subject("135M"), replace(GRPO, prompts=128)
    yield grpo_step(model, GRPO, times=14, most=0.7, turns=1 if quick else 3)
    yield grpo_step(model, many, times=10, most=1.5, turns=1 if quick else 3)
    if quick:
        return
    less = f"H200 GRPO step, {model.name}, {many}, TRL with bfloat16 weights and moments"
    yield compared(less, model, many, turns=1, half=True)
    growth()


# --- forward and backward ---


def peak(spell: float) -> float:
    """Multiply-adds a second, twice, of a large product that is repeated for so long."""
    a = torch.randn(8_192, 8_192, device="cuda", dtype=torch.bfloat16)
    return 2 * 8_192**3 / seconds(lambda: a @ a, spell)


def seconds(call: Callable[[], object], spell: float) -> float:
    """Of one call, among as many as take so long; a few warm up."""
    some = _several(call, 3)
    return _several(call, max(1, round(spell / some)))


def _several(call: Callable[[], object], times: int) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(times):
        call()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / times


def table(rows: int, length: int, vocab: int) -> Batch:
    """Random tokens, all but the last of each row trained on; collated on the host, as a loop's are."""
    tokens = torch.randint(2, min(vocab, 20_000), (rows, length + 1))
    full = torch.ones(rows, length, dtype=torch.bool)
    batch = Batch(inputs=tokens[:, :-1], targets=tokens[:, 1:], mask=full, real=full, group=torch.arange(rows))
    return batch.to("cuda")


def our_pass(decoder: Decoder, rows: int, length: int) -> Callable[[], None]:
    policy, batch = Policy(decoder.train()), table(rows, length, decoder.config.vocab_size)

    def step() -> None:
        with ours.as_in_a_run(DEVICE):
            policy(batch, WANT).logp.sum().neg().backward()
        policy.zero_grad(set_to_none=True)

    return step


def their_pass(decoder: Decoder, rows: int, length: int) -> Callable[[], None]:
    """transformers with its own loss; the decoder, which is let go, gives it its weights."""
    model, batch = twin(decoder).train(), table(rows, length, decoder.config.vocab_size)

    def step() -> None:
        model(batch.inputs, labels=batch.inputs, use_cache=False).loss.backward()
        model.zero_grad(set_to_none=True)

    return step


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """Of one side: FLOPs of a pass, its seconds and the peak beside it, medians both, a rested chip's peak, and GB."""

    work: int
    taken: float
    peak: float
    rested: float
    held: float

    def share(self, peak: float) -> float:
        return self.work / self.taken / peak


def in_turns(shape: str, made: Callable[[Decoder, int, int], Callable[[], None]], *, quick: bool) -> Passes:
    """Passes and peak, a spell each, one after the other: at its limit of power a chip is slower by a seventh than in a
    burst after a rest, so that only what ran for as long can be compared."""
    decoder = make(shape)
    work = 6 * sum(p.numel() for p in decoder.parameters()) * ROWS * LENGTH  # 6 N a token
    step = made(decoder, ROWS, LENGTH)
    del decoder  # transformers has weights of its own
    torch.cuda.reset_peak_memory_stats()
    _several(step, 4)  # until passes are recorded
    held, spell = torch.cuda.max_memory_allocated() / 1e9, 0.2 if quick else SPELL
    peak(BURST)  # its kernel is loaded
    time.sleep(REST)
    rested = peak(BURST)
    taken, peaks = zip(*((seconds(step, spell), peak(spell)) for _ in range(1 if quick else 3)), strict=True)
    beside = ", ".join(f"{1e3 * t:.1f} ms at {p / 1e12:.0f}" for t, p in zip(taken, peaks, strict=True))
    del step
    torch.cuda.empty_cache()
    mid = statistics.median
    found = Passes(work=work, taken=mid(taken), peak=mid(peaks), rested=rested, held=held)
    shares = f"{found.share(found.peak):.1%}, {found.share(rested):.1%} of a rested chip's {rested / 1e12:.0f}"
    say(f"{shape}: {beside} TFLOP/s: {shares}, {held:.1f} GB")
    return found


def passes(shape: str, quick: bool) -> Iterator[Row]:
    """Both sides' share of the peak, and memory; the ratio of shares is that of times, for the peaks are two."""
    mine, theirs = (in_turns(shape, made, quick=quick) for made in (our_pass, their_pass))
    name, (least, most) = f"H200 {shape}, forward and backward of {ROWS} x {LENGTH}", SHARE[shape]
    times = {"ms": 1e3 * mine.taken, "peer_ms": 1e3 * theirs.taken, "ratio": theirs.taken / mine.taken}

    def shares(what: str, peak: float, peer_peak: float) -> Row:
        found = note(f"{name}: {what}", mine.share(peak), unit="", peer=theirs.share(peer_peak))
        return found | times | {"tflops": peak / 1e12, "peer_tflops": peer_peak / 1e12}

    met = mine.share(mine.peak) >= least
    yield shares("share of matmul peak", mine.peak, theirs.peak) | {"goal": f">= {least:.0%}", "ok": met}
    yield shares("share of a rested chip's peak", mine.rested, theirs.rested)
    held = f"{name}: peak memory"
    yield row(held, mine.held, unit="GB", peer=theirs.held, goal=f"<= {most:g} GB", ok=mine.held <= most)


def measure_passes(quick: bool) -> Iterator[Row]:
    """Speed and memory of both shapes; then what fits."""
    for shape in SHARE:
        yield from passes(shape, quick)
    if quick:
        return
    drawn = make("0.5B", context=LONGEST).cpu()  # once: the host takes its time
    for lora in (False, True):
        model = replace(subject("0.5B", lora=lora), decoder=lambda: deepcopy(drawn).to(DEVICE))
        yield from fits.measured(model, KINDS, where="H200")
