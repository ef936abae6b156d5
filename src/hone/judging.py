"""A judge from its file: behind an endpoint, or a model of this machine."""

import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from hone import build
from hone.config import from_yaml
from hone.data.tokenizer import Tokenizer
from hone.errors import HoneError
from hone.measure import sample_groups
from hone.model.decoder import Decoder
from hone.recipe import SampleSpec
from hone.reward.endpoint import Budget, Endpoint, Failed
from hone.reward.judge import Ask, Judge, Settings, check
from hone.types import Message, Task


def judge(path: str) -> Judge:
    """The judge that a YAML file describes."""
    settings = from_yaml(path, Settings())
    check(settings, path)
    budget = Budget(settings.budget)
    ask: Ask
    if settings.endpoint:
        named = {name: getattr(settings, name) for name in ("model", "key", "timeout", "retries")}
        ask = Endpoint(url=settings.endpoint, budget=budget, **named)
    else:
        ask = local(settings.model, budget=budget)
    return Judge(settings, ask, folder=Path(path).parent)


def local(model: str, *, budget: Budget) -> Ask:
    """Questions to a model's folder or fetched name, one at a time."""
    return partial(_answer, *build.loaded(model), budget, threading.Lock())


def _answer(
    vocabulary: Tokenizer,
    decoder: Decoder,
    budget: Budget,
    lock: threading.Lock,
    messages: Sequence[Message],
    *,
    temperature: float,
    max_tokens: int,
    seed: int,
) -> str:
    budget.spend()
    prompt = messages if vocabulary.chat_template is not None else str(messages[0]["content"])
    spec = SampleSpec(max_tokens=max_tokens, temperature=temperature)
    params = build.sample_params(spec, vocabulary, seed=seed)
    try:
        with lock:
            ((rollout,),) = sample_groups(decoder, vocabulary, [Task(prompt=prompt)], params=params, samples=1)
    except (HoneError, ValueError) as error:  # as for a question that is longer than the context
        raise Failed(f"the judge cannot read this: {error}") from error
    return rollout.text
