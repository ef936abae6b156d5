"""What the cases need: a model of a few kilobytes with and without a chat template, rows of every shape, and three
ways to be told a remedy: a run that is prepared, a command, a call."""

import contextlib
import io
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from places import Place, decoder, write_rows

from hone.cli import main
from hone.config.overrides import Choice, override
from hone.config.recipe import ModelSpec, Recipe, SampleSpec, TrainSpec
from hone.config.rules import validate
from hone.data.text.chat import CHAT_SPECIALS, DEFAULT_TEMPLATE
from hone.data.text.tokenizer import Tokenizer, train_bpe
from hone.errors import HoneError
from hone.launch.job import prepare
from hone.model.formats.save import save_model
from hone.model.scorer import Scorer

REWARDS = '''\
"""Rewards for the cases."""


def length(completion):
    return len(completion) % 5 / 5


def raises(completion):
    raise RuntimeError("broken")


def few(completions):
    return [0.0]


def one_each(completions):
    return [0.0 for _ in completions]


def strange(gold):
    return 1.0
'''
ROWS: dict[str, list[dict[str, Any]]] = {
    "text": [{"text": f"{a} and {a + 1} make {2 * a + 1}"} for a in range(7)],
    "answers": [{"prompt": f"{a}+{a}=", "completion": f"{2 * a}"} for a in range(7)],
    "pairs": [{"prompt": f"{a}+{a}=", "chosen": f"{2 * a}", "rejected": f"{2 * a + 1} no"} for a in range(7)],
    "labels": [{"prompt": f"{a}+{a}=", "completion": f"{2 * a + a % 2}", "label": a % 2 == 0} for a in range(7)],
    "scores": [{"prompt": f"{a}+{a}=", "completion": f"{2 * a}", "score": a / 7} for a in range(7)],
    "steps": [{"prompt": f"{a}?", "steps": ["one", f"two {a}"], "step_labels": [1, a % 2]} for a in range(7)],
    "problems": [{"prompt": f"{a}+{a}=", "answer": str(2 * a)} for a in range(7)],
    "asked": [{"question": f"{a}+{a}=", "result": str(2 * a)} for a in range(7)],
    "results": [{"prompt": f"{a}+{a}=", "result": str(2 * a)} for a in range(7)],
    "chats": [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}],
}
DATA = {
    "pretrain": "text", "sft": "answers", "kto": "labels", "dpo": "pairs", "ipo": "pairs", "reward_model": "pairs",
    "pointwise_reward_model": "scores", "process_reward_model": "steps",
}  # fmt: skip


class World(Place):
    """Where everything is; `new` names a file or folder that no case has used."""

    used = 0

    def new(self, suffix: str = "") -> str:
        World.used += 1
        return self / f"new-{World.used}{suffix}"

    def rows(self, rows: Sequence[dict[str, Any]], suffix: str = ".jsonl") -> str:
        return write_rows(self.new(suffix), rows)

    def file(self, content: str | bytes, suffix: str) -> str:
        path = Path(self.new(suffix))
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return str(path)

    def folder_of(self, name: str) -> Path:
        """A copy of a model's folder, to be damaged."""
        made = Path(self.new())
        made.mkdir()
        for path in Path(self / name).iterdir():
            (made / path.name).write_bytes(path.read_bytes())
        return made


def make_world(folder: Path) -> World:
    torch.set_num_threads(1)
    for name, rows in ROWS.items():
        write_rows(folder / f"{name}.jsonl", rows)
    plain = train_bpe([], vocab_size=258)
    size = 258 + len(CHAT_SPECIALS)
    chat = replace(train_bpe([], vocab_size=size, specials=CHAT_SPECIALS), chat_template=DEFAULT_TEMPLATE)
    plain.save(folder / "tokenizer")
    save_model(decoder(258), plain, folder / "model")
    save_model(decoder(size, context=96), chat, folder / "chat")
    save_model(decoder(258, seed=2), plain, folder / "teacher")
    with torch.random.fork_rng():
        torch.manual_seed(1)
        save_model(Scorer(decoder(258, seed=1)), plain, folder / "scorer")
        save_model(Scorer(decoder(258, seed=1), kind="step"), plain, folder / "judge")
    (folder / "rewards.py").write_text(REWARDS)
    return World(folder)


def recipe(world: World, algo: str, *settings: str) -> Recipe:
    """Two steps of the algorithm."""
    base = Recipe(
        name="small",
        out=world.new(),
        model=ModelSpec(path=world / "model"),
        data=world / f"{DATA.get(algo, 'problems')}.jsonl",
        reward=world / "rewards.py:length",
        teacher=world / "teacher" if algo == "distil" else "",
        algo=Choice(algo),
        sample=SampleSpec(group=2, max_tokens=4),
        train=TrainSpec(steps=2, prompts=2),
    )
    return override(base, [setting.replace("WORLD", str(world.folder)) for setting in settings])


def prepared(world: World, algo: str, *settings: str, **python: Any) -> None:
    """All that a run does before its first step."""
    made = replace(recipe(world, algo, *settings), **python)
    validate(made)
    prepare(made)


def typed(world: World, *words: str, folder: Path | None = None) -> str:
    """A command; what it printed, or HoneError with the line it ended with."""
    out, err = io.StringIO(), io.StringIO()
    before = Path.cwd()
    os.chdir(folder or world.folder)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main([word.replace("WORLD", str(world.folder)) for word in words])
    finally:
        os.chdir(before)
    if code:
        lines = err.getvalue().splitlines() or [""]
        raise HoneError(lines[-1]) if code == 2 else AssertionError(f"exit code {code}: {lines[-1]}")
    return out.getvalue()


@dataclass(frozen=True, slots=True)
class Case:
    """`wrong` must raise HoneError whose message has `says`; `right` does what that says, and must end well."""

    says: str
    wrong: Callable[[World], Any]
    right: Callable[[World], Any]


def settings(algo: str, wrong: str, right: str, says: str) -> Case:
    """Settings that are refused, and with those that the message names added to them."""
    both = [*wrong.split(), *right.split()]
    return Case(says, lambda w: prepared(w, algo, *wrong.split()), lambda w: prepared(w, algo, *both))


def instead(algo: str, wrong: str, right: str, says: str) -> Case:
    """Settings that are refused, and others in their place."""
    return Case(says, lambda w: prepared(w, algo, *wrong.split()), lambda w: prepared(w, algo, *right.split()))


def rows(algo: str, wrong: Any, right: Any, says: str, *more: str) -> Case:
    """Rows that are refused, and as the message asks for them; where those are text, the settings that it names."""

    def given(world: World, written: Any) -> None:
        data = wrong if isinstance(written, str) else written
        path = world.rows(data if isinstance(data, list) else [data])
        named = written.split() if isinstance(written, str) else []
        prepared(world, algo, f"data={path}", *more, *named)

    return Case(says, lambda w: given(w, wrong), lambda w: given(w, right))


def command(wrong: str, right: str, says: str) -> Case:
    """A command that is refused, and as the message asks for it."""
    return Case(says, lambda w: typed(w, *wrong.split()), lambda w: typed(w, *right.split()))


def call(wrong: Callable[[World], Any], right: Callable[[World], Any], says: str) -> Case:
    return Case(says, wrong, right)


def given(use: Callable[[World, Any], Any], wrong: Any, right: Any, says: str) -> Case:
    """One call with a value that is refused, and with what the message asks for in its place."""
    return Case(says, lambda w: use(w, wrong), lambda w: use(w, right))


def lacks(module: str, use: Callable[[World], Any], says: str) -> Case:
    """A call on a machine where a package is not installed, and on this one, where it is."""

    def without(world: World) -> None:
        # also what another package has of that name, as torch.utils.tensorboard: it would be found without the package
        held = {name: sys.modules.pop(name) for name in [*sys.modules] if module in name.split(".")}
        sys.modules[module] = cast(Any, None)  # an import of it fails, as where it is absent
        try:
            use(world)
        finally:
            sys.modules.pop(module)
            sys.modules.update(held)

    return Case(says, without, use)


def outcome(case: Case, world: World) -> tuple[str, str]:
    """The message that was raised, and what was wrong with the case, "" where the remedy works."""
    try:
        case.wrong(world)
        return "", "nothing was refused"
    except HoneError as error:
        message = str(error)
    except Exception as error:
        return "", f"ends with {type(error).__name__}: {error}"
    if case.says not in message:
        return message, f"says {message!r}"
    try:
        case.right(world)
    except Exception as error:
        return message, f"its remedy ends with {type(error).__name__}: {error}"
    return message, ""


def tokenizer(world: World, name: str = "model") -> Tokenizer:
    return Tokenizer.load(world / name)
