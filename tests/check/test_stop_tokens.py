"""A stop token that no model stops at: `hone check` says so, and what it should be."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from check_world import World, chat_tokenizer, job_of, recipe, verdict
from places import decoder, write_rows
from tokenizers import decoders, models, pre_tokenizers

from hone.check import suite
from hone.check.report import Finding
from hone.config.recipe import ModelSpec
from hone.data.text.stop_token import ENDS, TURN_ENDS, closing_token, wrong_stop
from hone.data.text.tokenizer import Tokenizer
from hone.errors import HoneError
from hone.model.formats.save import save_model

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


def tokenizer(eos: str, *specials: str, template: str | None = None, stops: tuple[str, ...] = ()) -> Tokenizer:
    """Bytes and these special tokens; eos may be one of either."""
    inner = tokenizers.Tokenizer(models.BPE(vocab={b: i for i, b in enumerate(ALPHABET)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(list(specials))
    return Tokenizer(inner, eos=eos, chat_template=template, stops=stops)


def chat(open_: str, close: str) -> str:
    return (
        "{% for m in messages %}" + open_ + "{{ m.role }}\n{{ m.content }}" + close + "\n{% endfor %}"
        "{% if add_generation_prompt %}" + open_ + "assistant\n{% endif %}"
    )


CHATML = chat("<|im_start|>", "<|im_end|>")


def test_a_piece_of_text_is_no_stop_token():
    for eos in ("5", "0", "a", "Z", "\u0120", "\u010a", ".", "#"):
        for template in (None, CHATML):
            found = wrong_stop(tokenizer(eos, "<|im_start|>", "<|im_end|>", template=template))
            assert found is not None, eos
            assert f"the stop token {eos!r} is an ordinary piece of text" in found.seen
            assert 'to "<|im_end|>"' in found.remedy


def test_a_digit_is_none_even_where_it_is_marked_as_special():
    assert wrong_stop(tokenizer("7", "7", "</s>")) is not None


def test_one_wrong_token_among_several_is_named():
    found = wrong_stop(tokenizer("<|im_end|>", "<|im_end|>", stops=("3",)))
    assert found is not None
    assert "'3'" in found.seen
    assert "generation_config.json" in found.remedy


def test_what_begins_or_fills_a_text_is_no_stop_token():
    for eos in ("<|im_start|>", "<s>", "<unk>", "<pad>", "<|begin_of_text|>", "<start_of_turn>", "<|user|>"):
        found = wrong_stop(tokenizer(eos, eos, "<|im_start|>", "<|im_end|>"))
        assert found is not None, eos
        assert 'to "<|im_end|>"' in found.remedy


def test_what_begins_the_next_text_may_be_a_stop_token_beside_the_eos():
    for bos, wrong in (("<s>", False), (None, True)):
        made = replace(tokenizer("</s>", "</s>", "<s>", stops=("<s>",)), bos=bos)
        assert (wrong_stop(made) is not None) == wrong, bos


def test_the_stop_tokens_of_every_known_family_pass():
    for end in ENDS:
        assert wrong_stop(tokenizer(end, end)) is None, end
    for end in ("[END]", "<my_end>", "<|done|>", "{stop}"):
        assert wrong_stop(tokenizer(end, end)) is None, "a name of one's own is no fault"


def test_the_template_says_what_ends_a_turn():
    for end in TURN_ENDS:
        assert closing_token(tokenizer(end, end, "<|open|>", template=chat("<|open|>", end))) == end
    assert closing_token(tokenizer("</s>", "</s>")) == ""
    assert closing_token(chat_tokenizer()) == "<eos>"


def check(world: World, made: Tokenizer, folder: Path, algo: str = "grpo", **fields: Any) -> Finding:
    """The finding of the stop token, by the whole of `hone check`."""
    save_model(decoder(made.vocab_size, context=160), made, folder)
    report = suite.check(recipe(world, algo, **{"model": ModelSpec(path=str(folder)), **fields}))
    return next(f for f in report.findings if f.name == "stop token")


def test_a_digit_fails_the_check_whatever_the_data(world: World, tmp_path: Path):
    made = tokenizer("5", "<|im_start|>", "<|im_end|>", template=CHATML)
    for n, (algo, data) in enumerate(
        (("grpo", "chats"), ("grpo", "problems"), ("sft", "messages"), ("sft", "answers"))
    ):
        found = check(world, made, tmp_path / f"m{n}", algo, data=world / f"{data}.jsonl")
        assert found.verdict == "fail", f"{algo} {data}"
        assert 'tokenizer_config.json to "<|im_end|>"' in found.remedy, f"{algo} {data}"


def test_the_remedy_is_the_fix(world: World, tmp_path: Path):
    made = tokenizer("5", "<|im_start|>", "<|im_end|>", template=CHATML)
    assert check(world, made, tmp_path / "m", data=world / "chats.jsonl").verdict == "fail"
    path = tmp_path / "m/tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token": "<|im_end|>", "pad_token": None}))
    config = tmp_path / "m/generation_config.json"
    config.unlink(missing_ok=True)
    mended = suite.check(recipe(world, "grpo", model=ModelSpec(path=str(tmp_path / "m")), data=world / "chats.jsonl"))
    assert next(f for f in mended.findings if f.name == "stop token").verdict == "pass"


def test_a_template_that_ends_turns_with_another_token_fails_where_rows_are_chats(world: World, tmp_path: Path):
    made = tokenizer("<|endoftext|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>", template=CHATML)
    found = check(world, made, tmp_path / "m", data=world / "chats.jsonl")
    assert found.verdict == "fail"
    assert "the chat template ends a turn with <|im_end|>, the tokenizer stops at <|endoftext|>" in found.seen
    assert 'to "<|im_end|>"' in found.remedy
    both = tokenizer(
        "<|endoftext|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>", template=CHATML, stops=("<|im_end|>",)
    )
    assert check(world, both, tmp_path / "both", data=world / "chats.jsonl").verdict == "pass"


def test_data_that_ends_with_another_familys_token_fails(world: World, tmp_path: Path):
    rows = [{"prompt": f"{a}+{a}=\n", "completion": f"{2 * a}</s>"} for a in range(9)]
    data = write_rows(tmp_path / "rows.jsonl", rows)
    state, seen = verdict(job_of(world, "sft", data=data), "stop token")
    assert state == "fail"
    assert "9 of 9 rows end with the text </s>" in seen


def test_a_run_blames_the_tokenizer_and_not_the_rows(world: World, tmp_path: Path):
    made = tokenizer("0", "<|im_start|>", "<|im_end|>", template=CHATML)
    save_model(decoder(made.vocab_size), made, tmp_path / "m")
    with pytest.raises(HoneError, match="the stop token '0' is an ordinary piece of text"):
        job_of(world, "grpo", model=ModelSpec(path=str(tmp_path / "m")), data=world / "chats.jsonl")
