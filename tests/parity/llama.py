"""The tiny Llama, tokenizer and trainer arguments of the peer's side; needs transformers, not yet TRL."""

import atexit
import tempfile
from functools import cache
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedTokenizerFast

from tests.parity.rows import PAD, STOP, VOCAB

transformers.logging.set_verbosity_error()
FOLDER = tempfile.TemporaryDirectory()  # trainers want one; nothing is written
atexit.register(FOLDER.cleanup)

SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32, "initializer_range": 0.3,
    "tie_word_embeddings": False, "pad_token_id": PAD, "eos_token_id": STOP, "bos_token_id": None,
}  # fmt: skip
COMMON: dict[str, Any] = {
    "output_dir": FOLDER.name, "report_to": [], "use_cpu": True, "bf16": False, "gradient_checkpointing": False,
    "save_strategy": "no", "disable_tqdm": True, "per_device_train_batch_size": 8,
}  # fmt: skip


def language_model(seed: int) -> LlamaForCausalLM:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return LlamaForCausalLM(LlamaConfig(**SHAPE)).double()


def reward_model(seed: int = 0, *, pad: int = PAD) -> LlamaForSequenceClassification:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = LlamaConfig(**{**SHAPE, "pad_token_id": pad, "id2label": {0: "0"}, "label2id": {"0": 0}})
        return LlamaForSequenceClassification(config).double()


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    """Token i is the word w<i>."""
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": f"w{PAD}", "eos_token": f"w{STOP}", "unk_token": f"w{PAD}"}
    return PreTrainedTokenizerFast(tokenizer_object=words, **special)
