"""From a recipe's reward to what scores completions; a judge is made from its file.

What can hang or crash runs in processes of its own.
"""

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hone.config.load import load_function
from hone.config.overrides import from_yaml, unknown
from hone.config.recipe import JUDGE, MODEL, REWARDS, PartsSpec, Recipe, SampleSpec, is_function, is_reward_name
from hone.data.text.tokenizer import Tokenizer
from hone.errors import HoneError
from hone.launch import build
from hone.launch.measure import sample_groups
from hone.model.decoder import Decoder
from hone.reward.learned.endpoint import Budget, Endpoint, NoAnswer
from hone.reward.learned.judge import Ask, Judge, JudgeSettings, check_settings
from hone.reward.learned.load import reward_model
from hone.reward.score import Reward, RewardPart, RewardScorer, as_scorer, cached, combine, read_schedule
from hone.reward.verify import CACHE_SIZES, CAN_HANG, SECONDS, make_verifier
from hone.reward.verify.code.settings import CodeSettings, reward_arguments
from hone.reward.verify.code.verdict import code_reward
from hone.reward.workers.reward_worker import in_workers
from hone.types import Message, Task


def judge(path: str) -> Judge:
    """The judge that a YAML file describes."""
    settings = from_yaml(path, JudgeSettings())
    check_settings(settings, path)
    budget = Budget(settings.budget)
    ask: Ask
    if settings.endpoint:
        named = {name: getattr(settings, name) for name in ("model", "key", "timeout", "retries")}
        ask = Endpoint(url=settings.endpoint, budget=budget, **named)
    else:
        ask = local(settings.model, budget=budget)
    return Judge(settings, ask, folder=Path(path).parent)


def local(model: str, *, budget: Budget) -> Ask:
    """A function that asks the model of a folder or fetched name one question at a time."""
    return partial(_answer, *build.load_model(model), budget, threading.Lock())


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
        raise NoAnswer(f"the judge cannot read this: {error}") from error
    return rollout.text


Spec = str | Mapping[str, float] | Callable[..., Any]


def start_reward_processes(recipe: Recipe) -> dict[str, Reward]:
    """Start the recipe's functions in processes of their own; by name, "" for one made in Python; none offline.

    Call it before anything large is in memory: each process would hold a copy of whatever changes later.
    """
    spec, train, parts = recipe.reward, recipe.train, recipe.parts
    if not recipe.online or train.reward_apart == "never":
        if recipe.online and parts.timeout:
            raise HoneError("parts.timeout needs processes of its own: leave out train.reward_apart=never")
        return {}
    if callable(spec):
        functions = {"": spec} if train.reward_apart == "always" else {}
    else:
        named = [spec] if isinstance(spec, str) else [name for name, weight in spec.items() if weight]
        named += [parts.held_out] if parts.held_out else []
        functions = {
            name: f for name in dict.fromkeys(named) if (f := function_to_isolate(name, asked=name in parts.timeout))
        }
    quick = {name: min(SECONDS, train.reward_timeout) for name in functions if name.partition(":")[0] in CAN_HANG}
    each = {**quick, **parts.timeout}
    return isolate(functions, seconds=train.reward_timeout, each=each, memory=train.reward_memory)


def isolate(
    functions: Mapping[str, Callable[..., Any]],
    *,
    seconds: float,
    each: Mapping[str, float] | None = None,
    memory: float = 0.0,
) -> dict[str, Reward]:
    """The functions in one pool of processes. seconds: a completion; memory: GiB a process, 0 for the default."""
    if not functions:
        return {}
    limits = [(each or {}).get(name, seconds) for name in functions]
    return dict(zip(functions, in_workers(list(functions.values()), seconds=limits, memory=memory), strict=True))


def function_to_isolate(name: str, *, asked: bool = False) -> Callable[..., Any] | None:
    """The function of this name if it must run in a process of its own: it can hang or crash, or a timeout is set."""
    if is_function(name):
        return load_function(name)
    if MODEL.fullmatch(name) or name.startswith(f"{JUDGE}:"):
        return None
    function, hangs = _verifier(name)
    return function if hangs or asked else None


def scorer(
    spec: Spec,
    vocabulary: Tokenizer | None = None,
    *,
    device: torch.device | str = "cpu",
    separate: Mapping[str, Reward] | None = None,
    parts: PartsSpec | None = None,
) -> RewardScorer:
    """Named verifiers with weights, a reward model's folder, a function in a file, or a function.

    separate: rewards of functions that run in processes of their own. parts: how each part counts.
    """
    isolated, how = separate or {}, parts or PartsSpec()
    if isinstance(spec, str) and is_function(spec) and how == PartsSpec(held_out=how.held_out):
        spec = isolated[spec] if spec in isolated else load_function(spec)
    if callable(spec):
        return as_scorer(isolated.get("", spec))
    weights = {spec: 1.0} if isinstance(spec, str) else {name: weight for name, weight in spec.items() if weight}
    scorers = {name: as_scorer(isolated.get(name) or _load_reward(name, vocabulary, device)) for name in weights}
    return combine({name: _part(name, scorers[name], weight, how) for name, weight in weights.items()})


def _part(name: str, reward: RewardScorer, weight: float, how: PartsSpec) -> RewardPart:
    size = how.cache.get(name, CACHE_SIZES.get(name.partition(":")[0], 0))
    low, high = how.low.get(name, -math.inf), how.high.get(name, math.inf)
    schedule = read_schedule(how.schedule[name], name=name) if name in how.schedule else ()
    reward = cached(reward, size=size) if isinstance(reward, Reward) else reward
    return RewardPart(reward=reward, weight=weight, low=low, high=high, schedule=schedule)


def _verifier(name: str) -> tuple[Callable[..., Any], bool]:
    if not is_reward_name(name):
        raise unknown("reward", name, REWARDS)
    kind, _, path = name.partition(":")
    if kind == "code" and path.endswith((".yaml", ".yml")):
        return partial(code_reward, **reward_arguments(from_yaml(path, CodeSettings()), path)), False
    return make_verifier(name)


def _load_reward(name: str, vocabulary: Tokenizer | None, device: torch.device | str) -> Callable[..., Any]:
    if is_function(name):
        return load_function(name)
    if name.startswith(f"{JUDGE}:"):
        return judge(name.partition(":")[2])
    if (learned := MODEL.fullmatch(name)) is None:
        function, hangs = _verifier(name)
        return isolate({name: function}, seconds=SECONDS)[name] if hangs else function
    if vocabulary is None:
        raise HoneError(f"{name} reads a policy's tokens, and there is none here: name a verifier or FILE.py:function")
    how, k, folders = learned.groups()
    return reward_model(folders.split(","), vocabulary, how=how or "mean", k=float(k or 1.0), device=device)
