"""TRL's side: its trainers as a competent user sets them, and turns taken with Hone between their steps.

No gradient checkpointing, no logs, one batch a forward pass, the fused optimiser, no workers for its data.
"""

import atexit
import logging
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
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

FOLDER = tempfile.TemporaryDirectory()
atexit.register(FOLDER.cleanup)
NAME = f"TRL {version}"
RATE = 1e-6

datasets.disable_progress_bars()
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
logging.getLogger("trl").setLevel(logging.ERROR)

Took = tuple[float, float]  # seconds, and seconds of all cores: on a busy machine only the second can be compared
Make = Callable[[int], Any]  # steps -> a trainer that takes so many


def tokenizer(vocab: int, *, stop: int) -> transformers.PreTrainedTokenizerFast:
    special = {"pad_token": f"w{PAD}", "eos_token": f"w{stop}", "unk_token": f"w{PAD}"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words(vocab), **special)


def common(steps: int) -> dict[str, Any]:
    return {
        "output_dir": FOLDER.name, "report_to": [], "use_cpu": not torch.cuda.is_available(), "bf16": False,
        "gradient_checkpointing": False, "save_strategy": "no", "logging_strategy": "no", "disable_tqdm": True,
        "max_steps": steps, "learning_rate": RATE, "lr_scheduler_type": "constant", "optim": "adamw_torch_fused",
        "dataloader_num_workers": 0, "dataloader_pin_memory": torch.cuda.is_available(), "seed": 0,
    }  # fmt: skip


def saved(model: Any, dtype: torch.dtype) -> Any:
    """The model as loaded from a folder, from which TRL reads its reference."""
    model.config.eos_token_id = model.generation_config.eos_token_id = None  # every completion has its full length
    folder = tempfile.mkdtemp(dir=FOLDER.name)
    model.save_pretrained(folder)
    return transformers.LlamaForCausalLM.from_pretrained(folder, dtype=dtype)


def adapters(subject: Subject, **rest: Any) -> LoraConfig | None:
    if not subject.lora:
        return None
    return LoraConfig(r=RANK, lora_alpha=int(ALPHA), lora_dropout=0.0, target_modules="all-linear", **rest)


def grpo(subject: Subject, work: Online, *, micro: int = 0) -> Make:
    """GRPOTrainer with the group's z-score, the mean by row and the same beta; micro: rows in memory, if not all."""
    parts = work.rows // micro if micro else 1

    def reward(completions: list[str], **_: Any) -> list[float | None]:
        return [variety(text) for text in completions]

    def make(steps: int) -> Any:
        decoder = subject.decoder()
        vocab = decoder.config.vocab_size
        args = GRPOConfig(
            **common(steps), per_device_train_batch_size=work.rows // work.minibatches // parts,
            gradient_accumulation_steps=parts, steps_per_generation=work.minibatches * parts,
            num_generations=work.group,
            max_completion_length=work.completion, beta=work.beta, loss_type="grpo", temperature=1.0, top_k=0,
        )  # fmt: skip
        rows = datasets.Dataset.from_list([{"prompt": text_of(tokens)} for tokens in prompts_of(work, vocab)])
        return GRPOTrainer(
            saved(twin(decoder), decoder.lm_head.weight.dtype), [reward], args=args, train_dataset=rows,
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
        args = DPOConfig(**common(steps), per_device_train_batch_size=work.groups, beta=0.1)
        return DPOTrainer(
            twin(decoder), ref_model=None if own else twin(decoder), args=args, train_dataset=pairs(work, vocab),
            peft_config=own, processing_class=tokenizer(vocab, stop=STOP),
        )  # fmt: skip

    return make


def sft(subject: Subject, work: Offline) -> Make:
    def make(steps: int) -> Any:
        decoder = subject.decoder()
        vocab = decoder.config.vocab_size
        args = SFTConfig(**common(steps), per_device_train_batch_size=work.groups)
        rows = pairs(work, vocab).rename_column("chosen", "completion").remove_columns("rejected")
        return SFTTrainer(
            twin(decoder), args=args, train_dataset=rows, peft_config=adapters(subject),
            processing_class=tokenizer(vocab, stop=STOP),
        )  # fmt: skip

    return make


def reward_model(subject: Subject, work: Offline) -> Make:
    def make(steps: int) -> Any:
        decoder = subject.decoder()
        vocab, base = decoder.config.vocab_size, twin(decoder)
        config = transformers.LlamaConfig(**{**base.config.to_dict(), "num_labels": 1, "pad_token_id": PAD})
        model = transformers.LlamaForSequenceClassification(config)
        model.model.load_state_dict(base.model.state_dict())
        args = RewardConfig(**common(steps), per_device_train_batch_size=work.groups)
        return RewardTrainer(
            model, args=args, train_dataset=pairs(work, vocab), processing_class=tokenizer(vocab, stop=STOP),
            peft_config=adapters(subject, task_type="SEQ_CLS", modules_to_save=["score"]),
        )  # fmt: skip

    return make


METHODS = {"dpo": dpo, "sft": sft, "reward_model": reward_model}


def now() -> Took:
    return time.perf_counter(), time.process_time()


def since(start: Took, end: Took, number: int) -> Took:
    """Of each of so many iterations."""
    return (end[0] - start[0]) / number, (end[1] - start[1]) / number


class Turns(transformers.TrainerCallback):
    """Times so many of the trainer's iterations at a stretch, and then as many of the other side's."""

    def __init__(self, other: Callable[[], object], *, updates: int, stretch: int) -> None:
        self.other, self.updates, self.stretch = other, updates, stretch
        self.peer, self.ours = list[Took](), list[Took]()
        self.began = now()

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.began = now()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step % (self.updates * self.stretch):
            return
        between = now()
        self.peer.append(since(self.began, between, self.stretch))
        for _turn in range(self.stretch):
            self.other()
        self.began = now()
        self.ours.append(since(between, self.began, self.stretch))


def in_turns(
    make: Make, other: Callable[[], object], *, turns: int, updates: int = 1, stretch: int = 1
) -> tuple[Took, Took]:
    """(ours, TRL's) medians of one iteration, after a turn that warms both up.

    stretch: iterations of a turn. Of small models several: one after the other is how they are trained, and the first
    after the other side's finds nothing of its own in the caches.
    """
    trainer = make((turns + 1) * updates * stretch)
    clock = Turns(other, updates=updates, stretch=stretch)
    trainer.add_callback(clock)
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    assert len(clock.peer) == turns + 1, "an iteration was not counted"
    return _median(clock.ours), _median(clock.peer)


def _median(taken: Sequence[Took]) -> Took:
    wall, cpu = zip(*taken[1:], strict=True)
    return statistics.median(wall), statistics.median(cpu)
