"""DPO of SmolLM2-135M-Instruct on preference pairs; needs `hone fetch smollm2-135m` and pairs.

The pairs are instruct_pref, polite and impolite answers, from the folder that HONE_DATA names. Others fit as they are:
data=hh_harmless, data=hf:trl-lib/ultrafeedback_binarized:train, or a file with prompt, chosen and rejected.
"""

from hone import Choice, LoraSpec, ModelSpec, OptimSpec, ReadSpec, Recipe, SaveSpec, TrainSpec


def recipe() -> Recipe:
    """Two epochs of 1,100 pairs, 16 a step, an adapter of rank 16."""
    return Recipe(
        name="dpo_smollm2",
        model=ModelSpec(path="smollm2-135m"),
        data="instruct_pref:pairs",
        algo=Choice("dpo", {"beta": 0.1}),
        lora=LoraSpec(rank=16, alpha=32.0),
        train=TrainSpec(steps=140, prompts=16, micro_tokens=16_384),
        read=ReadSpec(overlong="drop"),
        optim=OptimSpec(lr=5e-5, warmup=10, schedule="cosine"),
        save=SaveSpec(every=50),
    )
