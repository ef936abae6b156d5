"""What settings may be, each alone and beside the others; what is wrong is said with the setting that mends it."""

from collections.abc import Mapping
from typing import Any

from hone.config.overrides import Choice, check, unknown
from hone.config.recipe import LoraSpec, Recipe, check_parts, check_reward
from hone.config.values import shown_value
from hone.errors import HoneError

# What a column may be called for Hone, Alpaca or ShareGPT to read it; others go to the reward under their own names.
COLUMNS = (
    "text", "messages", "prompt", "completion", "chosen", "rejected", "margin", "label", "score", "steps",
    "step_labels", "completions", "labels", "answer", "id", "tools", "instruction", "input", "output", "system",
    "conversations",
)  # fmt: skip
AT_LEAST: dict[str, float] = {
    "seed": 0, "model.vocab_size": 0, "model.hidden_size": 1, "model.intermediate_size": 1, "model.layers": 1,
    "model.heads": 1, "model.kv_heads": 1, "model.context": 2, "sample.group": 1, "sample.max_tokens": 0,
    "sample.top_k": 0, "sample.min_p": 0, "sample.max_rows": 1, "train.steps": 1, "train.prompts": 1,
    "train.epochs": 1, "train.minibatches": 1, "train.micro_rows": 1, "train.refill_rounds": 1, "train.tokens": 0,
    "train.micro_tokens": 0, "read.buffer": 1, "read.chunk": 0,
    "train.max_bad_updates": 1, "train.max_bad_total": 1, "train.rollback": 0,
    "train.max_invalid": 0, "train.reference_refresh": 0, "train.eval_every": 0, "train.eval_samples": 1,
    "train.reward_memory": 0, "train.threads": 0, "optim.critic_lr": 0, "optim.weight_decay": 0, "optim.warmup": 0,
    "lora.rank": 0, "save.minutes": 0, "save.every": 0, "save.keep": 1, "save.milestones": 0,
    "limits.patience_warn": 1, "limits.patience_stop": 1,
}  # fmt: skip
ABOVE: dict[str, float] = {
    "sample.temperature": 0, "sample.top_p": 0, "train.mismatch_cap": 0, "optim.lr": 0, "optim.clip_norm": 0,
    "lora.alpha": 0, "train.reward_timeout": 0, "process.weight": 0,
}  # fmt: skip
AT_MOST: dict[str, float] = {
    "sample.top_p": 1, "sample.min_p": 1, "train.max_invalid": 1, "train.reward_memory": 2**20,
    "train.reward_timeout": 10**7,
    # more is a slip of the hand: the run would not end, or not fit into any machine
    "train.threads": 4096, "train.prompts": 10**7, "train.epochs": 10**5, "sample.group": 10**6, "lora.rank": 10**5,
    "model.layers": 4096,
}  # fmt: skip


def validate(recipe: Recipe) -> None:
    """Every setting has its type and makes sense with the others, or HoneError with the remedy."""
    if not isinstance(recipe, Recipe):
        raise HoneError(f"a recipe returns a hone.Recipe, not {type(recipe).__name__}")
    check(recipe)
    if not isinstance(recipe.algo, Choice) and not hasattr(recipe.algo, "online"):
        raise HoneError(f"algo is {shown_value(recipe.algo)}: use Choice('grpo') or hone.algo.grpo()")
    _validate_ranges(recipe)
    _validate_together(recipe)
    _validate_reward(recipe)
    _validate_columns(recipe.read.columns)


def _validate_ranges(recipe: Recipe) -> None:
    for path in {**AT_LEAST, **ABOVE}:
        value: Any = recipe
        for name in path.split("."):
            value = getattr(value, name)
        if value is None:
            continue
        if path in AT_LEAST and value < AT_LEAST[path]:
            raise HoneError(f"{path} is {value}: it must be at least {AT_LEAST[path]:g}")
        if path in ABOVE and value <= ABOVE[path]:
            raise HoneError(f"{path} is {value}: it must be above {ABOVE[path]:g}")
        if path in AT_MOST and value > AT_MOST[path]:
            raise HoneError(f"{path} is {value}: it must be at most {AT_MOST[path]:g}")


def _validate_together(recipe: Recipe) -> None:
    for wrong, remedy in (*_naming(recipe), *_shape(recipe), *_amounts(recipe)):
        if wrong:
            raise HoneError(remedy)


def _naming(recipe: Recipe) -> list[tuple[bool, str]]:
    model, spec, best = recipe.model, recipe.train, recipe.save.best
    evaluated = spec.eval_every or spec.steps  # steps between evaluations
    return [
        (not recipe.name or "/" in recipe.name, f"name is {recipe.name!r}: it must be a plain word, it names a folder"),
        (not recipe.out, "out is empty: set the folder to write the run to, as in out=runs/{name}"),
        (not recipe.data, "there is no data: set data=FILE.jsonl"),
        (
            not model.path and not model.tokenizer,
            "model.path is empty, so the model is fresh: set model.tokenizer=FOLDER",
        ),
        (
            spec.eval_every > 0 and not recipe.eval_data,
            "train.eval_every is set but there is no eval_data: set eval_data, or train.eval_every=0",
        ),
        (
            best.startswith("eval/")
            and (not recipe.eval_data or recipe.save.every % evaluated > 0 or evaluated > 1 > recipe.save.every),
            f"save.best is {best}, which not every saved step has: "
            "set eval_data, and save.every and train.eval_every to the same number of steps",
        ),
        (recipe.lora.rank > 0 and not recipe.lora.targets, "lora.targets is empty: use all-linear, or set lora.rank=0"),
        (
            bool(recipe.lora.path) and recipe.lora != LoraSpec(path=recipe.lora.path),
            "lora.path brings its own rank, alpha, targets and rslora: leave those out, or leave out lora.path",
        ),
    ]


def _shape(recipe: Recipe) -> list[tuple[bool, str]]:
    """Only a fresh model has its shape from the recipe."""
    m, sample = recipe.model, recipe.sample
    if m.path:
        return []
    return [
        (
            m.hidden_size % (2 * m.heads) > 0,
            f"model.hidden_size is {m.hidden_size}: use a multiple of {2 * m.heads} for {m.heads} heads",
        ),
        (m.heads % m.kv_heads > 0, f"model.kv_heads is {m.kv_heads}: it must divide the {m.heads} heads"),
        (
            recipe.online and sample.max_tokens >= m.context,
            f"sample.max_tokens is {sample.max_tokens}, which leaves no room for a prompt: "
            f"lower it, or raise model.context ({m.context})",
        ),
    ]


def _amounts(recipe: Recipe) -> list[tuple[bool, str]]:
    train, optim = recipe.train, recipe.optim
    repeats = train.epochs > 1 or train.minibatches > 1
    return [
        (
            train.rollback > 0 and (not recipe.save.every or recipe.save.keep < 2),
            "train.rollback goes back to a checkpoint of save.every: set save.every, and save.keep to 2 or more",
        ),
        (
            bool(recipe.process.path) and (not recipe.online or train.lag > 0),
            "process.path scores what an online run samples, without a lag: leave it out, or set train.lag=0",
        ),
        (not recipe.online and train.lag > 0, f"{recipe.algo_name} is offline and samples nothing: set train.lag=0"),
        (
            not recipe.online and repeats,
            f"{recipe.algo_name} is offline: leave train.epochs and train.minibatches at 1, and set train.steps",
        ),
        (
            recipe.online and train.tokens > 0,
            f"train.tokens cuts rows that are read, {recipe.algo_name} samples its own: set train.micro_tokens",
        ),
        (
            recipe.online and recipe.read.overlong == "truncate",
            "read.overlong is truncate, but a prompt is never cut: set read.overlong=drop",
        ),
        (
            recipe.algo_name == "kto" and train.tokens > 0,
            "kto compares each row with the next, so a step needs two: set train.prompts and train.micro_tokens",
        ),
        (not all(0 <= beta < 1 for beta in optim.betas), f"optim.betas is {optim.betas}: each must be in [0, 1)"),
        (
            train.mismatch != "none" and train.mismatch_cap < 1,
            f"train.mismatch_cap is {train.mismatch_cap}: it must be at least 1, the ratio of two equal policies",
        ),
    ]


def _validate_reward(recipe: Recipe) -> None:
    reward = recipe.reward
    check_reward(reward)
    check_parts(recipe.parts, reward)
    if isinstance(reward, Mapping) and recipe.online and not any(reward.values()) and not recipe.teacher:
        raise HoneError("there is no reward: set reward.math=1.0, or reward=FILE.py:function")


def _validate_columns(columns: Mapping[str, str]) -> None:
    for name, theirs in columns.items():
        if name not in COLUMNS:
            raise unknown("column", name, COLUMNS, owner="read.columns")
        if not theirs:
            raise HoneError(f"read.columns.{name} is empty: give the name of a column of the data")
