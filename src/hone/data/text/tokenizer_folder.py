"""The tokenizer files of a model folder, as Hugging Face models have them: names, stop tokens, templates."""

import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

import tokenizers

from hone.data.text.json_object import read_object
from hone.data.text.pretrained import from_pretrained
from hone.data.text.worker import WORKER, Failed, OverLimit
from hone.errors import HoneError, not_utf8

Config = dict[str, Any]
ID = re.compile(r"[0-9]{1,9}")  # of a token
NAMES = ("eos_token", "pad_token", "bos_token", "unk_token")
SAVE = "save the tokenizer there again"
LARGEST = 256 << 20  # bytes of a tokenizer.json; the largest that are published have 35 million
# What reading it may take, and more for each of its bytes.
SECONDS, BYTES_A_SECOND = 5.0, 1 << 20
MEMORY, BYTES_A_BYTE = 512 << 20, 40
LARGEST_TEMPLATE = 32 << 20  # bytes, as of the JSON file in which it may stand
OLDER = ("tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")  # what transformers can make tokenizer.json of


def read_folder(folder: Path) -> tuple[tokenizers.Tokenizer, dict[str, Any]]:
    """The tokenizer, and the fields of a `Tokenizer` by name."""
    if not folder.is_dir():
        raise HoneError(f"there is no tokenizer folder {folder}: give the folder that holds tokenizer.json")
    config = read_object(folder / "tokenizer_config.json", remedy=SAVE)
    inner = _inner(folder)
    _add_tokens(inner, config, folder)
    names = _names(config, folder)
    stops = _stops(inner, config, folder)
    if names["eos_token"] is None:
        if not stops:
            raise HoneError(f'{folder / "tokenizer_config.json"} names no "eos_token": add the stop token')
        names["eos_token"], stops = stops[0], stops[1:]
    _mark_special(inner, {*stops, *(names[key] for key in ("eos_token", "pad_token", "bos_token"))})
    templates = _templates(config, folder)
    settings = config.get("chat_settings") or {}
    if not isinstance(settings, dict):
        raise HoneError(f"{folder / 'tokenizer_config.json'}: chat_settings is not an object: correct it")
    if names["unk_token"] is not None:
        settings = {**settings, "unk_token": names["unk_token"]}
    return inner, {
        "eos": names["eos_token"],
        "pad": names["pad_token"],
        "bos": names["bos_token"],
        "stops": tuple(name for name in stops if name != names["eos_token"]),
        "chat_template": templates.get("default"),
        "tool_template": templates.get("tool_use"),
        "settings": settings,
    }


def is_panic(error: BaseException) -> bool:
    """Whether Rust code panicked. A panic is no Exception, so only a caller who asks for it catches it."""
    return type(error).__name__ == "PanicException"


def _optional(path: Path) -> Config:
    return read_object(path) if path.exists() else {}


def _inner(folder: Path) -> tokenizers.Tokenizer:
    path = folder / "tokenizer.json"
    if not path.exists() and any((folder / name).exists() for name in OLDER):
        return _converted(folder)
    check_tokenizer(path)
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        reason = " ".join(str(error).split())
        raise HoneError(f"{path} is not a tokenizer ({reason}): {SAVE}") from error


def check_tokenizer(path: Path) -> None:
    """Refuse a tokenizer.json that cannot be read, or not within limits, or whose patterns take for ever.

    The bounded worker reads it first: what takes a process down, as Rust's panics do, does not take this one.
    """
    if not path.is_file():
        raise HoneError(f"there is no {path.name} in {path.parent}: {SAVE}")
    size = path.stat().st_size
    if size > LARGEST:
        raise HoneError(f"{path} has {size >> 20} MiB, more than any tokenizer: {SAVE}")
    try:
        limits = {"seconds": SECONDS + size / BYTES_A_SECOND, "memory": MEMORY + size * BYTES_A_BYTE}
        WORKER.ask("tokenizer", str(path.resolve()), **limits)
    except (Failed, OverLimit) as error:
        raise HoneError(f"{path} is not a tokenizer ({error}): {SAVE}") from error


def _converted(folder: Path) -> tokenizers.Tokenizer:
    """A folder from before tokenizer.json, through transformers."""
    found = next(name for name in OLDER if (folder / name).exists())
    remedy = 'pip install transformers sentencepiece protobuf tiktoken, or save it again with "use_fast=True"'
    try:
        loaded = from_pretrained("AutoTokenizer", folder)
        return tokenizers.Tokenizer.from_str(loaded.backend_tokenizer.to_str())
    except BaseException as error:  # transformers raises whatever its converters do
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        reason = " ".join(str(error).split())[:120] or type(error).__name__
        raise HoneError(
            f"{folder} has no tokenizer.json, and {found} cannot be converted ({reason}): {remedy}"
        ) from error


def _add_tokens(inner: tokenizers.Tokenizer, config: Config, folder: Path) -> None:
    """Tokens that tokenizer_config.json adds to those of tokenizer.json, under the ids it gives them."""
    where = folder / "tokenizer_config.json"
    added = config.get("added_tokens_decoder") or {}
    if not isinstance(added, dict) or not all(ID.fullmatch(i) and isinstance(t, dict) for i, t in added.items()):
        raise HoneError(f"{where}: added_tokens_decoder is not an object of tokens by id: correct it")
    tokens = {int(i): added[i] for i in sorted(added, key=int)}
    if wrong := [i for i, token in tokens.items() if not isinstance(token.get("content"), str)]:
        raise HoneError(f"{where}: added token {wrong[0]} has no content: correct it")
    # All at once, for each call goes through all that were added before; the special ones then get their mark.
    inner.add_tokens([_added(token) for token in tokens.values() if inner.token_to_id(token["content"]) is None])
    known = inner.get_added_tokens_decoder()
    marked = [_added(token) for i, token in tokens.items() if token.get("special") and not _is_special(known.get(i))]
    inner.add_special_tokens(marked)
    for i, token in tokens.items():
        if (found := inner.token_to_id(token["content"])) != i:
            raise HoneError(f"{where}: {token['content']} is token {i}, in tokenizer.json {found}: correct one")


def _is_special(token: tokenizers.AddedToken | None) -> bool:
    return token is not None and token.special


def _added(token: Config) -> tokenizers.AddedToken:
    flags = {key: bool(token[key]) for key in ("single_word", "lstrip", "rstrip", "normalized") if key in token}
    return tokenizers.AddedToken(token["content"], **flags)


def _mark_special(inner: tokenizers.Tokenizer, names: Collection[str | None]) -> None:
    """Added tokens with a role are special, as in transformers, even where tokenizer.json does not say so."""
    plain = [token for token in inner.get_added_tokens_decoder().values() if not token.special]
    flags = ("single_word", "lstrip", "rstrip", "normalized")
    named = [token for token in plain if token.content in names]
    inner.add_special_tokens([_added({"content": t.content, **{key: getattr(t, key) for key in flags}}) for t in named])


def _names(config: Config, folder: Path) -> dict[str, str | None]:
    """The named tokens; special_tokens_map.json fills what tokenizer_config.json leaves out."""
    older = _optional(folder / "special_tokens_map.json")
    files = ((config, folder / "tokenizer_config.json"), (older, folder / "special_tokens_map.json"))
    found = {key: [_token(values, key, path) for values, path in files] for key in NAMES}
    return {key: next((name for name in names if name is not None), None) for key, names in found.items()}


def _token(config: Config, key: str, path: Path) -> str | None:
    token = config.get(key)
    if isinstance(token, dict):  # Hugging Face's AddedToken
        token = token.get("content")
    if token is not None and not isinstance(token, str):
        raise HoneError(f"{path}: {key} is {token!r}, expected the token's text")
    return token


def _stops(inner: tokenizers.Tokenizer, config: Config, folder: Path) -> list[str]:
    """Stop tokens: ours, those of generation_config.json, and those of config.json that are special tokens.

    A config.json may hold the default id of its class, 2, whatever token that is.
    """
    names = config.get("stop_tokens") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise HoneError(f"{folder / 'tokenizer_config.json'}: stop_tokens is not a list of tokens")
    path = folder / "generation_config.json"
    for i in _ids(_optional(path).get("eos_token_id")):
        name = _name(inner, i)
        if name is None:
            raise HoneError(f"{path}: eos_token_id {i!r} is not a token of this tokenizer: correct it")
        names = [*names, name]
    special = {t.content for t in inner.get_added_tokens_decoder().values() if t.special}
    more = [_name(inner, i) for i in _ids(_optional(folder / "config.json").get("eos_token_id"))]
    return list(dict.fromkeys([*names, *(name for name in more if name in special)]))


def _ids(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _name(inner: tokenizers.Tokenizer, i: Any) -> str | None:
    return inner.id_to_token(i) if isinstance(i, int) and 0 <= i < 2**32 else None


def _templates(config: Config, folder: Path) -> dict[str, str]:
    """Templates by name: files first, then chat_template.json and tokenizer_config.json; one alone is the default."""
    named: dict[Any, Any] = {}
    legacy = _optional(folder / "chat_template.json").get("chat_template")
    for template in (config.get("chat_template"), legacy):
        if isinstance(template, list):  # several named templates
            named |= {str(t.get("name")): t.get("template") for t in template if isinstance(t, dict)}
        elif isinstance(template, dict):
            named |= template
        elif template is not None:
            named["default"] = template
    files = [folder / "chat_template.jinja", *sorted((folder / "additional_chat_templates").glob("*.jinja"))]
    for path in files:
        if path.exists() or path.is_symlink():
            name = "default" if path.parent == folder else path.stem
            named[name] = _read_text(path)
    if not all(isinstance(name, str) and isinstance(template, str) for name, template in named.items()):
        raise HoneError(f"{folder / 'tokenizer_config.json'}: chat_template is not text: correct it")
    return {"default": next(iter(named.values()))} if len(named) == 1 else named


def _read_text(path: Path) -> str:
    """A template; without the one that it names a model would answer as another."""
    if not path.is_file():
        raise HoneError(f"{path} is no file: copy it again, or remove it if the model shall do without")
    if path.stat().st_size > LARGEST_TEMPLATE:
        raise HoneError(f"{path} has more than {LARGEST_TEMPLATE >> 20} MiB, which no template needs: copy it again")
    try:
        return path.read_bytes().decode()  # bytes: read_text would turn "\r\n" into "\n"
    except UnicodeDecodeError as error:
        raise not_utf8(path, error) from error
