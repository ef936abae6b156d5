"""Pre-train a small decoder on Shakespeare; first: hone corpus clean FILE.txt --out runs/tinyshakespeare --vocab 1024.

FILE.txt is the dataset's input.txt; for plays add --languages off --no-quality --toxicity off --keep-copies.
"""

from hone import Choice, ModelSpec, OptimSpec, ReadSpec, Recipe, TrainSpec


def recipe() -> Recipe:
    """A decoder of about 2 M parameters on documents of about 1,000 characters, 400 steps."""
    return Recipe(
        name="pretrain_tinyshakespeare",
        model=ModelSpec(
            tokenizer="runs/tinyshakespeare/tokenizer",
            hidden_size=192,
            intermediate_size=512,
            layers=4,
            heads=6,
            kv_heads=6,
            context=512,
        ),
        data="tinyshakespeare",
        algo=Choice("pretrain"),
        train=TrainSpec(steps=400, prompts=32, micro_rows=32),
        read=ReadSpec(chunk=1000, overlong="truncate"),
        optim=OptimSpec(lr=2e-3, warmup=20, schedule="cosine", weight_decay=0.01),
    )
