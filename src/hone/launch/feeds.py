"""From a recipe to its data: problems or groups of rows, in order, or in the endless order of a run."""

from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

from hone.algo import Algorithm
from hone.algo.prefer import score_bce
from hone.config.recipe import Recipe
from hone.data.feed import assemble
from hone.data.feed.assemble import Loaded
from hone.data.feed.locate import Reading, locate
from hone.data.feed.source import Source
from hone.data.feed.token_batches import WINDOW, TokenBatches, check_fits
from hone.data.rows.columns import RowKind, has_kind
from hone.data.rows.convert import Grouper, RowCounts, Tasker
from hone.data.rows.pairs import Use
from hone.data.text.tokenizer import Tokenizer
from hone.errors import HoneError
from hone.types import Group, Task

# the kinds of rows that an offline algorithm reads; one that reads pairs is recognised by its unit
KINDS = {
    "pretrain": (RowKind.TEXT,),
    "sft": (RowKind.COMPLETION, RowKind.MESSAGES),
    "kto": (RowKind.LABELLED,),
    "pointwise_reward_model": (RowKind.SCORED, RowKind.LABELLED),
    "process_reward_model": (RowKind.STEPS,),
}


def reading(recipe: Recipe, algo: Algorithm, vocabulary: Tokenizer) -> Reading:
    """How the recipe's data is read."""
    r = recipe.read
    chat = r.chat == "always" or (r.chat == "auto" and vocabulary.chat_template is not None)
    plain = {
        name: getattr(r, name) for name in ("skip_bad", "overlong", "stream", "buffer", "chunk", "turns", "columns")
    }
    shares = any(term is score_bce for _, term in algo.loss)
    kinds = _kinds(recipe)
    return Reading(
        **plain, chat=chat, shares=shares, kinds=kinds, pairs=_use_of_pairs(recipe, kinds), reader=recipe.algo_name
    )


def _use_of_pairs(recipe: Recipe, kinds: tuple[RowKind, ...]) -> Use:
    """How an algorithm uses a pair: its prompt, both replies as labelled rows, the chosen reply alone, or the pair."""
    if recipe.online:
        return "prompts"
    if RowKind.LABELLED in kinds:
        return "labels"
    return "chosen" if RowKind.COMPLETION in kinds else "pairs"


def load_rows(data: str | Sequence[Any], how: Reading) -> list[Any]:
    """The rows in Hone's columns. If the data stays on the disk, only its first rows."""
    rows = list[Any]()
    for part in locate(data, how):
        most = assemble.PREVIEW if assemble.is_streamed(part, how) else None
        loaded = [row for row, _ in islice(assemble.plain_rows(part, how, RowCounts()), most)]
        rows += [row for row in loaded if not how.skip_bad or has_kind(row, how.kinds)]
    return rows


def is_streamed(data: str | Sequence[Any], how: Reading) -> bool:
    """Whether any of the data stays on the disk."""
    return any(assemble.is_streamed(part, how) for part in locate(data, how))


def tasks(
    data: str | Sequence[Any], vocabulary: Tokenizer, *, max_tokens: int, how: Reading | None = None
) -> list[Task]:
    """Problems whose prompts leave room for a completion, in order."""
    how = how or Reading(chat=vocabulary.chat_template is not None, pairs="prompts", settings=False)
    parts = locate(data, how)
    return [task for part in parts for task in assemble.convert_rows(part, how, _tasker(vocabulary, how, max_tokens))]


def groups(
    data: str | Sequence[Any], vocabulary: Tokenizer, *, context: int, how: Reading | None = None
) -> list[Group]:
    """Rows that are trained on, in order. context 0: rows of any length."""
    how = how or Reading(chat=vocabulary.chat_template is not None, settings=False)
    parts = locate(data, how)
    return [group for part in parts for group in assemble.convert_rows(part, how, _grouper(vocabulary, how, context))]


def feed(recipe: Recipe, algo: Algorithm, vocabulary: Tokenizer, *, context: int) -> Loaded:
    """The data of a run in its endless order: problems online, groups of rows offline."""
    how = reading(recipe, algo, vocabulary)
    if algo.online:
        make = partial(_tasker, vocabulary, how, context - 1)
        return assemble.load(recipe.data, how, make, seed=recipe.seed)
    if not isinstance(recipe.data, str) and any(isinstance(row, Task) for row in recipe.data):
        raise HoneError(f"data has tasks, {recipe.algo_name} reads rows: write each as {{column: value}}")
    loaded = assemble.load(recipe.data, how, partial(_grouper, vocabulary, how, context), seed=recipe.seed)
    return _batch_by_tokens(recipe, loaded) if recipe.train.tokens else loaded


def _tasker(vocabulary: Tokenizer, how: Reading, max_tokens: int) -> Tasker:
    plain = {name: getattr(how, name) for name in ("overlong", "skip_bad", "settings")}
    return Tasker(tokenizer=vocabulary, max_tokens=max_tokens, **plain)


def _grouper(vocabulary: Tokenizer, how: Reading, context: int) -> Grouper:
    plain = {name: getattr(how, name) for name in ("overlong", "skip_bad", "turns", "shares", "reader", "settings")}
    return Grouper(tokenizer=vocabulary, max_tokens=context, expected=how.kinds, **plain)


def _kinds(recipe: Recipe) -> tuple[RowKind, ...]:
    """The kinds that an offline algorithm reads; none: any."""
    if recipe.online:
        return ()
    return KINDS.get(recipe.algo_name, (RowKind.PREFERENCE,) if recipe.paired else ())


def _batch_by_tokens(recipe: Recipe, loaded: Loaded) -> Loaded:
    """Batches by tokens. A window is no larger than the data, so that small data comes in whole epochs."""
    inner = loaded.feed
    if isinstance(inner, Source):
        check_fits(copy(inner).take(len(inner)), tokens=recipe.train.tokens)
    window = min(WINDOW, len(inner)) if isinstance(inner, Source) else WINDOW
    return replace(loaded, feed=TokenBatches(inner, tokens=recipe.train.tokens, seed=recipe.seed, window=window))
