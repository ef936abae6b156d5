"""A language model with its tokenizer as one folder: what Hone and Hugging Face's Auto classes load."""

import json
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from hone.data.text.tokenizer import Tokenizer
from hone.model.decoder import Decoder
from hone.model.formats.folder import save_decoder, save_scorer
from hone.model.scorer import Scorer

GENERATION = "generation_config.json"


def save_whole(
    model: Decoder | Scorer, tokenizer: Tokenizer, folder: str | Path, *, weights: Mapping[str, Tensor] | None = None
) -> None:
    """Weights, config, tokenizer, and for a language model every token that ends its turn.

    weights: a copy of the model's, where they may change meanwhile.
    """
    ids = {"eos_token_id": tokenizer.eos_id, "pad_token_id": tokenizer.pad_id, "bos_token_id": tokenizer.bos_id}
    if isinstance(model, Scorer):
        save_scorer(model, folder, extra=ids, weights=weights)
    else:
        save_decoder(model, folder, extra=ids, weights=weights)
        stops = [tokenizer.eos_id, *sorted(tokenizer.stop_ids - {tokenizer.eos_id})]
        about = {**ids, "eos_token_id": stops if len(stops) > 1 else stops[0]}
        (Path(folder) / GENERATION).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
    tokenizer.save(folder)
