"""What fits a device's memory: the longest row, and the most rows, of one forward and backward pass of SFT.

Both sides hold what a run holds from its second update on: weights, gradients and Adam's moments in float32, and the
weights in bfloat16 in which they compute (Hone's lie beside the others, autocast makes TRL's in the pass). With
adapters those are the adapters', beside frozen weights in bfloat16. A pass begins without gradients and ends with them.
Hone recomputes layers where memory is short (`train.recompute=auto`, the default); TRL all, its default, or none.
"""

import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch

from benchmarks.form import Row, note, say
from benchmarks.learning import ours
from benchmarks.learning.work import Offline, Subject, ids
from hone.algo import ALGORITHMS
from hone.algo.table import objective
from hone.data.collate import collate
from hone.errors import HoneError
from hone.train.learner import is_out_of_memory, release_memory, retry_smaller
from hone.train.update import update, weigh
from hone.types import Batch, Rollout

T = TypeVar("T")
FIRST = Offline(groups=1, prompt=8, low=8, high=8)  # the update that makes the moments


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """step: one pass over so many rows of so many tokens, all trained on; optimizer: of what has the gradients."""

    step: Callable[[int, int], None]
    optimizer: torch.optim.Optimizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """What is searched for: the sizes of a pass, and where searches begin (see `largest`)."""

    name: str
    unit: str
    sizes: Callable[[int], tuple[int, int]]  # -> rows, tokens of each
    most: int
    near: int  # of what TRL is expected to have memory for when it keeps all activations, and
    near_again: int  # when it computes them again


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A size that fits, and the memory that it takes, in GB; 0 on a CPU."""

    size: int
    held: float


# --- the two sides ---


def batch_of(rows: int, length: int, vocab: int) -> Batch:
    """On the host, as a loop's are; nothing is said before the first token, so it is no target."""
    mask = [False] + [True] * (length - 1)
    return collate([[Rollout(tokens=tokens, mask=mask)] for tokens in ids(rows, length, vocab, seed=0)])


def hone(subject: Subject) -> Side:
    """A learner that has made an update."""
    algo = ALGORITHMS["sft"]()
    learner, decoder = ours.learner_of(subject, algo, rows=1)
    vocab = decoder.config.vocab_size

    def batch(rows: int, length: int) -> Batch:
        return weigh(batch_of(rows, length, vocab).to(learner.device), algo)

    def step(rows: int, length: int) -> None:
        decoder.zero_grad(set_to_none=True)  # where memory ran out, some are left beside the copies'
        learner.optimizer.zero_grad(set_to_none=True)
        full = batch(rows, length)
        with ours.as_in_a_run(learner.device):
            objective(learner.policy(full, algo.wants), full, algo.loss).backward()

    update(learner, batch(1, FIRST.prompt + FIRST.high), algo)
    return Side(step=step, optimizer=learner.optimizer)


def trl(subject: Subject, *, recompute: bool) -> Side:
    """A trainer that has made an update; recompute: gradient checkpointing."""
    from benchmarks.learning import peers

    trainer = peers.sft(subject, FIRST, recompute=recompute)(1)
    trainer.remove_callback(peers.transformers.PrinterCallback)
    trainer.train()
    vocab = trainer.model.config.vocab_size

    def step(rows: int, length: int) -> None:
        trainer.model.zero_grad(set_to_none=True)
        examples = [{"input_ids": tokens, "labels": tokens} for tokens in ids(rows, length, vocab, seed=0)]
        trainer.training_step(trainer.model_wrapped, trainer.data_collator(examples))

    return Side(step=step, optimizer=trainer.optimizer)


# --- the search ---


def ends(call: Callable[[], object]) -> bool:
    """Whether there is memory for it; what it held is given back."""
    ended = False
    try:
        call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        ended = True
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
    forget()  # not in the handler: the error's traceback holds all that the pass had in memory
    return ended


def forget() -> None:
    """Give back what nothing refers to any more."""
    gc.collect()
    release_memory()


def largest(fits: Callable[[int], bool], *, near: int, most: int) -> int:
    """The largest size that fits: from `near` doubled, or halved, until that changes, then half as many more; 0: none,
    `most`: more were not tried."""
    size = near
    if fits(size):
        while 2 * size <= most and fits(2 * size):
            size *= 2
        if 2 * size > most:
            return size
    else:
        size //= 2
        while size and not fits(size):
            size //= 2
    half = size + size // 2
    return half if half > size and fits(half) else size


def halved(attempt: Callable[[int], T], rows: int) -> T:
    """What it returns with so many rows in memory at once, or with half as many as often as it takes."""

    def smaller() -> None:
        nonlocal rows
        if rows == 1:
            raise HoneError("out of memory with one row at once: take a shorter one")
        rows //= 2
        forget()
        say(f"out of memory: {rows} rows at once")

    return retry_smaller(lambda: attempt(rows), smaller)


def found(side: Side, kind: Kind, near: int) -> Found:
    """The largest of this kind, and what it took."""
    held = 0.0

    def fits(size: int) -> bool:
        nonlocal held
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        fitted = ends(lambda: side.step(*kind.sizes(size)))
        if fitted and torch.cuda.is_available():
            held = torch.cuda.max_memory_allocated() / 1e9
        return fitted

    size = largest(fits, near=near, most=kind.most)
    return Found(size=size, held=held)


def searched(make: Callable[[], Side], kinds: Sequence[Kind], nears: Sequence[int]) -> list[Found]:
    """What a side, which is made and dropped here, has memory for."""
    side = make()
    results = [found(side, kind, near) for kind, near in zip(kinds, nears, strict=True)]
    del side
    forget()
    return results


def measured(subject: Subject, kinds: Sequence[Kind], *, where: str) -> Iterator[Row]:
    """Each kind beside TRL with gradient checkpointing, its default, and then beside TRL without."""
    mine = searched(lambda: hone(subject), kinds, [kind.most for kind in kinds])
    for recompute, how in (
        (True, "with gradient checkpointing, its default"),
        (False, "without gradient checkpointing"),
    ):
        nears = [kind.near_again if recompute else kind.near for kind in kinds]
        theirs = searched(partial(trl, subject, recompute=recompute), kinds, nears)
        for kind, one, peer in zip(kinds, mine, theirs, strict=True):
            name = f"{where} {subject.name}: {kind.name} in memory, beside TRL {how}"
            say(f"{name}: {one.size:,} {kind.unit} in {one.held:.1f} GB, TRL {peer.size:,} in {peer.held:.1f} GB")
            held = {"memory_gb": one.held, "peer_memory_gb": peer.held}
            yield note(name, one.size, unit=kind.unit, peer=peer.size) | held
