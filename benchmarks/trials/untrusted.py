"""What strangers wrote: code beside a model, templates, configs, adapters and tokenizers.

Each case is a child of its own that may use so much memory and time: a template that reaches ten gigabytes must not
end the trial. What is allowed to come out is the result, or one line of HoneError.
"""

import io
import json
import os
import resource
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save

from benchmarks.trials.case import Case
from hone.data.text.chat import render
from hone.data.text.tokenizer import Tokenizer, train_bpe
from hone.errors import HoneError
from hone.model.formats.folder import load_decoder, load_scorer
from hone.model.formats.gguf import load_gguf
from hone.model.formats.peft import read_peft

TITLE = "Files and templates from strangers"
SECONDS, MEMORY, GROWTH = 15, 6 << 30, 700  # of processor time and bytes of one case; megabytes that it may grow by
CORPUS = Path(__file__).parents[2] / "tests" / "fuzz" / "corpus"
LOOP, ENDFOR = "{% for i in range(99999) %}", "{% endfor %}"
TEMPLATES = {
    "replace": "{% set s = 'a' * 9000 %}{{ s | replace('a', s) | replace('a', s) }}",
    "replace, the method": "{% set s = 'a' * 90000 %}{{ s.replace('a', s) }}",
    "join": "{{ range(99999) | join('x' * 99999) }}",
    "indent": "{{ ('x\\n' * 99999) | indent('y' * 99999) }}",
    "indent by a number": "{{ ('x\\n' * 9999999) | indent(49999999) }}",
    "a format's width": "{{ '%9999999d' % 1 * 999 }}",
    "many widths": "{{ ('%9999999d' * 300) % ((1,) * 300) }}",
    "a power": "{{ 10 ** (10 ** 7) % 7 }}{{ 3 ** (10 ** 7) // 5 }}" * 50,
    "products": "{% set ns = namespace(n=9) %}{% for i in range(33) %}{% set ns.n = ns.n * ns.n %}{% endfor %}",
    "sort": LOOP + "{{ range(99999) | map('string') | sort(reverse=true) | first }}" + ENDFOR,
    "sorting long texts": "{{ (['a' * 9999999] * 99999) | sort | first | length }}",
    "groupby": "{{ (messages * 9999999) | groupby('role') | length }}",
    "tojson": "{{ ([messages] * 9999999) | tojson(indent=999) }}",
    "xmlattr": "{{ {'a': 'x<' * 20000000} | xmlattr }}",
    "wordwrap": "{{ ('x ' * 20000000) | wordwrap(1) }}",
    "urlize": "{{ ('http://a.b ' * 4000000) | urlize }}",
    "striptags": "{{ ('<a' * 20000000) | striptags }}",
    "escape": "{{ ('<' * 40000000) | e | e | e }}",
    "pprint": "{{ ([messages] * 99999) | pprint }}" * 9,
    "zfill": "{{ ('x'.zfill(49999999) ~ 'y') | list | length }}",
    "expandtabs": "{{ ('\\t' * 999).expandtabs(9999999) }}",
    "translate": "{{ ('a' * 9999999).translate({97: 'b' * 999}) }}",
    "splitlines": "{{ ('a\\n' * 20000000).splitlines() | length }}",
    "map and list": "{{ ('a' * 40000000) | list | map('upper') | list | length }}",
    "unique": "{{ range(99999) | map('string') | list | unique | list | length }}" * 999,
    "macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "loops": LOOP * 3 + ENDFOR * 3,
    "a doubled list": "{% set ns = namespace(s=[1]) %}{% for i in range(40) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "many lists": "{% set ns = namespace(s=[]) %}" + LOOP + "{% set ns.s = ns.s + [('x' * 49999999)] %}" + ENDFOR,
    "a dictionary of texts": LOOP + "{% set _ = {i: 'x' * 9999999} | tojson | length %}" + ENDFOR,
    "set blocks": "{% set a %}" + LOOP + "{{ 'x' * 9999 }}" + ENDFOR + "{% endset %}{{ a | length }}",
    "a width of a format": "{{ '{:>999999999}'.format(1) }}",
    "a text that refers to itself": "{% block a %}{{ self.a() }}{{ self.a() }}{% endblock %}",
    "a loop that calls itself": "{% for x in [[1]] recursive %}{{ loop([[1]]) }}{% endfor %}",
    "100,000 brackets": "{{ " + "(" * 100_000 + "1" + ")" * 100_000 + " }}",
    "5,000 conditions": "{% if 1 %}" * 5000 + "{% endif %}" * 5000,
    "many arguments": "{{ range(*([1] * 10 ** 7)) }}",
    "a date of many fields": "{{ strftime_now('%c' * 10000000) }}",
    "an error of many lines": "{{ raise_exception('a\\n' * 10000000) }}",
    "counting": "{% set s = 'a' * 9999999 %}{{ s.count('a' * 99999 ~ 'b') }}" * 99,
}  # fmt: skip
CONFIG: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 8, "hidden_size": 4, "intermediate_size": 6, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 16, "tie_word_embeddings": True,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 8, "rope_theta": 1e4}
CONFIGS: dict[str, dict[str, Any]] = {
    "a billion layers": {"num_hidden_layers": 10**9},
    "a billion layers with windows": {"model_type": "mistral", "sliding_window": 4, "num_hidden_layers": 10**9},
    "a million layers": {"num_hidden_layers": 10**6},
    "a trillion tokens": {"vocab_size": 10**12},
    "wide": {"hidden_size": 10**12},
    "wide heads": {"head_dim": 2**40},
    "many heads": {"num_attention_heads": 2**40, "head_dim": 2**40},
    "4300 digits": {"vocab_size": 10**4000},
    "4300 digits of theta": {"rope_theta": 10**4000},
    "no layers": {"num_hidden_layers": -1},
    "NaN": {"rms_norm_eps": float("nan")},
    "NaN in yarn": {"rope_parameters": {**YARN, "attention_factor": float("nan")}},
    "theta of 1": {"rope_parameters": {**YARN, "rope_theta": 1.0}},
    "tiny beta": {"rope_parameters": {**YARN, "beta_fast": 1e-320}},
    "equal factors": {"rope_parameters": {**YARN, "rope_type": "llama3", "low_freq_factor": 4, "high_freq_factor": 4}},
    "text": {"hidden_size": "4"},
    "lists": {"layer_types": 5, "model_type": "qwen3", "sliding_window": 4, "use_sliding_window": True},
    "gpt2 with a billion layers": {"model_type": "gpt2", "n_layer": 10**9, "n_embd": 4, "n_head": 2, "n_positions": 8},
    "gpt2 with a trillion tokens": {"model_type": "gpt2", "n_layer": 1, "n_embd": 4, "n_head": 2, "vocab_size": 10**12},
    "gpt2 with long positions": {"model_type": "gpt2", "n_layer": 1, "n_embd": 4, "n_head": 2, "n_positions": 10**9},
}  # fmt: skip
ADAPTER = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
LAYER = "base_model.model.model.layers.0.self_attn.q_proj"
ADAPTERS: dict[str, dict[str, Any]] = {
    "NaN for alpha": {"lora_alpha": float("nan")},
    "infinite alpha": {"lora_alpha": float("inf")},
    "NaN in a pattern": {"alpha_pattern": {"q_proj": float("nan")}},
    "NaN for dropout": {"lora_dropout": float("nan")},
    "half a rank": {"r": 2.5},
    "a slow rank pattern": {"rank_pattern": {"(.*)*(.*)*zz": 2}},
    "a slow alpha pattern": {"alpha_pattern": {"((m|o|d|e|l|.)+)+!": 2}},
    "another slow one": {"rank_pattern": {"(.|.)*zz": 2}},
    "layers of its own": {"modules_to_save": 5},
    "a list for its base": {"base_model_name_or_path": ["x"]},
    "a number for its bias": {"bias": 3},
}
SPLIT = {"type": "Split", "behavior": "Isolated", "invert": False}
TOKENIZERS: dict[str, dict[str, Any]] = {
    "a slow pattern": {"pre_tokenizer": {**SPLIT, "pattern": {"Regex": "(a+)+$"}}},
    "another slow one": {"pre_tokenizer": {**SPLIT, "pattern": {"Regex": "(?:o|oo)+Z$"}}},
    "a slow normalizer": {"normalizer": {"type": "Replace", "pattern": {"Regex": "(x|xx)+$"}, "content": "y"}},
    "growth": {"normalizer": {"type": "Sequence", "normalizers": [
        {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 999}] * 9}, "pre_tokenizer": {
            **SPLIT, "pattern": {"Regex": "a"}}},
    "half a charsmap": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAAAAAA"}},
    "no charsmap": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": ""}},
    "a token that is not there": {"post_processor": {"type": "TemplateProcessing", "single": [
        {"SpecialToken": {"id": "zz", "type_id": 0}}], "pair": [], "special_tokens": {}}},
    "cuts that overlap": {"truncation": {
        "direction": "Right", "max_length": 1, "strategy": "LongestFirst", "stride": 9}},
    "a list for a model": {"model": [1]},
}  # fmt: skip
NAMES: dict[str, str] = {
    "an id of 5000 digits": '{"eos_token": "<eos>", "added_tokens_decoder": {"%s": {"content": "<x>"}}}' % ("9" * 5000),
    "half of a surrogate": '{"eos_token": "<eos>", "pad_token": "\\ud800"}',
    "a list for a name": '{"eos_token": "<eos>", "chat_template": [{"name": ["x"], "template": "y"}]}',
}
TRAP = """
from pathlib import Path
Path("@FOLDER@/it_ran").write_text("ran")
from transformers import PreTrainedTokenizerFast, GPT2Config, GPT2LMHeadModel
class Words(PreTrainedTokenizerFast): pass
class Config(GPT2Config): model_type = "trapped"
class Model(GPT2LMHeadModel): config_class = Config
"""
MAP = {"AutoConfig": "trap.Config", "AutoModelForCausalLM": "trap.Model", "AutoTokenizer": ["trap.Words", "trap.Words"],
       "AutoModelForSequenceClassification": "trap.Model"}  # fmt: skip
Files = dict[str, bytes | dict[str, Any]]
Work = Callable[[Path], object]


def tried(files: Files, work: Work, *, taken: bool) -> str | None:
    """What came out that may not. taken: the right result is as good as a refusal."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        for name, content in files.items():
            text = content if isinstance(content, bytes) else json.dumps(content).encode()
            (folder / name).write_bytes(text.replace(b"@FOLDER@", str(folder).encode()))
        said = in_a_child(lambda: outcome(work, folder))
    return None if said in (("refused", "taken") if taken else ("refused",)) else said


def outcome(work: Work, folder: Path) -> str:
    """In the child: what became of the work."""
    before, said = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, "taken"
    try:
        work(folder)
    except HoneError as error:
        text = str(error)
        said = "two lines" if "\n" in text else "too long" if len(text) > 1500 else "refused"
    except BaseException as error:  # Rust's panics are no Exception
        said = f"{type(error).__name__}: {error}"[:150]
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    if (folder / "it_ran").exists():
        return "the code beside it ran"
    return f"it took {grown:.0f} MB" if grown > GROWTH else said


def in_a_child(work: Callable[[], str]) -> str:
    """What the work says in a forked child with limits, where somebody answers yes to every question."""
    out, into = os.pipe()
    child = os.fork()
    if not child:
        try:
            resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
            resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
            sys.stdin = io.StringIO("y\n" * 9)
            quiet = os.open(os.devnull, os.O_WRONLY)
            os.dup2(quiet, 1)
            os.dup2(quiet, 2)
            os.write(into, work().encode())
        finally:
            os._exit(0)
    os.close(into)
    with os.fdopen(out, "rb") as said:
        text = said.read().decode()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return text or f"the process was ended ({signal.Signals(-code).name if code < 0 else code})"


def render_one(template: str) -> None:
    made = replace(train_bpe(["a few words"], vocab_size=270), chat_template=template)
    render(made, [{"role": "user", "content": "hello"}])


def weights() -> bytes:
    return (CORPUS / "safetensors" / "whole").read_bytes()


def adapter_weights() -> bytes:
    pair = {
        f"{LAYER}.lora_A.weight": np.ones((2, 4), np.float32),
        f"{LAYER}.lora_B.weight": np.ones((4, 2), np.float32),
    }
    return save(pair)


def some(things: dict[str, Any], quick: bool) -> dict[str, Any]:
    """A few of them, spread, for a quick trial."""
    return {name: things[name] for name in list(things)[:: max(1, len(things) // 2)]} if quick else things


def cases(quick: bool) -> Iterator[Case]:
    """Every case, a child each; quick: some of each kind."""
    yield from islice(_code(), 3 if quick else None)
    for name, text in some(TEMPLATES, quick).items():
        yield _case(
            "chat templates that grow or do not end", name, {}, lambda _, text=text: render_one(text), taken=True
        )
    for name, change in some(CONFIGS, quick).items():
        files: Files = {"config.json": {**CONFIG, **change}, "model.safetensors": weights()}
        yield _case("config.json with absurd sizes and wrong types", name, files, load_decoder)
    for name, change in some(ADAPTERS, quick).items():
        files = {"adapter_config.json": {**ADAPTER, **change}, "adapter_model.safetensors": adapter_weights()}
        yield _case("configs of adapters", name, files, read_peft)
    yield from _tokenizers(quick)


def _case(group: str, name: str, files: Files, work: Work, *, taken: bool = False) -> Case:
    return Case(group, name, lambda: tried(files, work, taken=taken))


def _tokenizers(quick: bool) -> Iterator[Case]:
    split = json.loads((CORPUS / "tokenizer" / "split").read_bytes())
    named: Files = {"tokenizer_config.json": {"eos_token": "<eos>"}}
    text = "a" * 3000 + "o" * 3000 + "x" * 3000 + "!"
    for name, change in some(TOKENIZERS, quick).items():
        files: Files = {**named, "tokenizer.json": {**split, **change}}
        taken = name.startswith(("cuts", "a token"))
        yield _case("tokenizer files", name, files, lambda folder: Tokenizer.load(folder).encode(text), taken=taken)
    for name, content in some(NAMES, quick).items():
        files = {"tokenizer_config.json": content.encode(), "tokenizer.json": split}
        yield _case("tokenizer files", name, files, Tokenizer.load, taken=name.startswith("a list"))


def _code() -> Iterator[Case]:
    """Code beside the files."""
    trap = {f"{name}.py": TRAP.encode() for name in ("trap", "tokenization_trap", "modeling_trap")}
    words = {"tokenizer_class": "Words", "auto_map": {"AutoTokenizer": MAP["AutoTokenizer"]}, "eos_token": "<e>"}
    group = "code that lies beside a model"
    beside: Files = {**trap, "tokenizer_config.json": words, "model.gguf": (CORPUS / "gguf" / "pieces").read_bytes()}
    for kind in ("llama", "trapped"):
        files: Files = {**beside, "config.json": {"model_type": kind, "auto_map": MAP}}
        yield _case(group, f"beside a GGUF file, {kind}", files, lambda f: load_gguf(f / "model.gguf"), taken=True)
    old: Files = {"vocab.json": {"a": 0, "b": 1, "<e>": 2}, "merges.txt": b"#version: 0.2\n"}
    config = {**CONFIG, "model_type": "trapped", "auto_map": MAP}
    for name in ("Words", "GPT2Tokenizer", "trap.Words"):
        files = {**trap, **old, "config.json": config, "tokenizer_config.json": {**words, "tokenizer_class": name}}
        yield _case(group, f"an old tokenizer, {name}", files, Tokenizer.load, taken=True)
    files = {**trap, "config.json": config, "model.safetensors": weights()}
    yield _case(group, "a language model", files, load_decoder)
    files = {**files, "config.json": {**config, "architectures": ["XForSequenceClassification"]}}
    yield _case(group, "a classifier", files, load_scorer)
