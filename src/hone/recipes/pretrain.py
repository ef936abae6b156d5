"""Pre-train a small decoder on a text file; needs the tokenizer and corpus that `hone demo` makes."""

from hone import Choice, ModelSpec, OptimSpec, Recipe, TrainSpec


def recipe() -> Recipe:
    """A decoder of about 1 M parameters, 250 steps."""
    return Recipe(
        name="pretrain",
        model=ModelSpec(tokenizer="runs/demo/tokenizer", heads=8, kv_heads=8, intermediate_size=384, context=64),
        data="runs/demo/data/corpus.jsonl",
        algo=Choice("pretrain"),
        train=TrainSpec(steps=250, prompts=128, micro_rows=128),
        optim=OptimSpec(lr=3e-3, warmup=20, schedule="cosine", weight_decay=0.01),
    )
