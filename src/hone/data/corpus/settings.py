"""The settings of a cleaning run. Everything that changes the output is a field here, and so part of the hash."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from hone.data.corpus.quality import RULES
from hone.data.text.tokenizer import check_vocab_size
from hone.errors import HoneError

SPLITS = ("blank", "line", "file")


def _rules() -> dict[str, float | None]:
    return {rule.name: rule.limit for rule in RULES}


@dataclass(frozen=True, kw_only=True)
class CorpusSettings:
    """None, an empty tuple or False switches a step off."""

    column: str = "text"  # of a JSONL row
    split: str = "blank"  # documents of a .txt file: blank lines between them, one a line, or the file
    languages: tuple[str, ...] = ("en",)
    confidence: float = 0.5  # least probability of the language
    rules: Mapping[str, float | None] = field(default_factory=_rules)
    toxicity: float | None = 0.8  # most mean probability over windows of words
    exact: bool = True
    near: float | None = 0.8  # least Jaccard similarity of a near duplicate
    shingle: int = 5  # words
    permutations: int = 128
    evals: tuple[str, ...] = ()
    eval_fields: tuple[str, ...] = ()  # columns of an evaluation row; empty: every text in it
    ngram: int = 13
    short: int = 8  # evaluation texts with fewer words than ngram are searched as a whole, down to this length
    drop_overlap: bool = False
    vocab: int | None = None  # train a BPE of this size on what is kept
    bpe_bytes: int = 256 << 20  # the tokenizer is trained on a sample of at most about this much text
    shard_bytes: int = 16 << 20
    max_document: int = 64 << 20  # bytes; a longer record is dropped without being held in memory
    strict: bool = False  # stop at the first record that cannot be read

    def __post_init__(self) -> None:
        unknown = sorted(set(self.rules) - {rule.name for rule in RULES})
        if unknown:
            raise HoneError(f"no rule {unknown[0]!r}: choose from {', '.join(rule.name for rule in RULES)}")
        if self.split not in SPLITS:
            raise HoneError(f"split {self.split!r} is not known: choose from {', '.join(SPLITS)}")
        shares = {"confidence": self.confidence, "toxicity": self.toxicity, "near": self.near}
        for name, value in shares.items():
            if value is not None and not 0 < value <= 1:
                raise HoneError(f"{name} is {value}: give a number above 0 and up to 1")
        whole = ("shingle", "permutations", "ngram", "short", "bpe_bytes", "shard_bytes", "max_document")
        for name in whole:
            if getattr(self, name) < 1:
                raise HoneError(f"{name} is {getattr(self, name)}: give a whole number of at least 1")
        if unbounded := [name for name, limit in self.rules.items() if limit is not None and math.isnan(limit)]:
            raise HoneError(f"the limit of {unbounded[0]} is nan: set it to a number, or off")
        if self.vocab is not None:
            check_vocab_size(self.vocab)
        if self.drop_overlap and not self.evals:
            raise HoneError(
                "nothing to compare with: name the evaluation sets with --eval, or leave out --drop-overlap"
            )

    def plain(self) -> dict[str, Any]:
        """The settings as JSON. Rules that were not named have their default."""
        return {**asdict(self), "rules": {**_rules(), **self.rules}}

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Self:
        """The inverse of `plain`."""
        given: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
        return cls(**given)
