"""A run on the first layers of its model: for checks of what is done with weights, whatever these are."""

from dataclasses import replace
from typing import cast

import torch

from hone.dist import collect
from hone.launch.job import Run, learner_of
from hone.model.decoder import Decoder
from hone.model.formats.folder import EMBEDDING, HEAD, assemble
from hone.model.lora import plain_state
from hone.model.policy import Policy
from hone.model.scorer import Scorer
from hone.types import Group

LAYERS = 2  # one has none before it, and one has none after it
TOKENS = 4096  # of the vocabulary, which is most of a small model's weights


def shallow(job: Run) -> Run:
    """The run as its recipe builds it on so many layers and tokens; the run itself where that cannot be done."""
    decoder, recipe = job.policy.decoder, job.recipe
    few = decoder.config.num_hidden_layers <= LAYERS
    if type(decoder) is not Decoder or few or recipe.lora.path or collect.world()[1] > 1:
        return job
    config = replace(
        decoder.config,
        num_hidden_layers=LAYERS,
        windows=decoder.config.windows[:LAYERS],
        vocab_size=min(TOKENS, decoder.config.vocab_size),
    )
    state = {name: x for name, x in plain_state(decoder).items() if _is_kept(name)}
    if config.tie_word_embeddings:  # the head is the embedding
        del state[HEAD]
    state |= {name: state[name][: config.vocab_size] for name in (HEAD, EMBEDDING) if name in state}
    copied = {name: x.to("cpu", torch.float32, copy=True) for name, x in state.items()}
    learner = learner_of(recipe, job.algo, assemble(config, copied))
    made = replace(job, policy=cast(Policy | Scorer, learner.policy), learner=learner)
    if isinstance(job.policy, Scorer) and isinstance(made.policy, Scorer):
        made.policy.separator = job.policy.separator
    return made


def folded(group: Group, tokens: int) -> Group:
    """The rows with ids that a vocabulary of so many tokens has."""
    return [replace(r, tokens=[t % tokens for t in r.tokens]) for r in group]


def _is_kept(name: str) -> bool:
    _, layers, rest = name.partition(".layers.")
    return not layers or int(rest.partition(".")[0]) < LAYERS
