"""The runners that there are: every folder beside this file whose requirements are installed.

torch/ defines what a runner computes, and takes what no other covers.
"""

from dataclasses import dataclass

from hone.engine.runner import Runner, Switch
from hone.errors import HoneError
from hone.model.backends.registry import Backend, backends_for
from hone.model.decoder import Decoder


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What is asked of a runner."""

    max_rows: int
    capacity: int  # columns of a row: prompt and completion
    memory: int  # bytes for keys and values
    switch: Switch | None = None
    invariant: bool = False  # a row's numbers do not depend on the others
    int8: bool = False  # sample from a copy of the weights in 8 bits
    support: bool = False  # record which tokens could have been drawn


class RunnerBackend(Backend):
    """Makes runners of one kind."""

    def covers(self, decoder: Decoder, needs: Needs) -> str | None:
        """Why it does not run this decoder; None: it does."""
        raise NotImplementedError

    def make(self, decoder: Decoder, needs: Needs) -> Runner:
        """A runner with as many rows as fit into the memory; HoneError where not one does."""
        raise NotImplementedError


def runners() -> tuple[RunnerBackend, ...]:
    """The runners beside torch's, in the order in which they are asked."""
    return backends_for(RunnerBackend, "hone.engine.runners", "runner")


def column_bytes(decoder: Decoder) -> int:
    """Keys and values of one token in every layer."""
    config, size = decoder.config, decoder.model.embed_tokens.weight.element_size()
    return 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * size


def too_little_memory(needs: Needs, one_row: int) -> HoneError:
    """one_row: bytes that a row takes."""
    return HoneError(
        f"keys and values of one sequence of {needs.capacity} tokens take {one_row / 2**20:.1f} MiB, "
        f"{needs.memory / 2**20:.1f} MiB are there: shorten prompts or max_tokens, or give more memory"
    )
