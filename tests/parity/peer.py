"""TRL's side: its real trainers around a tiny Llama, and their own losses on tensors that we choose.

Importing this module needs `trl`, which only the tests depend on.
"""

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # before trl is imported: ORPO and CPO live there

import datasets
import torch
import trl
from torch import Tensor
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer
from trl.trainer.utils import add_fused_lm_head

from hone.types import Batch
from tests.parity.house import Result, grad, gradients
from tests.parity.llama import COMMON, language_model, reward_model, tokenizer
from tests.parity.rows import GROUP, LIMIT, PAD, Row

datasets.disable_progress_bars()
logging.getLogger("trl").setLevel(logging.ERROR)


def _dataset(**columns: Any) -> datasets.Dataset:
    return datasets.Dataset.from_list([columns] * 8)


@cache
def dpo() -> Any:
    rows = _dataset(prompt="w1 w2 ", chosen="w3", rejected="w4")
    args = trl.DPOConfig(**COMMON)
    return trl.DPOTrainer(
        language_model(0), ref_model=language_model(1), args=args, train_dataset=rows, processing_class=tokenizer()
    )


@cache
def kto() -> Any:
    both = [{"prompt": "w1 w2 ", "completion": "w3", "label": bool(i % 2)} for i in range(8)]
    return trl.KTOTrainer(
        language_model(0), ref_model=language_model(1), args=trl.KTOConfig(**COMMON),
        train_dataset=datasets.Dataset.from_list(both), processing_class=tokenizer(),
    )  # fmt: skip


@cache
def orpo() -> Any:
    rows = _dataset(prompt="w1 w2 ", chosen="w3", rejected="w4")
    args = ORPOConfig(**COMMON, remove_unused_columns=False)
    return ORPOTrainer(language_model(0), args=args, train_dataset=rows, processing_class=tokenizer())


@cache
def cpo() -> Any:
    rows = _dataset(prompt="w1 w2 ", chosen="w3", rejected="w4")
    args = CPOConfig(**COMMON, remove_unused_columns=False, loss_type="simpo", cpo_alpha=0.0)
    return CPOTrainer(language_model(0), args=args, train_dataset=rows, processing_class=tokenizer())


@cache
def reward() -> Any:
    rows = _dataset(prompt="w1 w2 ", chosen="w3", rejected="w4")
    args = trl.RewardConfig(**COMMON)
    return trl.RewardTrainer(reward_model(), args=args, train_dataset=rows, processing_class=tokenizer())


def _no_reward(**columns: Any) -> list[float]:
    return [0.0] * len(columns["prompts"])


def _with_reference(trainer: Any, temperature: float) -> Any:
    trainer.ref_model = language_model(1)
    add_fused_lm_head(trainer.ref_model, temperature=temperature)
    return trainer


@cache
def grpo(temperature: float = 1.0) -> Any:
    args = trl.GRPOConfig(
        **COMMON, num_generations=GROUP, max_completion_length=LIMIT, beta=0.0, temperature=temperature
    )
    trainer = trl.GRPOTrainer(
        language_model(0), [_no_reward], args=args, train_dataset=_dataset(prompt="w1"), processing_class=tokenizer()
    )
    return _with_reference(trainer, temperature)


@cache
def rloo() -> Any:
    args = trl.RLOOConfig(**COMMON, num_generations=GROUP, max_completion_length=LIMIT, beta=0.0)
    trainer = trl.RLOOTrainer(
        language_model(0), [_no_reward], args=args, train_dataset=_dataset(prompt="w1"), processing_class=tokenizer()
    )
    return _with_reference(trainer, 1.0)


def fresh_epsilons() -> dict[str, float]:
    """The clip of a GRPOTrainer that was given `epsilon` alone."""
    return {"epsilon_low": grpo().epsilon_low, "epsilon_high": grpo().epsilon_high}


@contextmanager
def settings(trainer: Any, **values: Any) -> Iterator[None]:
    """The trainer with these attributes; a name with a dot, written `args__x`, is one of its arguments."""
    places = {name: (trainer.args if name.startswith("args__") else trainer) for name in values}
    short = {name: name.removeprefix("args__") for name in values}
    before = {name: getattr(places[name], short[name], None) for name in values}
    for name, value in values.items():
        setattr(places[name], short[name], value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(places[name], short[name], value)


def accumulate(trainer: Any, parts: Sequence[dict[str, Any]], **values: Any) -> Result:
    """Loss and gradient over the micro-batches of one optimiser step, as transformers' Trainer adds them up."""
    trainer.model.zero_grad()
    total = 0.0
    share = 1.0 if isinstance(trainer, trl.GRPOTrainer) else 1 / len(parts)  # GRPO divides by itself
    with settings(trainer, current_gradient_accumulation_steps=len(parts), **values):
        for part in parts:
            loss = share * trainer.compute_loss(trainer.model, dict(part))
            loss.backward()
            total += float(loss.detach())
    return Result(loss=total, grads=gradients(trainer.model))


# --- the same rows in TRL's layouts ---


def completions(rows: Sequence[Row], batch: Batch, **columns: Tensor) -> dict[str, Tensor]:
    """GRPO's and RLOO's table: prompts padded on the left, completions on the right."""
    width = max(len(row.completion) for row in rows)
    left = max(len(row.prompt) for row in rows)
    prompt = torch.tensor([[PAD] * (left - len(r.prompt)) + r.prompt for r in rows])
    seen = torch.tensor([[0] * (left - len(r.prompt)) + [1] * len(r.prompt) for r in rows])
    written = torch.tensor([r.completion + [PAD] * (width - len(r.completion)) for r in rows])
    mask = torch.tensor([[1] * len(r.completion) + [0] * (width - len(r.completion)) for r in rows])
    table = {"prompt_ids": prompt, "prompt_mask": seen, "completion_ids": written, "completion_mask": mask}
    table["num_items_in_batch"] = mask.sum()
    return table | {name: aligned(x, batch, mask) if x.ndim == 2 else x for name, x in columns.items()}


def aligned(x: Tensor, batch: Batch, mask: Tensor) -> Tensor:
    """A column of Hone's table where TRL has it: the k-th trained token of a row in column k."""
    out = x.new_zeros(mask.shape)
    out[mask.bool()] = x[batch.mask]
    return out


def cut(table: dict[str, Tensor], *, rows: int) -> list[dict[str, Tensor]]:
    """The table in micro-batches of `rows` rows; the count of the whole step's tokens goes with each."""
    size = len(table["prompt_ids"])
    return [{name: x if x.ndim == 0 else x[i : i + rows] for name, x in table.items()} for i in range(0, size, rows)]


def pair_tables(found: Sequence[Row], *, pairs: int = 4) -> list[dict[str, Any]]:
    """DPO's batches by TRL's own collator, `pairs` at a time: all chosen rows, then all rejected ones."""
    both = [
        {"prompt_ids": w.prompt, "chosen_ids": w.completion, "rejected_ids": x.completion}
        for w, x in zip(found[::2], found[1::2], strict=True)
    ]
    return [dpo().data_collator(both[i : i + pairs]) for i in range(0, len(both), pairs)]


def labelled_pair_table(found: Sequence[Row], trainer: Any) -> dict[str, Any]:
    """ORPO's and CPO's batch by TRL's own collator; labels are -100 on the prompt."""
    both = list[dict[str, list[int]]]()
    for pair in zip(found[::2], found[1::2], strict=True):
        columns = dict[str, list[int]]()
        for name, row in zip(("chosen", "rejected"), pair, strict=True):
            ids = [*row.prompt, *row.completion]
            columns |= {f"{name}_input_ids": ids, f"{name}_attention_mask": [1] * len(ids)}
            columns[f"{name}_labels"] = [-100] * len(row.prompt) + row.completion
        both.append(columns)
    return trainer.data_collator(both)


def desirable_tables(found: Sequence[Row], labels: Sequence[float], *, shift: int, size: int = 8) -> list[dict]:
    """KTO's batches by TRL's own collator; row i's mismatched completion is that of row i + shift of its batch."""
    tables = list[dict]()
    for start in range(0, len(found), size):
        part = found[start : start + size]
        tables.append(
            kto().data_collator(
                [
                    {
                        "prompt_ids": row.prompt,
                        "completion_ids": row.completion,
                        "KL_completion_ids": part[(i + shift) % len(part)].completion,
                        "label": bool(labels[start + i]),
                    }
                    for i, row in enumerate(part)
                ]
            )
        )
    return tables


def scored_table(found: Sequence[Row], margins: Sequence[float]) -> dict[str, Any]:
    """The reward model's batch by TRL's own collator, the margins in float64."""
    both = [
        {"chosen_ids": w.prompt + w.completion, "rejected_ids": x.prompt + x.completion, "margin": m}
        for w, x, m in zip(found[::2], found[1::2], margins, strict=True)
    ]
    table = reward().data_collator(both)
    return {**table, "margin": torch.tensor(margins, dtype=torch.float64)}


# --- TRL's own losses on log-probs that are handed in: what its models would give is given ---


def group_on_logp(trainer: Any, values: Tensor, batch: Batch, table: dict[str, Tensor], **changed: Any) -> Result:
    """GRPO's or RLOO's loss with a leaf in place of the model's log-probs."""
    leaf = values.detach().clone().requires_grad_()
    given = aligned(leaf, batch, table["completion_mask"])

    def forward(*_: Any, **__: Any) -> tuple[Tensor, Tensor, None]:
        return given, torch.zeros_like(given), None

    changed = {"_get_per_token_logps_and_entropies": forward, "current_gradient_accumulation_steps": 1, **changed}
    with settings(trainer, **changed):
        loss = trainer.compute_loss(trainer.model, dict(table))
    loss.backward()
    return Result(loss=float(loss.detach()), grads={"logp": grad(leaf)})


def stand_in(log_probs: dict[int, Tensor]) -> Any:
    """A language model that gives these log-probs, chosen by the address of the ids it is called with."""

    def forward(*, input_ids: Tensor, **_: Any) -> SimpleNamespace:
        x = log_probs[input_ids.data_ptr()]
        zero = torch.zeros_like(x)
        return SimpleNamespace(log_probs=x, entropy=zero, mean_logits=zero, is_top1=zero.bool())

    return forward


def spread(x: Tensor, batch: Batch, mask: Tensor, *, order: Tensor | None = None) -> Tensor:
    """Hone's [B, T] column in TRL's [B, S-1] places; `order`: TRL's rows as indices of Hone's."""
    order = torch.arange(len(batch)) if order is None else order
    return x.new_zeros(mask.shape).masked_scatter(mask.bool(), x[order][batch.mask[order]])
