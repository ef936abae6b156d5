"""What no sampler can do, said before anything is computed, with the remedy."""

from collections import deque
from collections.abc import Sequence
from operator import index

from hone.engine.params import SampleParams
from hone.errors import HoneError

DIVERGED = (
    "the model's logits are not finite, its weights have diverged: go back to an earlier checkpoint "
    "and lower the learning rate"
)
TOKENIZER = "the tokenizer does not fit the model, use the one it was trained with"


def check_prompt(name: str, prompt: Sequence[int], *, context: int, vocab_size: int) -> None:
    """A prompt that the model can read, with room for a token after it."""
    if isinstance(prompt, str):
        raise HoneError(f"{name} is text: give token ids, tokenizer.encode(text)")
    try:
        deque(map(index, prompt), maxlen=0)  # C++ reads them as whole numbers, whatever they are
    except TypeError:
        raise HoneError(f"{name} is not a list of whole numbers: give token ids for each prompt, [[1, 2, 3]]") from None
    if not len(prompt):
        raise HoneError(f"{name} has 0 tokens, the model's context is {context}: give it at least one token")
    if len(prompt) + 1 > context:
        raise HoneError(
            f"{name} has {len(prompt)} tokens, the model's context is {context} and a completion needs "
            "one: shorten the prompt, or use a model with a longer context"
        )
    if min(prompt) < 0 or max(prompt) >= vocab_size:
        wrong = next(token for token in prompt if not 0 <= token < vocab_size)
        raise HoneError(f"{name} has token {wrong}, outside the model's vocabulary of {vocab_size}: {TOKENIZER}")


def check_text(params: SampleParams, *, reads_text: bool) -> None:
    """Stop strings can be looked for."""
    if params.stop and not reads_text:
        raise HoneError("stop strings need the text of tokens: give the sampler decode=tokenizer.decode")


def check_stops(params: SampleParams, most: int | None) -> None:
    """No more stop tokens than the runner looks for, or HoneError."""
    if most is not None and len(params.stop_ids) > most:
        raise HoneError(f"{len(params.stop_ids)} stop tokens are more than a GPU looks for: give at most {most}")


def check_support(params: SampleParams, *, records: bool) -> None:
    """What could have been drawn can be recorded where it is asked for, or HoneError."""
    if params.support_recorded and not records:
        raise HoneError(
            "this sampler does not record which tokens top_k, top_p and min_p keep, and training needs that: "
            "set sample.top_k=0 sample.top_p=1.0 sample.min_p=0.0"
        )
