"""TRL's side: its trainers as a competent user sets them, and the turns they take.

No gradient checkpointing unless it is asked for, no logs, one batch a forward pass, the fused optimiser, no workers for
its data. Beside a model that computes in bfloat16 its weights, gradients and moments are in float32 under autocast, as
Hone's copies are; weights that stay frozen beside adapters are in bfloat16 on both sides.
"""

import atexit
import logging
import os
import tempfile
from collections.abc import Callable
from typing import Any

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import datasets
import torch
import transformers
from peft import LoraConfig
from trl import __version__ as version
from trl.trainer.dpo_config import DPOConfig
from trl.trainer.dpo_trainer import DPOTrainer
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.reward_config import RewardConfig
from trl.trainer.reward_trainer import RewardTrainer
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer

from benchmarks.learning.turns import Clock, Took, median, now, since
from benchmarks.learning.work import (
    ALPHA,
    PAD,
    RANK,
    STOP,
    Offline,
    Online,
    Subject,
    prompts_of,
    rows_of,
    text_of,
    variety,
    words,
)
from benchmarks.sampling.cpu import twin
from hone.model.decoder import Decoder

FOLDER = tempfile.TemporaryDirectory()
atexit.register(FOLDER.cleanup)
NAME = f"TRL {version}"
RATE = 1e-6

datasets.disable_progress_bars()
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
logging.getLogger("trl").setLevel(logging.ERROR)

Make = Callable[[int], Any]  # steps -> a trainer that takes so many


def tokenizer(vocab: int, *, stop: int) -> transformers.PreTrainedTokenizerFast:
    special = {"pad_token": f"w{PAD}", "eos_token": f"w{stop}", "unk_token": f"w{PAD}"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words(vocab), **special)


def common(steps: int, decoder: Decoder, *, half: bool = False, recompute: bool = False) -> dict[str, Any]:
    """half: without autocast, in the precision of the weights; recompute: with gradient checkpointing."""
    mixed = decoder.lm_head.weight.dtype == torch.bfloat16 and not half
    return {
        "output_dir": FOLDER.name, "report_to": [], "use_cpu": not torch.cuda.is_available(), "bf16": mixed,
        "gradient_checkpointing": recompute, "save_strategy": "no", "logging_strategy": "no", "disable_tqdm": True,
        "max_steps": steps, "learning_rate": RATE, "lr_scheduler_type": "constant", "optim": "adamw_torch_fused",
        "dataloader_num_workers": 0, "dataloader_pin_memory": torch.cuda.is_available(), "seed": 0,
    }  # fmt: skip


def model_of(subject: Subject, decoder: Decoder, *, half: bool = False) -> Any:
    """The decoder in transformers, in float32; half: in the decoder's precision, as weights are that stay frozen."""
    weight = decoder.lm_head.weight
    with weight.device:
        model = twin(decoder)
    return model.to(weight.dtype if half or subject.lora else torch.float32)


def saved(model: Any) -> Any:
    """The model as loaded from a folder, from which TRL reads its reference."""
    model.config.eos_token_id = model.generation_config.eos_token_id = None  # every completion has its full length
    folder = tempfile.mkdtemp(dir=FOLDER.name)
    model.save_pretrained(folder)
    return transformers.LlamaForCausalLM.from_pretrained(folder, dtype=model.dtype)


def adapters(subject: Subject, **rest: Any) -> LoraConfig | None:
    if not subject.lora:
        return None
    return LoraConfig(r=RANK, lora_alpha=int(ALPHA), lora_dropout=0.0, target_modules="all-linear", **rest)


def grpo(subject: Subject, work: Online, *, micro: int = 0, half: bool = False) -> Make:
    """GRPOTrainer with the group's z-score, the mean by row and the same beta; micro: rows in memory, if not all; half:
    weights and moments in the model's own precision."""
    parts = work.rows // micro if micro else 1

    def reward(completions: list[str], **_: Any) -> list[float | None]:
        return [variety(text) for text in completions]

    def make(steps: int) -> Any:
        decoder = subject.decoder()
        vocab = decoder.config.vocab_size
        args = GRPOConfig(
            **common(steps, decoder, half=half), per_device_train_batch_size=work.rows // work.minibatches // parts,
            gradient_accumulation_steps=parts, steps_per_generation=work.minibatches * parts,
            num_generations=work.group,
            max_completion_length=work.completion, beta=work.beta, loss_type="grpo", temperature=1.0, top_k=0,
        )  # fmt: skip
        rows = datasets.Dataset.from_list([{"prompt": text_of(tokens)} for tokens in prompts_of(work, vocab)])
        return GRPOTrainer(
            saved(model_of(subject, decoder, half=half)), [reward], args=args, train_dataset=rows,
            peft_config=adapters(subject), processing_class=tokenizer(vocab, stop=vocab),
        )  # fmt: skip

    return make


def pairs(work: Offline, vocab: int) -> datasets.Dataset:
    """The trainers add the stop token to each answer."""
    return datasets.Dataset.from_list(
        [
            {"prompt": text_of(w.prompt) + " ", "chosen": text_of(w.chosen[:-1]), "rejected": text_of(w.rejected[:-1])}
            for w in rows_of(work, vocab)
        ]
    )


def dpo(subject: Subject, work: Offline) -> Make:
    def make(steps: int) -> Any:
        decoder = subject.decoder()
        vocab, own = decoder.config.vocab_size, adapters(subject)
        args = DPOConfig(**common(steps, decoder), per_device_train_batch_size=work.groups, beta=0.1)
        return DPOTrainer(
            model_of(subject, decoder), ref_model=None if own else model_of(subject, decoder), args=args,
            train_dataset=pairs(work, vocab), peft_config=own, processing_class=tokenizer(vocab, stop=STOP),
        )  # fmt: skip

    return make


def sft(subject: Subject, work: Offline, *, recompute: bool = False) -> Make:
    """SFTTrainer; recompute: with gradient checkpointing, which is its default."""

    def make(steps: int) -> Any:
        decoder = subject.decoder()
        vocab = decoder.config.vocab_size
        args = SFTConfig(**common(steps, decoder, recompute=recompute), per_device_train_batch_size=work.groups)
        rows = pairs(work, vocab).rename_column("chosen", "completion").remove_columns("rejected")
        return SFTTrainer(
            model_of(subject, decoder), args=args, train_dataset=rows, peft_config=adapters(subject),
            processing_class=tokenizer(vocab, stop=STOP),
        )  # fmt: skip

    return make


def reward_model(subject: Subject, work: Offline) -> Make:
    def make(steps: int) -> Any:
        decoder = subject.decoder()
        vocab, base = decoder.config.vocab_size, model_of(subject, decoder)
        config = transformers.LlamaConfig(**{**base.config.to_dict(), "num_labels": 1, "pad_token_id": PAD})
        with decoder.lm_head.weight.device:
            model = transformers.LlamaForSequenceClassification(config)
        model.model.load_state_dict(base.model.state_dict())
        args = RewardConfig(**common(steps, decoder), per_device_train_batch_size=work.groups)
        return RewardTrainer(
            model, args=args, train_dataset=pairs(work, vocab), processing_class=tokenizer(vocab, stop=STOP),
            peft_config=adapters(subject, task_type="SEQ_CLS", modules_to_save=["score"]),
        )  # fmt: skip

    return make


METHODS = {"dpo": dpo, "sft": sft, "reward_model": reward_model}


class Laps(transformers.TrainerCallback):
    """Tells the clock when training begins, and of each iteration of so many updates."""

    def __init__(self, clock: Clock, updates: int) -> None:
        self.clock, self.updates = clock, updates

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.clock.begin()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if not state.global_step % self.updates:
            self.clock.lap()


def train(make: Make, clock: Clock, *, updates: int = 1) -> None:
    """All iterations, of so many updates each."""
    trainer = make(clock.iterations * updates)
    trainer.add_callback(Laps(clock, updates))
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    assert clock.done == clock.iterations, "an iteration was not counted"


def in_turns(
    make: Make, other: Callable[[], object], *, turns: int, updates: int = 1, warm: int = 1
) -> tuple[Took, Took]:
    """(ours, TRL's) medians of one iteration in this process, where they share a GPU's memory; one each, in turns."""
    ours, theirs = list[Took](), list[Took]()

    def others(taken: Took | None) -> None:
        if taken is None:
            return
        theirs.append(taken)
        began = now()
        other()
        ours.append(since(began, 1))

    train(make, Clock(others, turns=turns, stretch=1, warm=warm), updates=updates)
    return median(ours, warm=warm), median(theirs, warm=warm)
