"""What a step of a recipe does, in words. No torch here."""

from hone.errors import counted
from hone.recipe import PAIRED, Recipe, TrainSpec


def plan(recipe: Recipe) -> str:
    """What one step does, in one unit: rows."""
    train, each = recipe.train, recipe.sample.group
    if train.tokens:
        most = train.micro_tokens or train.tokens
        return f"at most {train.tokens} tokens = 1 update; micro-batches of at most {most} tokens"
    made = f"{counted(train.prompts, 'prompt')} x {counted(each, 'sample')} = {counted(train.prompts * each, 'row')}"
    if not recipe.online:
        each = 2 if recipe.algo_name in PAIRED or getattr(recipe.algo, "unit", 1) == 2 else 1
        made = f"{counted(train.prompts, 'pair')} = " if each == 2 else ""
        made += counted(train.prompts * each, "row")
    cut = f"{counted(train.epochs, 'epoch')} x {counted(train.minibatches, 'minibatch')}"
    updates = counted(train.epochs * train.minibatches, "update")
    return f"{made}; {cut} = {updates}; {_micro_batches(train, train.prompts * each)}"


def _micro_batches(train: TrainSpec, rows: int) -> str:
    """Minibatches are nearly equal parts of the rows, micro-batches slices of those."""
    if train.micro_tokens:
        return f"micro-batches of at most {train.micro_tokens} tokens"
    small, larger = divmod(rows, train.minibatches)
    sizes = [small + (i < larger) for i in range(train.minibatches)]
    number = train.epochs * sum(-(-size // train.micro_rows) for size in sizes)
    most = min(max(sizes), train.micro_rows)
    even = all(size % most == 0 for size in sizes)
    shown = f"{counted(most, 'row')} each" if even else f"at most {counted(most, 'row')}"
    return f"{counted(number, 'micro-batch')} of {shown}"
