"""Broken templates, tokenizers and masks, each with the finding it must give."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from check_world import World, decoder, failing, job_of, verdict, with_template, write_rows
from tokenizers import normalizers

from hone.check.text import misplaced, runs_of
from hone.data.collate import collate
from hone.data.feed.source import Source
from hone.data.rows import record as dataset
from hone.data.text.chat import DEFAULT_TEMPLATE
from hone.data.text.tokenizer import Tokenizer, train_bpe
from hone.model.formats.save import save_model
from hone.types import Rollout

NO_SYSTEM = DEFAULT_TEMPLATE.replace("{{- '<|'", "{%- if m.role == 'system' -%}{%- continue -%}{%- endif -%}{{- '<|'")
NOT_OPENED = DEFAULT_TEMPLATE.partition("{%- if add_generation_prompt")[0]
TWICE = "{{- bos_token ~ bos_token -}}" + DEFAULT_TEMPLATE


@pytest.mark.parametrize(("template", "seen"), [(NO_SYSTEM, "lacks the system's 'Be brief.'"), (NOT_OPENED, "open")])
def test_a_template_that_loses_something(world: World, tmp_path: Path, template: str, seen: str):
    path = with_template(world, template, tmp_path)
    job = job_of(world, "grpo", f"model.path={path}", f"data={world / 'chats.jsonl'}")
    assert failing(job) == {"template"}
    assert seen in verdict(job, "template")[1]


def test_plain_prompts_for_a_chat_model_are_noted(world: World):
    job = job_of(world, "grpo", f"model.path={world / 'chat'}")
    assert verdict(job, "template") == ("warn", "prompts are plain text, but the tokenizer has a chat template")


def test_a_first_token_written_twice(world: World, tmp_path: Path):
    path = with_template(world, TWICE, tmp_path)
    for algo, rows in (("grpo", "chats"), ("sft", "messages")):
        job = job_of(world, algo, f"model.path={path}", f"data={world / rows}.jsonl")
        assert failing(job) == {"first token"}
        assert verdict(job, "first token")[1] == "9 of 9 rows have <bos> twice in a row"


def test_a_stop_token_outside_the_mask(world: World, monkeypatch: pytest.MonkeyPatch):
    whole = dataset.encode_completion

    def without(*parts: Any, **_) -> tuple[list[int], list[bool]]:
        tokens, mask = whole(*parts)
        return tokens, [*mask[:-1], False]

    monkeypatch.setattr(dataset, "encode_completion", without)
    assert failing(job_of(world, "sft")) == {"stop token"}
    assert "9 of 9 trained turns do not end with <eos>" in verdict(job_of(world, "sft"), "stop token")[1]


def test_a_sampler_that_does_not_know_the_stop_token(world: World):
    job = job_of(world, "grpo")
    assert job.roller is not None
    job.roller.params = replace(job.roller.params, stop_ids=frozenset({77}))
    assert failing(job) == {"stop token"}


@pytest.mark.parametrize(
    ("trained", "seen"), [(True, "9 of 9 rows are trained on their prompt"), (False, "9 of 9 rows have no")]
)
def test_a_mask_that_is_full_or_empty(world: World, monkeypatch: pytest.MonkeyPatch, trained: bool, seen: str):
    whole = dataset.encode_completion
    monkeypatch.setattr(
        dataset, "encode_completion", lambda *parts, **_: (whole(*parts)[0], [trained] * len(whole(*parts)[0]))
    )
    job = job_of(world, "sft")
    assert verdict(job, "mask")[0] == "fail"
    assert seen in verdict(job, "mask")[1]
    if trained:
        assert failing(job) == {"mask"}


def test_a_process_reward_model_needs_labels_and_pretraining_every_token(world: World):
    job = job_of(world, "process_reward_model")
    assert verdict(job, "mask") == ("pass", "9 rows with 2 to 2 labelled steps")
    assert verdict(job, "stop token")[0] == "skip"
    job = job_of(world, "pretrain")
    assert "100%" in verdict(job, "mask")[1]
    rows = [[replace(r, mask=[False, *r.mask[1:]])] for (r,) in job.source.take(9)]
    job.source = Source(rows, seed=0)
    assert verdict(job, "mask")[0] == "fail"


def test_a_pad_token_that_is_text(world: World, tmp_path: Path):
    plain = Tokenizer.load(world / "plain")
    save_model(decoder(258), Tokenizer(plain.inner, eos=plain.eos, pad="Y"), tmp_path / "m")
    job = job_of(world, "sft", f"model.path={tmp_path / 'm'}")
    assert failing(job) == {"padding"}
    assert verdict(job, "padding")[1] == "the pad token Y is trained on 9 times"


def test_padding_with_the_stop_token_is_fine(world: World, tmp_path: Path):
    plain = Tokenizer.load(world / "plain")
    save_model(decoder(258), Tokenizer(plain.inner, eos=plain.eos), tmp_path / "m")
    job = job_of(world, "sft", f"model.path={tmp_path / 'm'}")
    assert failing(job) == set()
    assert "told apart by its place" in verdict(job, "padding")[1]


def test_a_table_whose_mask_is_shifted_or_on_padding_is_seen():
    rows = [Rollout(tokens=[1, 2, 3, 4], mask=[False, False, True, True]), Rollout(tokens=[1, 5], mask=[False, True])]
    batch = collate([rows])
    assert misplaced(batch, rows) == ""
    assert "are not the 3 trained tokens" in misplaced(replace(batch, mask=batch.mask.roll(1, 1) & batch.real), rows)
    assert misplaced(replace(batch, mask=torch.ones_like(batch.mask)), rows) == "2 padded positions are trained on"


def test_a_tokenizer_that_loses_capitals(world: World, tmp_path: Path):
    lossy = train_bpe([], vocab_size=258)
    lossy.inner.normalizer = normalizers.Lowercase()
    save_model(decoder(258), lossy, tmp_path / "m")
    job = job_of(world, "sft", f"model.path={tmp_path / 'm'}")
    assert failing(job) == {"round trip"}
    assert verdict(job, "round trip")[1] == "'Yes' comes back as 'yes'"
    rows = write_rows(tmp_path / "text.jsonl", [{"text": "Yes"}] * 2)
    assert verdict(job_of(world, "pretrain", f"model.path={tmp_path / 'm'}", f"data={rows}"), "round trip")[0] == "fail"


def test_tokens_that_would_be_encoded_differently_are_noted(world: World):
    merging = train_bpe(["abab"] * 50, vocab_size=260)
    job = job_of(world, "sft")
    job.tokenizer = merging
    a, b = (merging.inner.token_to_id(letter) for letter in "ab")
    job.source = Source([[Rollout(tokens=[a, b, a, b], mask=[False, False, True, True])]], seed=0)
    assert merging.encode("ab") != [a, b]
    assert verdict(job, "round trip")[0] == "warn"
    assert "2 of 2 runs" in verdict(job, "round trip")[1]


def test_a_row_is_cut_where_training_starts_and_stops():
    row = Rollout(tokens=[1, 2, 3, 4, 5], mask=[False, True, True, False, True])
    assert runs_of(row) == [([1], False), ([2, 3], True), ([4], False), ([5], True)]
