"""Which faults of Hone's own source `hone check` must see at step 0, too."""

from benchmarks.catalogue.fault import Sight

LORA = ("lora.rank=4",)

SEEN: dict[str, Sight] = {
    "temperature left out of the learner": Sight(settings=("sample.temperature=0.7",), finding="log-probs agree"),
    "temperature left out of the learner's logits": Sight(settings=("sample.temperature=0.7",), finding="temperature"),
    "the reference at the wrong temperature": Sight(settings=("sample.temperature=0.7",), finding="reference"),
    "the log-prob of the input, not of the target": Sight(finding="log-probs agree"),
    "the reference is the policy itself": Sight(finding="reference"),
    "the reference under LoRA has the adapter on": Sight(settings=LORA, finding="reference"),
    "the gradient is not clipped": Sight(settings=("optim.clip_norm=0.0001",), finding="update in force"),
    "weight decay on nothing": Sight(settings=("optim.weight_decay=0.1",), finding="optimiser"),
    "the loss is divided by the rows of the micro-batch": Sight(finding="batch cut"),
    "the mask is shifted by one": Sight(recipe="sft", finding="padding"),
    "the sampler's log-prob is recorded one token late": Sight(finding="log-probs agree"),
    "the stop token of a chat turn is dropped from the mask": Sight(recipe="sft", finding="stop token"),
    "padding is trained on": Sight(recipe="sft", finding="padding"),
    "packing without the block mask": Sight(finding="layouts"),
    "positions are not reset in packing": Sight(finding="layouts"),
    "all samples of a group have the same random numbers": Sight(finding="groups differ"),
    "the rollout never gets the weights": Sight(finding="published weights"),
    "the adapter is off in the sampler": Sight(settings=LORA, finding="published weights"),
    "the sampler records log-probs at temperature 1": Sight(
        settings=("sample.temperature=0.7",), finding="log-probs agree"
    ),
    "prompts are paired with another prompt's answers": Sight(finding="completions"),
    "a task is paired with the next task's completion": Sight(finding="completions"),
    "resume resets the optimiser": Sight(finding="checkpoint"),
    "resume takes the start's weights": Sight(finding="checkpoint"),
}
