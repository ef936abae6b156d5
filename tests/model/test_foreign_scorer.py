"""Sequence classifiers of transformers, made at random here, score as transformers itself does."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2ForSequenceClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
    Qwen2Config,
    Qwen2ForSequenceClassification,
)

from hone.data.text.tokenizer import train_bpe
from hone.errors import HoneError
from hone.model.config import DecoderConfig
from hone.model.decoder import Decoder
from hone.model.formats.folder import load_scorer
from hone.model.formats.foreign import ForeignScorer
from hone.model.formats.save import save_scorer
from hone.model.scorer import Scorer
from hone.reward.learned.load import process_model, reward_model
from hone.reward.learned.reward_model import RewardModel
from hone.types import Rollout, Task

torch.set_num_threads(1)
SHAPE = {"vocab_size": 300, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
MODELS = {
    "llama": (
        LlamaForSequenceClassification,
        LlamaConfig(**SHAPE, num_key_value_heads=1, num_labels=1, pad_token_id=0),
    ),
    "qwen2": (
        Qwen2ForSequenceClassification,
        Qwen2Config(**SHAPE, num_key_value_heads=1, num_labels=1, pad_token_id=0),
    ),
    "gpt2": (
        GPT2ForSequenceClassification,
        GPT2Config(vocab_size=300, n_positions=32, n_embd=8, n_layer=1, n_head=2, num_labels=1, pad_token_id=0),
    ),
    "bert": (BertForSequenceClassification, BertConfig(**SHAPE, max_position_embeddings=32, num_labels=1)),
}
OURS = ("llama", "qwen2")


def rollout(*tokens: int) -> Rollout:
    return Rollout(tokens=tokens, mask=[False] * (len(tokens) - 1) + [True])


ROWS = [rollout(5, 6, 7, 8), rollout(5, 6, 9), rollout(1, 2), rollout(5, 6, 7, 9, 11, 12), rollout(3, 4)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    found = {}
    for name, (kind, config) in MODELS.items():
        torch.manual_seed(3)
        config.initializer_range = 0.5
        model, folder = kind(config).eval(), tmp_path_factory.mktemp(name)
        model.save_pretrained(folder)
        found[name] = (model, folder)
    return found


@pytest.mark.parametrize("name", MODELS)
def test_scores_are_those_of_transformers_row_by_row(name, folders, monkeypatch):
    model, folder = folders[name]
    scorer = load_scorer(folder)
    assert isinstance(scorer, ForeignScorer) == (name not in OURS)
    with torch.no_grad():
        expected = [model(torch.tensor([r.tokens])).logits.item() for r in ROWS]
    for rows in (1, 2, 64):
        monkeypatch.setattr("hone.reward.learned.reward_model.ROWS", rows)
        assert RewardModel(score=scorer, pad_id=0)(ROWS) == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert len(set(expected)) == len(expected)


def test_a_causal_models_score_is_known_at_every_token_and_an_encoders_at_the_end(folders):
    assert load_scorer(folders["gpt2"][1]).scores_each_token  # pyright: ignore[reportAttributeAccessIssue]
    assert not load_scorer(folders["bert"][1]).scores_each_token  # pyright: ignore[reportAttributeAccessIssue]


def test_rows_beyond_the_context_and_several_labels_are_refused(folders, tmp_path):
    scorer = load_scorer(folders["gpt2"][1])
    with pytest.raises(HoneError, match="33 tokens, the reward model's context is 32"):
        RewardModel(score=scorer, pad_id=0)([rollout(*range(1, 34))])
    kind, config = MODELS["bert"]
    three = BertConfig(**(config.to_dict() | {"num_labels": 3, "id2label": {i: str(i) for i in range(3)}}))
    kind(three).save_pretrained(tmp_path)
    with pytest.raises(HoneError, match="3 labels"):
        load_scorer(tmp_path)


def test_what_is_saved_in_the_config_normalises_the_scores(folders, tmp_path):
    _, folder = folders["gpt2"]
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"hone": {"mean": 2.0, "std": 0.5}}))
    plain, scaled = (RewardModel(score=load_scorer(path), pad_id=0)(ROWS) for path in (folder, tmp_path))
    assert scaled == pytest.approx([(x - 2.0) / 0.5 for x in plain])


@pytest.fixture
def words():
    return train_bpe(["one two three", "four five"], vocab_size=290)


def test_a_model_with_its_own_vocabulary_reads_the_text(folders, words, tmp_path):
    _, folder = folders["qwen2"]
    other = train_bpe(["five four three two one " * 3], vocab_size=280)
    other.save(folder)
    task = Task(prompt="one ")
    r = Rollout(tokens=[1, 2], mask=[False, True], task=task, text="two")
    (found,) = reward_model([str(folder)], words, device="cpu")([r])
    tokens = [*other.encode("one "), *other.encode("two"), other.eos_id]
    (expected,) = RewardModel(score=load_scorer(folder), pad_id=0)([rollout(*tokens)])
    assert found == pytest.approx(expected)
    with pytest.raises(HoneError, match="give rollouts a task"):
        reward_model([str(folder)], words, device="cpu")([replace(r, task=None)])


def test_folders_are_joined_and_only_step_models_are_process_models(folders, words, tmp_path):
    paths = [str(folders[name][1]) for name in ("llama", "gpt2")]
    each = [reward_model([path], words, device="cpu")(ROWS) for path in paths]
    lowest = reward_model(paths, words, how="min", device="cpu")(ROWS)
    assert [o.value for o in lowest] == pytest.approx([min(pair) for pair in zip(*each, strict=True)])
    with pytest.raises(HoneError, match="algo=process_reward_model"):
        process_model(paths[:1], words)
    config = DecoderConfig(
        vocab_size=300, hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=16,
    )  # fmt: skip
    save_scorer(Scorer(Decoder(config), kind="step"), tmp_path)
    (steps,) = process_model([str(tmp_path)], words)([rollout(5, 6)])
    assert len(steps.scores) == 1
