"""Settings: strict `a.b=value` overrides of frozen dataclasses, YAML in, JSON out. Nothing unknown is ignored.

What a field accepts is its annotation; what an algorithm accepts is its factory's signature. There is no second list.
"""

import dataclasses
import difflib
import inspect
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar, cast, get_args, get_type_hints

import yaml

from hone.config.values import Misfit, fit, mapping_value, read, shown_value
from hone.errors import HoneError, count_noun, not_utf8
from hone.storage.textfile import read_text

C = TypeVar("C")
T = TypeVar("T")
_NOTHING = ("", "none", "null", '""', "''")
MOST_VALUES = 1_000_000  # of a settings file, aliases written out
ValueReader = Callable[[Any], Any]  # annotation -> a value that fits it, or Misfit

# What other frameworks call a setting of a recipe.
OTHER_FRAMEWORKS = {
    "learning_rate": "optim.lr", "lr": "optim.lr", "max_grad_norm": "optim.clip_norm", "warmup_steps": "optim.warmup",
    "lr_scheduler_type": "optim.schedule", "batch_size": "train.prompts", "train_batch_size": "train.prompts",
    "per_device_train_batch_size": "train.prompts", "rollout_batch_size": "train.prompts", "max_steps": "train.steps",
    "gradient_accumulation_steps": "train.micro_rows", "gradient_checkpointing": "train.recompute",
    "bf16": "train.dtype", "eval_steps": "train.eval_every", "save_steps": "save.every", "output_dir": "out",
    "num_generations": "sample.group", "n_samples_per_prompt": "sample.group", "temperature": "sample.temperature",
    "max_completion_length": "sample.max_tokens", "max_new_tokens": "sample.max_tokens", "beta": "algo.beta",
    "model_name_or_path": "model.path", "dataset": "data", "reward_funcs": "reward", "loss_type": "algo",
    "num_train_epochs": "train.steps", "epsilon": "algo.clip", "report_to": "tensorboard",
    "num_iterations": "train.epochs", "num_ppo_epochs": "train.epochs", "ppo_epochs": "train.epochs",
    "num_mini_batches": "train.minibatches", "peft_config": "lora", "lora_r": "lora.rank", "lora_alpha": "lora.alpha",
    "train_dataset": "data", "eval_dataset": "eval_data", "reward_weights": "reward", "scale_rewards": "algo",
    "kl_coef": "algo.beta", "cliprange": "algo.clip", "save_total_limit": "save.keep",
    "deepspeed": "train.shard", "fsdp": "train.shard", "logging_dir": "out",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Choice:
    """An algorithm by name with settings, as in `Choice("dapo", {"high": 0.3})`; `build_choice` makes it."""

    name: str  # as `hone algos` lists it, or "FILE.py:function"
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])  # its keyword arguments; others: the defaults


def override(config: C, settings: Sequence[str]) -> C:
    """A copy of `config` with each `a.b=value` applied; `algo=name` comes before `algo.setting=value`."""
    pairs: list[tuple[list[str], ValueReader]] = []
    for setting in settings:
        path, equals, text = setting.partition("=")
        if not equals or not path.strip():
            raise HoneError(f"{setting!r} is not a setting: write name=value")
        pairs.append((path.strip().split("."), partial(read, text)))
    return _apply(config, pairs)


def from_yaml(path: str | Path, config: C) -> C:
    """A copy of `config` with the nested settings of a YAML (or JSON) file applied, as strictly as `override`."""
    values = _load_yaml(Path(path))
    if not isinstance(values, Mapping | None):
        raise HoneError(f"{path}: expected settings (name: value), got {shown_value(values)}")
    return from_plain(values or {}, config, where=path)


def from_plain(values: Mapping[str, Any], config: C, *, where: str | Path) -> C:
    """A copy of `config` with nested settings applied, as `to_json` gives them; where: what an error names."""
    try:
        return _apply(config, [(keys, partial(fit, value)) for keys, value in _leaves(values, [])])
    except RecursionError as error:  # YAML lets a table hold itself
        raise HoneError(f"{where}: its settings are nested without end: write each as name: value") from error
    except HoneError as error:
        raise HoneError(f"{where}: {error}") from error


def to_json(config: Any) -> Any:
    """Plain data for json.dump that `from_yaml` reads back. Callables become names; rows in memory are counted."""
    if isinstance(config, Choice):
        return {"name": config.name} | to_json(config.settings)
    if is_dataclass(config) and not isinstance(config, type):
        return {f.name: to_json(getattr(config, f.name)) for f in dataclasses.fields(config)}
    if isinstance(config, Mapping):
        return {str(key): to_json(value) for key, value in config.items()}
    if isinstance(config, float) and not math.isfinite(config):
        return str(config)  # JSON has no infinity
    if config is None or isinstance(config, bool | int | float | str):
        return config
    if isinstance(config, Path):
        return str(config)
    if isinstance(config, frozenset | set):
        return sorted(map(str, config))
    if isinstance(config, list | tuple) and len(config) <= 64 and not any(map(_is_row, config)):
        return [to_json(item) for item in config]
    if isinstance(config, Sequence):
        return f"{count_noun(len(config), 'row')} in memory"
    named = config.func if isinstance(config, partial) else config
    named = named if hasattr(named, "__qualname__") else type(named)
    return f"{named.__module__}.{named.__qualname__}"


def check(config: Any, where: str = "") -> None:
    """Every field holds what its annotation says, all the way down: for configurations written in Python."""
    for name, hint in _hints(type(config)).items():
        value, path = getattr(config, name), f"{where}{name}"
        try:
            fit(value, hint)
        except Misfit as misfit:
            raise HoneError(f"{path}: expected {misfit}, got {shown_value(value)}") from None
        if is_dataclass(value) and Choice not in (hint, *get_args(hint)):  # a factory checks its own settings
            check(value, f"{path}.")


def settings_of(factory: Callable[..., Any]) -> dict[str, Any]:
    """A factory's settings and their defaults: its signature. `inspect.Parameter.empty` marks one without."""
    return {p.name: p.default for p in inspect.signature(factory).parameters.values()}


def build_choice(choice: Choice, table: Mapping[str, Callable[..., T]]) -> T:
    """The factory called with the chosen settings, each checked against the factory's signature."""
    if choice.name not in table:
        raise unknown("algorithm", choice.name, [*table, "FILE.py:function"])
    factory = table[choice.name]
    known, hints, values = settings_of(factory), get_type_hints(factory), dict[str, Any]()
    for name, value in choice.settings.items():
        if name not in known:
            raise unknown("setting", name, known, owner=choice.name)
        default = known[name]
        untold = default is None or default is inspect.Parameter.empty  # whose type says nothing
        hint = hints.get(name, Any if untold else type(default))
        try:
            values[name] = read(value, hint) if isinstance(value, str) else fit(value, hint)
        except Misfit as misfit:
            raise HoneError(f"{choice.name}: {name} is {shown_value(value)}: give {misfit}") from None
    for name, default in known.items():
        if default is inspect.Parameter.empty and name not in values:
            raise HoneError(f"{choice.name} needs the setting {name!r}: give it a value")
    return factory(**values)


def unknown(kind: str, name: str, known: Iterable[str], *, owner: str = "", meant: str = "") -> HoneError:
    """The error for a name that does not exist: the one that is meant or the nearest, and all there are."""
    names = [str(k) for k in known]
    hint = did_you_mean(name, names, meant=meant) or ";"
    has = f"{owner} has" if owner else "there are"
    listed = ", ".join(names) or f"none: write one, or name another {'file' if owner else kind}"
    return HoneError(f"no {kind} {name!r:.200}{hint} {has} {listed}")


def did_you_mean(name: str, names: Sequence[str], *, meant: str = "") -> str:
    """What follows a name that does not exist: the one that is meant or the nearest; nothing where none is near.

    >>> did_you_mean("optim.lrr", ["optim.lr", "optim.bits"])
    "; did you mean 'optim.lr'?"
    """
    shared = name[: name.rfind(".") + 1]  # what all have in common makes none of them alike
    shared = shared if all(other.startswith(shared) for other in names) else ""
    tails = difflib.get_close_matches(name.removeprefix(shared), [other.removeprefix(shared) for other in names], n=2)
    begun = [other for other in names if len(name) > len(shared) and other.startswith(name)][:2]
    near = [meant] if meant else begun or [shared + tail for tail in tails]
    return f"; did you mean {' or '.join(map(repr, near))}?" if near else ""


@cache
def _hints(kind: type) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {f.name: hints[f.name] for f in dataclasses.fields(kind)}


def _is_row(value: Any) -> bool:
    return is_dataclass(value) or isinstance(value, Mapping)


def _apply(config: C, pairs: Iterable[tuple[list[str], ValueReader]]) -> C:
    # Whole before part, so that `algo.high=0.3 algo=dapo` does not drop what it sets.
    for path, reader in sorted(pairs, key=lambda pair: (len(pair[0]), pair[0][-1] != "name")):
        config = _set(config, path, reader, ".".join(path))
    return config


def _set(node: Any, path: list[str], reader: ValueReader, whole: str) -> Any:
    name, rest = path[0], path[1:]
    hints = _hints(type(node))
    above = whole.removesuffix(".".join(path))
    if name not in hints:
        known = [above + n for n in hints]
        raise unknown("setting", above + name, known, meant=OTHER_FRAMEWORKS.get(name, ""))
    old, hint = getattr(node, name), hints[name]
    if Choice in (hint, *get_args(hint)):
        new = _choose(old, rest, reader, whole)
    elif is_dataclass(old) and rest:
        new = _set(old, rest, reader, whole)
    elif is_dataclass(old):
        parts = ", ".join(f"{whole}.{n}" for n in _hints(cast(type, type(old))))
        raise HoneError(f"{whole} is a group of settings: set one of {parts}")
    elif rest:
        new = _set_key(old, hint, rest, reader, whole)
    else:
        new = "" if _unsets(type(node), name, reader) else _value(reader, hint, whole)
    return replace(node, **{name: new})


def _unsets(kind: type, name: str, reader: ValueReader) -> bool:
    """Whether `none` is given for a text that is empty by default. It then empties the text and names no file."""
    (default,) = (f.default for f in dataclasses.fields(kind) if f.name == name)
    given = reader.args[0] if isinstance(reader, partial) else ""
    return default == "" and (given is None or (isinstance(given, str) and given.strip().lower() in _NOTHING))


def _choose(old: Any, rest: list[str], reader: ValueReader, whole: str) -> Choice:
    """`algo=name` (or algo.name=name) starts over with the defaults, `algo.setting=value` adds a setting."""
    if not rest or rest == ["name"]:
        if not (name := _value(reader, str, whole)):
            raise HoneError(f"{whole} is empty: give a name, as in {whole}=NAME")
        return Choice(name)
    if not isinstance(old, Choice):
        above = whole.removesuffix("." + ".".join(rest))
        raise HoneError(f"{whole}: {above} was made in Python and cannot be changed here: choose one with {above}=NAME")
    return Choice(old.name, {**old.settings, ".".join(rest): _value(reader, Any, whole)})


def _set_key(old: Any, hint: Any, keys: list[str], reader: ValueReader, whole: str) -> dict[str, Any]:
    kind = mapping_value(hint)
    field_name = whole.removesuffix("." + ".".join(keys))
    if kind is None:
        raise HoneError(
            f"no setting {whole!r}: {field_name} is {shown_value(old)}, not a group: set {field_name} itself"
        )
    if old and not isinstance(old, Mapping):
        raise HoneError(
            f"{whole} does not fit: {field_name} is {shown_value(old)}; replace it with {field_name}=... first"
        )
    return {**(old or {}), ".".join(keys): _value(reader, kind, whole)}


def _value(reader: ValueReader, hint: Any, whole: str) -> Any:
    try:
        return reader(hint)
    except Misfit as misfit:
        given = reader.args[0] if isinstance(reader, partial) else ""
        raise HoneError(f"{whole}: expected {misfit}, got {shown_value(given)}") from None


def _leaves(values: Mapping[Any, Any], above: list[str]) -> Iterable[tuple[list[str], Any]]:
    for key, value in values.items():
        if not isinstance(key, str):
            raise HoneError(f"{key!r} is not the name of a setting: put it in quotes")
        path = [*above, *key.split(".")]
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, path)
        else:
            yield path, value


class _Loader(yaml.SafeLoader):
    """YAML without three traps: 1e-4 is a number here, and a key given twice or an alias bomb is an error."""

    def get_single_node(self) -> yaml.Node | None:
        """The document, unless it is too large with its aliases written out: forty lines can name a trillion values."""
        node = super().get_single_node()
        values = _written_out(node, {}) if node is not None else 0
        if values > MOST_VALUES:
            number = f"over {MOST_VALUES} values" if values < math.inf else "settings that are nested without end"
            raise yaml.MarkedYAMLError(problem=f"its aliases stand for {number}: write each as name: value")
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """A mapping in which no key hides another."""
        keys = Counter(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode))
        if twice := [key for key, count in keys.items() if count > 1]:
            raise yaml.MarkedYAMLError(problem=f"{twice[0]!r} is given twice", problem_mark=node.start_mark)
        return cast(dict[Any, Any], super().construct_mapping(node, deep=deep))


def _written_out(node: yaml.Node, sizes: dict[yaml.Node, float]) -> float:
    """How many values there would be without aliases: endless where a table holds itself."""
    if isinstance(node, yaml.ScalarNode):
        return 1
    if node not in sizes:
        sizes[node] = math.inf
        pairs = node.value if isinstance(node, yaml.MappingNode) else [(item,) for item in node.value]
        sizes[node] = 1 + sum(_written_out(inner, sizes) for pair in pairs for inner in pair)
    return sizes[node]


_EXPONENT = re.compile(r"^[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$")
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT, list("-+0123456789"))


def _load_yaml(path: Path) -> Any:
    if not path.is_file():
        raise HoneError(f"no file {path}: check the path of the settings file")
    try:
        return yaml.load(read_text(path), _Loader)  # a SafeLoader: plain values only
    except UnicodeDecodeError as error:
        raise not_utf8(path, error) from error
    except Exception as error:  # a value that is not of its tag raises whatever Python does
        mark = getattr(error, "problem_mark", None)
        line = f" line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or str(error) or type(error).__name__
        raise HoneError(f"{path}{line} is not valid YAML ({problem}): correct it") from error
