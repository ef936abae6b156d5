"""What a new user met in `hone check`, `hone eval`, `hone algos` and the recipes."""

import contextlib
import io
import json
import os
import resource
import tempfile
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.trials.case import Case, expect, hone
from hone.algo import ALGORITHMS
from hone.check import suite
from hone.cli import main
from hone.config.load import load_recipe
from hone.config.overrides import Choice, override, settings_of
from hone.config.recipe import ModelSpec, OptimSpec, Recipe, SampleSpec, TrainSpec
from hone.data.text.tokenizer import Tokenizer, train_bpe
from hone.model.config import DecoderConfig
from hone.model.decoder import Decoder
from hone.model.formats.save import save_model

TITLE = "What a new user met in hone check, hone eval, hone algos and the recipes"
DATA = Path(__file__).parents[3] / "shared" / "data"
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WRONG_STOPS = ("5", "0", "9", "a", "e", "Z", ".", ",", "<|im_start|>", "<unk>", "<s>")
RATES = ("0.5", "1.0", "3.0", "30", "1000")
REAL = """
from hone import Choice, LoraSpec, ModelSpec, OptimSpec, ReadSpec, Recipe, SampleSpec, TrainSpec

SHARED = dict(model=ModelSpec(path="smollm2-135m"), data="gsm8k:train", read=ReadSpec(overlong="drop"))
TRAIN = TrainSpec(steps=100, prompts=8, device="cpu")


def sft():
    return Recipe(name="sft", algo=Choice("sft"), optim=OptimSpec(lr=2e-5), train=TRAIN, **SHARED)


def lora():
    optim = OptimSpec(lr=1e-4, warmup=5)
    return Recipe(name="lora", algo=Choice("sft"), lora=LoraSpec(rank=8), optim=optim, train=TRAIN, **SHARED)


def grpo():
    sample, optim = SampleSpec(group=8, max_tokens=256), OptimSpec(lr=1e-6)
    return Recipe(name="grpo", reward="math", algo=Choice("grpo"), sample=sample, optim=optim, train=TRAIN, **SHARED)
"""
STARTS = {  # the command that makes what a recipe lacks first; the last two are given a model
    "grpo": "hone demo", "sft": "hone demo", "pretrain": "hone demo", "distil": "hone demo", "reward": "hone demo",
    "pretrain_tinyshakespeare": "hone corpus clean", "process": "hone label-steps", "ppo_process": "hone run process",
}  # fmt: skip
SECONDS = 20  # CPU seconds of `hone check` on a model of 135 million weights


@cache
def world() -> Path:
    """Rows, and a small model of random weights that never stops by itself."""
    folder = Path(tempfile.mkdtemp(prefix="hone-newcomer-"))
    rows = {
        "chats": [{"prompt": [{"role": "user", "content": f"{a}+{a}"}], "answer": str(2 * a)} for a in range(8)],
        "problems": [{"prompt": f"{a}+{a}=\n", "answer": str(2 * a)} for a in range(8)],
        "answers": [{"prompt": f"{a}+{a}=\n", "completion": f"{2 * a}. Yes"} for a in range(8)],
        "pairs": [{"prompt": f"{a}+{a}=\n", "chosen": f"{2 * a}", "rejected": f"{2 * a + 1} no"} for a in range(8)],
    }
    for name, some in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))
    (folder / "real.py").write_text(REAL)
    model(folder / "model", eos="<|im_end|>")
    return folder


def model(folder: Path, *, eos: str) -> Path:
    """With the stop token that its tokenizer names."""
    names = ["<|im_start|>", "<|im_end|>", "<unk>", "<s>"]
    inner = train_bpe([], vocab_size=258 + len(names), specials=names).inner
    tokenizer = Tokenizer(inner, eos=eos, chat_template=CHATML)
    config = DecoderConfig(
        vocab_size=tokenizer.vocab_size, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=160, initializer_range=0.2,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        save_model(Decoder(config), tokenizer, folder)
    return folder


def right(completion: str, task: Any) -> float:
    """A reward that differs from one completion of random weights to the next."""
    return float(f"<answer>{task.answer}</answer>" in completion) + sum(completion.encode()) % 7 / 70


def recipe(algo: str, data: str, *settings: str, folder: Path | None = None) -> Recipe:
    made = Recipe(
        name="newcomer",
        out=str(world() / "never"),
        model=ModelSpec(path=str(folder or world() / "model")),
        data=str(world() / f"{data}.jsonl"),
        reward=right,
        algo=Choice(algo),
        sample=SampleSpec(group=4, max_tokens=6),
        train=TrainSpec(steps=4, prompts=4),
        optim=OptimSpec(lr=1e-3),
    )
    return override(made, settings)


def finding(made: Recipe, name: str) -> Any:
    with contextlib.redirect_stderr(io.StringIO()):
        return next(f for f in suite.check(made).findings if f.name == name)


def stop_token(eos: str, algo: str, data: str) -> str | None:
    """The check must fail, and name the token that the template ends a turn with."""
    folder = model(Path(tempfile.mkdtemp(dir=world())), eos=eos)
    found = finding(recipe(algo, data, folder=folder), "stop token")
    if found.verdict != "fail":
        return f"{found.verdict}: {found.seen}"
    return None if "<|im_end|>" in found.remedy else f"the remedy is {found.remedy!r}"


def rate(value: str, algo: str, data: str, *more: str) -> str | None:
    """The check must fail, and the rate that its remedy names must pass."""
    found = finding(recipe(algo, data, f"optim.lr={value}", *more), "one step")
    if found.verdict != "fail":
        return f"{found.verdict}: {found.remedy}"
    better = found.remedy.partition(";")[0].removeprefix("set ")
    return expect(finding(recipe(algo, data, better, *more), "one step").verdict, "pass")


def said(*words: str) -> str:
    """What the command prints, to either stream."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        main(list(words))
    return out.getvalue()


def contains(words: tuple[str, ...], *expected: str) -> str | None:
    text = said(*words)
    return next((f"{one!r} is not in {text[:160]!r}" for one in expected if one not in text), None)


def explained(algorithm: str, name: str) -> str | None:
    """The setting's name is followed by more than its default: its meaning, and when to change it."""
    lines = said("algos", algorithm).splitlines()
    at = next(i for i, line in enumerate(lines) if line.strip().removeprefix("algo.").startswith(name))
    block = " ".join(line.strip() for line in lines[at + 1 : at + 6])
    return None if "change: " in block else f"only {lines[at].strip()!r}"


def follows_generation_config() -> str | None:
    folder = model(Path(tempfile.mkdtemp(dir=world())), eos="<|im_end|>")
    config = (
        json.loads((folder / "generation_config.json").read_text())
        if (folder / "generation_config.json").exists()
        else {}
    )
    wanted = config | {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "max_new_tokens": 7}
    (folder / "generation_config.json").write_text(json.dumps(wanted))
    return contains(("eval", str(folder), str(world() / "problems.jsonl")), "temperature 0.6", "top_p 0.9", "7 tokens")


def affordable(name: str) -> str | None:
    """CPU seconds of the command and its children, system time included."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = hone("check", f"real.py:{name}", folder=world(), seconds=900)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    took = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    if done.returncode:
        return f"it ended with {done.returncode}: {done.stderr[-100:]}"
    return None if took <= SECONDS else f"{took:.0f} CPU seconds"


def starts_from(name: str, command: str) -> str | None:
    """In a folder without it the error names the command that makes it."""
    before = Path.cwd()
    os.chdir(tempfile.mkdtemp(dir=world()))
    try:
        given = [f"model.path={world() / 'model'}"] if name in ("process", "ppo_process") else []
        rows = [f"data={world() / 'problems.jsonl'}", "eval_data="] if name == "ppo_process" else []
        return contains(("run", name, *given, *rows), f"`{command}` makes it")
    finally:
        os.chdir(before)


def real_recipe(name: str) -> str | None:
    made = load_recipe(name)()
    return expect(made.model.path, "smollm2-135m")


def cases(quick: bool) -> Iterator[Case]:
    """Some of each group where it is quick."""
    some = slice(None, 3 if quick else None)
    for algo, data in (("grpo", "chats"), ("sft", "answers"), ("grpo", "problems"), ("dpo", "pairs"))[some]:
        for eos in WRONG_STOPS[some]:
            yield Case(
                "a stop token at which no model stops", f"{eos} {algo} {data}", partial(stop_token, eos, algo, data)
            )
    for algo, data in (("sft", "answers"), ("grpo", "problems"), ("dpo", "pairs"), ("ppo", "chats"))[some]:
        for value in RATES[some]:
            for more in ((), ("lora.rank=2",), ("optim.warmup=2",))[some]:
                yield Case(
                    "a learning rate that ruins a model",
                    f"{algo} {value} {more}",
                    partial(rate, value, algo, data, *more),
                )
    yield from _eval_cases()
    for algorithm, factory in list(ALGORITHMS.items())[slice(None, None, 4 if quick else None)]:
        for name in settings_of(factory):
            yield Case(
                "settings of algorithms that are explained", f"{algorithm}.{name}", partial(explained, algorithm, name)
            )
    yield Case("what is said of a2c", "A3C", lambda: "it is said" if "A3C" in said("algos") else None)
    for name, command in STARTS.items():
        yield Case("what a recipe starts from is named with its command", name, partial(starts_from, name, command))
    for name in ("grpo_gsm8k", "ppo_gsm8k", "dpo_smollm2"):
        yield Case("recipes for a real model", name, partial(real_recipe, name))
    if not quick and (DATA / "gsm8k").is_dir():
        os.environ.setdefault("HONE_DATA", str(DATA))
        for name in ("sft", "lora", "grpo"):
            yield Case("hone check on 135M weights in 20 CPU seconds", name, partial(affordable, name))


def _eval_cases() -> Iterator[Case]:
    folder, problems = str(world() / "model"), str(world() / "problems.jsonl")
    group = "hone eval: settings and advice"
    yield Case(
        group, "settings on the first line", partial(contains, ("eval", folder, problems), "temperature 0 ", "at most")
    )
    yield Case(group, "the model's generation config", follows_generation_config)
    for most in ("2", "4", "8"):
        words = ("eval", folder, problems, "--max-tokens", most)
        yield Case(group, f"cut at {most}", partial(contains, words, f"--max-tokens {2 * int(most)}"))
    for samples in ("2", "4", "5"):
        words = ("eval", folder, problems, "--samples", samples, "--max-tokens", "4")
        yield Case(group, f"majority of {samples}", partial(contains, words, f"maj@{samples}"))
    unset = partial(contains, ("settings", "sample.max_tokens"), "sample.max_tokens=0")
    yield Case(group, "no limit of 64 tokens that nobody set", unset)
