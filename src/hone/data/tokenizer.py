"""Text to token ids and back, in the folder layout that `transformers.AutoTokenizer` reads and writes."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from hone.errors import HoneError

PAD, EOS = "<pad>", "<eos>"
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

    def __post_init__(self) -> None:
        names = [self.eos, *self.stops, *(name for name in (self.pad, self.bos) if name is not None)]
        for name in names:
            if self.inner.token_to_id(name) is None:
                raise HoneError(f"the tokenizer has no token {name!r}: add it or name another in its config")

    @cached_property
    def _aware(self) -> tokenizers.Tokenizer:
        """A private copy that recognises special tokens written in the text."""
        copy = tokenizers.Tokenizer.from_str(self.inner.to_str())
        copy.no_truncation()  # a tokenizer.json may carry a length limit that cuts silently
        copy.no_padding()
        return copy

    @cached_property
    def _blind(self) -> tokenizers.Tokenizer:
        """A second copy that reads special tokens as text: switching one copy to and fro is not thread-safe."""
        copy = tokenizers.Tokenizer.from_str(self._aware.to_str())
        copy.encode_special_tokens = True
        return copy

    def encode(self, text: str, *, specials: bool = False) -> list[int]:
        """The ids of exactly this text: nothing is added, and `<eos>` in it is six characters unless `specials`."""
        try:
            return (self._aware if specials else self._blind).encode(text, add_special_tokens=False).ids
        except (TypeError, UnicodeEncodeError) as error:
            if not isinstance(text, str):
                raise
            raise HoneError("the text holds half of a surrogate pair: it is not Unicode, repair it") from error

    def decode(self, ids: Sequence[int], *, specials: bool = True) -> str:
        """The text of the ids; without `specials`, special tokens are left out."""
        ids = list(ids)
        runs: list[list[int]] = [[]]
        if ids and max(ids) >= self.vocab_size:  # a model's vocabulary may be padded beyond the tokenizer's
            for i in ids:
                runs[-1].append(i) if i < self.vocab_size else runs.append([])
        else:
            runs = [ids]
        return UNKNOWN.join(self._aware.decode(run, skip_special_tokens=not specials) for run in runs)

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
        added = self._aware.encode("", add_special_tokens=True).ids
        return [self.bos_id] if self.bos_id is not None and added[:1] == [self.bos_id] else []

    @cached_property
    def stop_ids(self) -> frozenset[int]:
        return frozenset(self.id_of(name) for name in (self.eos, *self.stops))

    @cached_property
    def special_tokens(self) -> frozenset[str]:
        return frozenset(t.content for t in self.inner.get_added_tokens_decoder().values() if t.special)

    def save(self, folder: str | Path) -> None:
        """Write tokenizer.json, tokenizer_config.json and, if there is one, chat_template.jinja."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        config: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            "eos_token": self.eos,
            "pad_token": self.pad,
            "bos_token": self.bos,
            "stop_tokens": list(self.stops),
        }
        self._aware.save(str(folder / "tokenizer.json"))
        text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
        (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")
        template = folder / "chat_template.jinja"
        if self.chat_template is None:
            template.unlink(missing_ok=True)
        else:
            template.write_bytes(self.chat_template.encode())

    @classmethod
    def load(cls, folder: str | Path) -> Self:
        """Read a folder written by `save` or by Hugging Face."""
        folder = Path(folder)
        if not folder.is_dir():
            raise HoneError(f"there is no tokenizer folder {folder}: give the folder that holds tokenizer.json")
        config = _read_object(folder / "tokenizer_config.json")
        _read_object(folder / "tokenizer.json")
        try:
            inner = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception as error:  # the library raises bare Exception
            reason = " ".join(str(error).split())
            raise HoneError(f"{folder / 'tokenizer.json'} is not a tokenizer: {reason}") from error
        names = {key: _token_name(config, key, folder) for key in ("eos_token", "pad_token", "bos_token")}
        if names["eos_token"] is None:
            raise HoneError(f'{folder / "tokenizer_config.json"} names no "eos_token": add the stop token')
        return cls(
            inner,
            eos=names["eos_token"],
            pad=names["pad_token"],
            bos=names["bos_token"],
            stops=_stops(inner, config, folder),
            chat_template=_template(config, folder),
        )


def check_fits(tokenizer: Tokenizer, model_vocab: int) -> None:
    """Refuse a tokenizer with ids for which the model has no embedding."""
    if tokenizer.vocab_size > model_vocab:
        raise HoneError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, the model {model_vocab}: "
            f"set the model's vocab_size to {tokenizer.vocab_size} or more, or use the model's own tokenizer"
        )


def train_bpe(
    texts: Iterable[str], *, vocab_size: int, specials: Sequence[str] = (), split_digits: bool = True
) -> Tokenizer:
    """A byte-level BPE: any text can be encoded, and decoding gives it back exactly."""
    names = list(dict.fromkeys([PAD, EOS, *specials]))
    floor = len(names) + 256
    if vocab_size < floor or "" in names:
        raise HoneError(f"vocab_size {vocab_size}: need at least {floor} (256 bytes and {len(names)} specials)")
    rows = list(texts)
    if vocab_size > floor and not any(rows):
        raise HoneError("no text to train the tokenizer on: give it some, or set vocab_size to bytes and specials")
    inner = tokenizers.Tokenizer(models.BPE())
    split: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if split_digits else []
    inner.pre_tokenizer = pre_tokenizers.Sequence([*split, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=names,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    inner.train_from_iterator(rows, trainer)
    return Tokenizer(inner, eos=EOS, pad=PAD)


def _read_object(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise HoneError(f"there is no {path.name} in {path.parent}: save the tokenizer there first")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise HoneError(f"{path} is not JSON ({error}): write it again") from error
    if not isinstance(value, dict):
        raise HoneError(f"{path} holds a {type(value).__name__}, not a JSON object: write it again")
    return value


def _token_name(config: dict[str, Any], key: str, folder: Path) -> str | None:
    token = config.get(key)
    if isinstance(token, dict):  # Hugging Face's AddedToken
        token = token.get("content")
    if token is not None and not isinstance(token, str):
        raise HoneError(f"{folder / 'tokenizer_config.json'}: {key} is {token!r}, expected the token's text")
    return token


def _stops(inner: tokenizers.Tokenizer, config: dict[str, Any], folder: Path) -> tuple[str, ...]:
    """Stop tokens besides eos: ours, and those of the model's generation_config.json."""
    names = config.get("stop_tokens") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise HoneError(f"{folder / 'tokenizer_config.json'}: stop_tokens is not a list of tokens")
    path = folder / "generation_config.json"
    ids = _read_object(path).get("eos_token_id") if path.exists() else None
    for i in ids if isinstance(ids, list) else [] if ids is None else [ids]:
        name = inner.id_to_token(i) if isinstance(i, int) and i >= 0 else None
        if name is None:
            raise HoneError(f"{path}: eos_token_id {i!r} is not a token of this tokenizer: correct it")
        names = [*names, name]
    eos = _token_name(config, "eos_token", folder)
    return tuple(name for name in dict.fromkeys(names) if name != eos)


def _template(config: dict[str, Any], folder: Path) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_bytes().decode()  # bytes: read_text would turn "\r\n" into "\n"
    template = config.get("chat_template")
    if isinstance(template, list):  # several named templates
        template = next((t.get("template") for t in template if t.get("name") == "default"), None)
    if template is not None and not isinstance(template, str):
        raise HoneError(f"{folder / 'tokenizer_config.json'}: chat_template is not text: correct it")
    return template
