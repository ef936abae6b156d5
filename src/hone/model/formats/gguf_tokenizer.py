"""The tokenizer of a GGUF file: vocabulary, merges, special tokens and chat template from its metadata."""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from hone.data.text.pretrained import data_only, from_pretrained
from hone.data.text.tokenizer import Tokenizer
from hone.data.text.tokenizer_folder import is_panic
from hone.errors import HoneError

KEY = "tokenizer.ggml."
CONTROL, USER_DEFINED, UNUSED = 3, 4, 5  # token_type; an unused token pads the embedding

# The patterns of the families: words with one leading mark, digits, punctuation with line ends, space.
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
CASED = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, kw_only=True)
class PreTokenizer:
    """How text is split into words before BPE merges."""

    pattern: str = ""  # of a word; "": GPT-2's
    digits: bool = False  # each digit is a word
    nfc: bool = False  # text is normalised to NFC first
    ignore_merges: bool = False  # a word that is a token is not merged from parts
    bos: bool = False  # text starts with bos unless the file says otherwise


LLAMA3 = PreTokenizer(pattern=WORDS.format(digits="{1,3}"), ignore_merges=True, bos=True)
QWEN2 = PreTokenizer(pattern=WORDS.format(digits=""), nfc=True)
KINDS = {
    "gpt-2": PreTokenizer(),
    "smollm": PreTokenizer(digits=True),
    "llama3": LLAMA3,
    "llama-v3": LLAMA3,
    "llama-bpe": LLAMA3,
    "qwen2": QWEN2,
    "deepseek-r1-qwen": QWEN2,
    "tekken": PreTokenizer(pattern=CASED, ignore_merges=True, bos=True),
}


def build_tokenizer(meta: Mapping[str, Any], path: Path) -> Tokenizer:
    """The tokenizer of the metadata; HoneError says what is missing or not known."""
    model = meta.get(f"{KEY}model")
    if not _list_of(meta, "tokens", str, path):
        raise HoneError(f"{path} holds no tokens: use a GGUF file with its tokenizer")
    if model == "gpt2":
        kind = _kind(meta, path)
        inner, bos = _byte_level(meta, kind, path), kind.bos
    elif model == "llama":
        inner, bos = _sentencepiece(meta, path), True
    else:
        raise HoneError(f"{path} has a tokenizer of kind {model}, known are gpt2 and llama: use another file")
    names = {key: _token_of(meta, f"{key}_token_id", path) for key in ("bos", "eos", "padding", "eot", "eom")}
    if names["eos"] is None:
        raise HoneError(f"{path} names no eos token: use another GGUF file of the model")
    if unknown := next((name for name in names.values() if name is not None and inner.token_to_id(name) is None), None):
        raise HoneError(f"{path} is damaged ({unknown!r} is unused, but named as special): download it again")
    _set_template(
        inner, bos=names["bos"] if meta.get(f"{KEY}add_bos_token", bos) else None, eos=names["eos"], meta=meta
    )
    stops = dict.fromkeys(name for key in ("eot", "eom") if (name := names[key]) not in (None, names["eos"]))
    template = meta.get("tokenizer.chat_template")
    return Tokenizer(
        inner,
        eos=names["eos"],
        pad=names["padding"],
        bos=names["bos"],
        stops=tuple(name for name in stops if name is not None),
        chat_template=template if isinstance(template, str) else None,
        source=str(path),
    )


def _list_of(meta: Mapping[str, Any], key: str, kind: type, path: Path) -> list[Any]:
    values = meta.get(f"{KEY}{key}")
    if values is not None and not (isinstance(values, list) and all(isinstance(v, kind) for v in values)):
        raise HoneError(f"{path} is damaged (its {key} are not what they should be): download it again")
    return values or []


def _kind(meta: Mapping[str, Any], path: Path) -> PreTokenizer:
    name = meta.get(f"{KEY}pre")
    if name is None:
        raise HoneError(f"{path} does not say how text is cut into words ({KEY}pre): use a newer GGUF file")
    if not isinstance(name, str) or name not in KINDS:
        raise HoneError(f"{path} cuts text into words as {name}, known are {', '.join(KINDS)}: use the model's folder")
    return KINDS[name]


def _byte_level(meta: Mapping[str, Any], kind: PreTokenizer, path: Path) -> tokenizers.Tokenizer:
    tokens, types = meta[f"{KEY}tokens"], _types(meta, path)
    kept = {t: i for i, (t, type_) in enumerate(zip(tokens, types, strict=True)) if type_ != UNUSED}
    if len(kept) != len(tokens) - types.count(UNUSED):
        raise HoneError(f"{path} is damaged (a token stands twice in it): download it again")
    merges = [tuple(merge.split(" ", 1)) for merge in _list_of(meta, "merges", str, path)]
    try:
        inner = tokenizers.Tokenizer(models.BPE(vocab=kept, merges=merges, ignore_merges=kind.ignore_merges))
    except Exception as error:  # the library raises bare Exception
        reason = " ".join(str(error).split())
        raise HoneError(f"{path} is damaged (its merges: {reason}): download it again") from error
    parts: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if kind.digits else []
    if kind.pattern:
        parts.append(pre_tokenizers.Split(Regex(kind.pattern), behavior="isolated"))
    parts.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not kind.pattern))
    inner.pre_tokenizer = pre_tokenizers.Sequence(parts)
    inner.decoder = decoders.ByteLevel()
    if kind.nfc:
        inner.normalizer = normalizers.NFC()
    _add_special_tokens(inner, tokens, types)
    return inner


def _types(meta: Mapping[str, Any], path: Path) -> list[int]:
    tokens, types = meta[f"{KEY}tokens"], _list_of(meta, "token_type", int, path)
    if not types:
        raise HoneError(f"{path} does not say which tokens are special ({KEY}token_type): use a newer GGUF file")
    if len(types) != len(tokens):
        raise HoneError(f"{path} is damaged ({len(tokens)} tokens, {len(types)} types): download it again")
    return types


def _add_special_tokens(inner: tokenizers.Tokenizer, tokens: list[str], types: list[int]) -> None:
    """Add the tokens that are never split. Control tokens are special; user-defined ones are part of the text."""
    pairs = list(zip(tokens, types, strict=True))
    inner.add_special_tokens([AddedToken(t, normalized=False, special=True) for t, n in pairs if n == CONTROL])
    inner.add_tokens([AddedToken(t, normalized=False, special=False) for t, n in pairs if n == USER_DEFINED])


def _sentencepiece(meta: Mapping[str, Any], path: Path) -> tokenizers.Tokenizer:
    """The tokenizer of a vocabulary with scores; transformers computes the merges."""
    if find_spec("transformers") is None:
        raise HoneError('this GGUF file\'s tokenizer needs transformers: pip install "hone[gguf]"')
    if meta.get(f"{KEY}add_space_prefix") is False:
        raise HoneError(f"{path} puts no space before a text, which is not known here: use the model's folder")
    _types(meta, path)
    try:
        with data_only(path) as place:
            read = from_pretrained("AutoTokenizer", place, gguf_file=path.name)
        return tokenizers.Tokenizer.from_str(read.backend_tokenizer.to_str())
    except BaseException as error:  # transformers can raise anything on a damaged file
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        reason = " ".join(str(error).split())
        raise HoneError(f"the tokenizer of {path} cannot be read ({reason}): download it again") from error


def _token_of(meta: Mapping[str, Any], key: str, path: Path) -> str | None:
    i, tokens = meta.get(f"{KEY}{key}"), meta[f"{KEY}tokens"]
    if i is None:
        return None
    if not isinstance(i, int) or not 0 <= i < len(tokens):
        raise HoneError(f"{path} is damaged ({key} is {i!r}, there are {len(tokens)} tokens): download it again")
    return tokens[i]


def _set_template(inner: tokenizers.Tokenizer, *, bos: str | None, eos: str, meta: Mapping[str, Any]) -> None:
    """Set the special tokens that encoding adds before and after a text."""
    before = [bos] if bos is not None else []
    after = [eos] if meta.get(f"{KEY}add_eos_token") else []
    used = [(name, inner.token_to_id(name)) for name in dict.fromkeys([*before, *after])]
    single = [*before, "$A", *after]
    inner.post_processor = processors.TemplateProcessing(
        single=single, pair=[*single, *(f"{part}:1" for part in [*before, "$B", *after])], special_tokens=used
    )
