"""Text to token ids and back, in the folder layout that `transformers.AutoTokenizer` reads and writes.

Where decoding only joins the tokens, many rows are decoded at once (`TokenTexts`).
"""

import json
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property, lru_cache
from itertools import accumulate, islice, pairwise
from pathlib import Path
from typing import Any, Self

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from hone.data.text.tokenizer_folder import is_panic, read_folder
from hone.errors import HoneError


@lru_cache(maxsize=1)
def byte_of() -> dict[str, int]:
    """Byte-level BPE writes each byte as a character: printable ones as they are, the others from U+0100 on."""
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in set(plain)]
    return {chr(b): b for b in plain} | {chr(0x100 + i): b for i, b in enumerate(others)}


class TokenTexts:
    """What each id adds to a text, and what stands between two of them: bytes and nothing, or words and a blank.

    It takes a third of the library's time on one core: the library reads each id as a Python object and makes a string
    of each token.
    """

    def __init__(self, pieces: Sequence[bytes] | Sequence[str], joint: bytes | str) -> None:
        self.table, self.joint = np.array(pieces, dtype=object), joint

    def texts(self, rows: Sequence["array[int]"]) -> list[str] | None:
        """The text of each row; None where an id is beyond them."""
        ids = np.concatenate(rows)
        if ids.max(initial=0) >= len(self.table):
            return None
        found = self.table[ids].tolist()
        ends = pairwise(accumulate(map(len, rows), initial=0))
        joined = [self.joint.join(found[start:end]) for start, end in ends]
        return [text if isinstance(text, str) else text.decode("utf-8", "replace") for text in joined]


def token_texts(inner: tokenizers.Tokenizer, size: int) -> TokenTexts | None:
    """The texts of ids below `size`; None if the tokenizer does more to its tokens than join them."""
    names, decoder = [inner.id_to_token(i) for i in range(size)], json.loads(inner.to_str()).get("decoder")
    if decoder is not None and decoder["type"] == "ByteLevel":
        return TokenTexts([_bytes(name or "") for name in names], b"")
    words = [name for name in names if name is not None]
    # an id that is no token would have no blank beside it
    return TokenTexts(words, " ") if decoder is None and len(words) == size else None


def _bytes(name: str) -> bytes:
    table = byte_of()
    return bytes(table[c] for c in name) if all(c in table for c in name) else name.encode()


PAD, EOS = "<pad>", "<eos>"
MANY = 16  # rows whose texts are worth a table of the vocabulary
UNKNOWN = "\ufffd"  # what decoding shows for an id the tokenizer does not have


@dataclass(frozen=True)
class Tokenizer:
    """A `tokenizers.Tokenizer` with the names of its pad, first and stop tokens."""

    inner: tokenizers.Tokenizer
    eos: str
    pad: str | None = None  # None: padding uses eos, which `Batch.real` keeps out of the maths
    bos: str | None = None
    stops: tuple[str, ...] = ()  # stop tokens besides eos
    chat_template: str | None = None
    tool_template: str | None = None  # the chat template where there are tools; None: chat_template
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any], hash=False)  # more variables of the templates
    clock: datetime | None = None  # what strftime_now tells in templates; None: the time of rendering
    source: str = field(default="", compare=False, repr=False)  # the folder it was read from, for errors

    def __post_init__(self) -> None:
        names = [self.eos, *self.stops, *(name for name in (self.pad, self.bos) if name is not None)]
        for name in names:
            if self.inner.token_to_id(name) is None:
                raise HoneError(f"the tokenizer has no token {name!r}: add it or name another in its config")

    @cached_property
    def _with_specials(self) -> tokenizers.Tokenizer:
        """A private copy that recognises special tokens written in the text."""
        copy = tokenizers.Tokenizer.from_str(self.inner.to_str())
        copy.no_truncation()  # a tokenizer.json may carry a length limit that cuts silently
        copy.no_padding()
        return copy

    @cached_property
    def _specials_as_text(self) -> tokenizers.Tokenizer:
        """A second copy that reads special tokens as text: switching one copy to and fro is not thread-safe."""
        copy = tokenizers.Tokenizer.from_str(self._with_specials.to_str())
        copy.encode_special_tokens = True
        return copy

    def encode(self, text: str, *, specials: bool = False) -> list[int]:
        """The ids of exactly this text: nothing is added, and `<eos>` in it is six characters unless `specials`."""
        return self.encode_all([text], specials=specials)[0]

    def encode_all(self, texts: Sequence[str], *, specials: bool = False) -> list[list[int]]:
        """The ids of each text, all in one call to the library, which shares them out over the cores."""
        try:
            reader = self._with_specials if specials else self._specials_as_text
            with self._without_panics():
                found = reader.encode_batch_fast(list(texts), add_special_tokens=False)  # fast: without places
            return [encoding.ids for encoding in found]
        except (TypeError, UnicodeEncodeError) as error:
            if not all(isinstance(text, str) for text in texts):
                raise
            raise HoneError("the text holds half of a surrogate pair: it is not Unicode, repair it") from error

    @contextmanager
    def _without_panics(self) -> Iterator[None]:
        """The library's own errors, panics of Rust among them, as one that says whose tokenizer it is."""
        try:
            yield
        except BaseException as error:
            if not is_panic(error) and type(error) is not Exception:
                raise
            reason, of = " ".join(str(error).split()), self.source and f" of {self.source}"
            raise HoneError(f"the tokenizer{of} cannot read this text ({reason}): use another tokenizer") from error

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """The ids with special tokens recognised, and the place (first character, end) of each in the text."""
        with self._without_panics():
            encoding = self._with_specials.encode(text, add_special_tokens=False)
        return encoding.ids, encoding.offsets

    def decode(self, ids: Sequence[int], *, specials: bool = True) -> str:
        """The text of the ids; without `specials`, special tokens are left out."""
        return self.decode_all([ids], specials=specials)[0]

    def decode_all(self, rows: Iterable[Sequence[int]], *, specials: bool = True) -> list[str]:
        """The text of each row's ids, all in one call to the library, or none where their tokens are only joined."""
        rows = list(rows)
        if specials and len(rows) >= MANY and (found := self._joined(rows)) is not None:
            return found
        cut = [self._runs(list(ids)) for ids in rows]
        runs = [run for runs in cut for run in runs]
        with self._without_panics():
            texts = iter(self._with_specials.decode_batch(runs, skip_special_tokens=not specials))
        return [UNKNOWN.join(islice(texts, len(runs))) for runs in cut]

    def _joined(self, rows: list[Sequence[int]]) -> list[str] | None:
        """The texts of arrays of ids it has, where it only joins tokens; else None."""
        arrays = [ids for ids in rows if isinstance(ids, array)]
        return self._pieces.texts(arrays) if len(arrays) == len(rows) and self._pieces is not None else None

    @cached_property
    def _pieces(self) -> TokenTexts | None:
        return token_texts(self._with_specials, self.vocab_size)

    def _runs(self, ids: list[int]) -> list[list[int]]:
        """Cut at the ids it does not have: a model's vocabulary may be padded beyond the tokenizer's."""
        if not ids or max(ids) < self.vocab_size:
            return [ids]
        runs: list[list[int]] = [[]]
        for i in ids:
            runs[-1].append(i) if i < self.vocab_size else runs.append([])
        return runs

    @cached_property
    def vocab_size(self) -> int:
        """The largest id + 1: a vocabulary with holes needs as many embeddings."""
        return max(self.inner.get_vocab(with_added_tokens=True).values()) + 1

    def id_of(self, token: str) -> int:
        i = self.inner.token_to_id(token)
        if i is None:
            raise HoneError(f"the tokenizer has no token {token!r}: add it to the specials it is trained with")
        return i

    @cached_property
    def eos_id(self) -> int:
        return self.id_of(self.eos)

    @cached_property
    def pad_id(self) -> int:
        return self.id_of(self.eos if self.pad is None else self.pad)

    @cached_property
    def bos_id(self) -> int | None:
        return None if self.bos is None else self.id_of(self.bos)

    @cached_property
    def start_ids(self) -> list[int]:
        """What plain text starts with: [bos] where the tokenizer's own post-processor adds one, else nothing."""
        with self._without_panics():
            added = self._with_specials.encode("", add_special_tokens=True).ids
        return [self.bos_id] if self.bos_id is not None and added[:1] == [self.bos_id] else []

    @cached_property
    def stop_ids(self) -> frozenset[int]:
        return frozenset(self.id_of(name) for name in (self.eos, *self.stops))

    @cached_property
    def special_tokens(self) -> frozenset[str]:
        return frozenset(t.content for t in self.inner.get_added_tokens_decoder().values() if t.special)

    @cached_property
    def special_ids(self) -> frozenset[int]:
        return frozenset(i for i, t in self.inner.get_added_tokens_decoder().items() if t.special)

    @cached_property
    def plain_added(self) -> frozenset[str]:
        """Added tokens that are not special, as <think>."""
        return frozenset(t.content for t in self.inner.get_added_tokens_decoder().values() if not t.special)

    @cached_property
    def role_marks(self) -> dict[str, tuple[str, ...]]:
        """Those that a chat template marks turns with, by template; `Dialogue` finds them out."""
        return {}

    @cached_property
    def reserved(self) -> tuple[str, ...]:
        """Special and stop tokens, longest first: no message may contain one."""
        names = {*self.special_tokens, self.eos, *self.stops, *(name for name in (self.pad, self.bos) if name)}
        return tuple(sorted(names, key=lambda name: (-len(name), name)))

    def save(self, folder: str | Path) -> None:
        """Write tokenizer.json, tokenizer_config.json and, where there are some, chat templates as .jinja files."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        config: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            "eos_token": self.eos,
            "pad_token": self.pad,
            "bos_token": self.bos,
            "stop_tokens": list(self.stops),
            "chat_settings": {k: v for k, v in self.settings.items() if not k.endswith("_token")},
            **{k: v for k, v in self.settings.items() if k.endswith("_token")},
        }
        self._with_specials.save(str(folder / "tokenizer.json"))
        text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
        (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")
        for path, template in (
            (folder / "chat_template.jinja", self.chat_template),
            (folder / "additional_chat_templates" / "tool_use.jinja", self.tool_template),
        ):
            path.unlink(missing_ok=True)
            if template is not None:
                path.parent.mkdir(exist_ok=True)
                path.write_bytes(template.encode())

    @classmethod
    def load(cls, folder: str | Path) -> Self:
        """Read a folder written by `save` or by Hugging Face."""
        inner, named = read_folder(Path(folder))
        return cls(inner, **named, source=str(folder))


def check_fits(tokenizer: Tokenizer, model_vocab: int) -> None:
    """Refuse a tokenizer with ids for which the model has no embedding."""
    if tokenizer.vocab_size > model_vocab:
        raise HoneError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, the model {model_vocab}: "
            f"set the model's vocab_size to {tokenizer.vocab_size} or more, or use the model's own tokenizer"
        )


def check_same_tokens(ours: Tokenizer, theirs: Tokenizer, folder: Path) -> None:
    """Every token has one id in both, or HoneError that shows one that has not."""
    a, b = (t.inner.get_vocab(with_added_tokens=True) for t in (ours, theirs))
    odd = sorted(token for token in a.keys() | b.keys() if a.get(token) != b.get(token))
    if odd:
        raise HoneError(
            f"{folder} has another vocabulary than the model: {len(odd)} tokens differ, as {odd[0]!r}, which is "
            f"{a.get(odd[0], 'absent')} in the model and {b.get(odd[0], 'absent')} there: "
            "use a teacher with the model's own tokenizer"
        )


def check_vocab_size(size: int, specials: Sequence[str] = (PAD, EOS)) -> int:
    """The least size of a byte-level BPE with these special tokens; HoneError where `size` is below it."""
    least = len(specials) + 256
    if size < least or "" in specials:
        raise HoneError(f"vocab_size {size}: need at least {least} (256 bytes and {len(specials)} specials)")
    return least


def train_bpe(texts: Iterable[str], *, vocab_size: int, specials: Sequence[str] = ()) -> Tokenizer:
    """A byte-level BPE: any text can be encoded, and decoding gives it back exactly. Each digit is one token."""
    names = list(dict.fromkeys([PAD, EOS, *specials]))
    least = check_vocab_size(vocab_size, names)
    rows = list(texts)
    if vocab_size > least and not any(rows):
        raise HoneError("no text to train the tokenizer on: give it some, or set vocab_size to bytes and specials")
    inner = tokenizers.Tokenizer(models.BPE())
    split: list[Any] = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    inner.pre_tokenizer = pre_tokenizers.Sequence(split)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=names,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    inner.train_from_iterator(rows, trainer)
    return Tokenizer(inner, eos=EOS, pad=PAD)
