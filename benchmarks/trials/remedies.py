"""E5 and E6: preference files and plain text feed every algorithm, and the remedy that an error states is the fix."""

import atexit
import contextlib
import importlib
import io
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.trials.case import Case, expect

TITLE = "Preference files, plain text, and remedies that are followed"
ROOT = Path(__file__).parents[2]
HARMLESS = ROOT.parent / "shared" / "data" / "hh_harmless" / "test.jsonl.gz"
SECONDS = 30  # a case may take: the code before waits for ever at a pipe
USER, BOT = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}
RIVAL = {"role": "assistant", "content": "no"}
ENGLISH = "The old house by the river had been empty for years, and the children of the village said it was haunted. "
HH = {"chosen": "\n\nHuman: hi\n\nAssistant: ho", "rejected": "\n\nHuman: hi\n\nAssistant: no"}
CHATS = {"chosen": [USER, BOT], "rejected": [USER, RIVAL]}
BLANK = {**HH, "chosen": "\n\nHuman: hi\n\nAssistant: "}
ASKED = "\n\nHuman: hi\n\nAssistant:"
TEXTS = {"chosen": "Question: 1+1?\nAnswer: it is 2", "rejected": "Question: 1+1?\nAnswer: it is 3"}
PAIR = {"prompt": "1+1=", "chosen": "2", "rejected": "3"}
PLAIN_ROWS: dict[str, dict[str, Any]] = {  # what a model without a chat template can be trained on
    "pretrain": {"text": "some words"},
    "sft": {"prompt": "a", "completion": "b"},
    "dpo": PAIR,
    "reward_model": HH,
    "kto": {"prompt": "a", "completion": "b", "label": True},
    "grpo": {"prompt": "a", "answer": "b"},
    "ppo": {"prompt": "a"},
    "orpo": HH,
    "simpo": TEXTS,
    "online_dpo": HH,
    "rloo": TEXTS,
}


@cache
def tokenizer(chat: bool) -> Any:
    from hone.data.text.chat import CHAT_SPECIALS, DEFAULT_TEMPLATE
    from hone.data.text.tokenizer import train_bpe

    if not chat:
        return train_bpe([], vocab_size=258)
    made = train_bpe([], vocab_size=258 + len(CHAT_SPECIALS), specials=CHAT_SPECIALS)
    return replace(made, chat_template=DEFAULT_TEMPLATE)


def fed(data: Any, algo: str, *, chat: bool, context: int = 4096, **read: Any) -> list[Any]:
    """All that a run with this algorithm would read."""
    from hone.algo import ALGORITHMS
    from hone.config.overrides import Choice
    from hone.config.recipe import ReadSpec, Recipe
    from hone.launch import feeds

    recipe = Recipe(data=data, algo=Choice(algo), read=ReadSpec(**read))
    loaded = feeds.feed(recipe, ALGORITHMS[algo](), tokenizer(chat), context=context)
    return loaded.feed.take(len(loaded.feed))


def prompts(row: dict[str, Any], algo: str, chat: bool, wanted: Any) -> str | None:
    return expect([task.prompt for task in fed([row], algo, chat=chat)], [wanted])


def unpaired(row: dict[str, Any], algo: str, chat: bool) -> str | None:
    return expect(sorted(group[0].label for group in fed([row, row], algo, chat=chat)), [0.0, 0.0, 1.0, 1.0])


def chosen(row: dict[str, Any], chat: bool) -> str | None:
    (group,) = fed([row], "sft", chat=chat)
    return expect(tokenizer(chat).decode(group[0].written()).strip().startswith("ho"), True)


def read_at_all(row: dict[str, Any], algo: str) -> str | None:
    return None if fed([row, row], algo, chat=False) else "nothing was read"


def blank_reply(algo: str, chat: bool) -> str | None:
    """`Assistant: ` and nothing more is left out, whether the dialogue stays text or becomes messages."""
    count = 2 if algo == "kto" else 1
    return expect(len(fed([HH, BLANK, HH], algo, chat=chat, skip_bad=True)), 2 * count + count // 2)


def harmless(algo: str, chat: bool) -> str | None:
    """All dialogues of the file; four of their replies are empty, which only matters to who reads replies."""
    found = fed(str(HARMLESS), algo, chat=chat, context=10**6, skip_bad=True)
    return None if len(found) >= 2308 else f"only {len(found)} rows"


@cache
def world() -> Any:
    """The models and rows that the cases of tests/remedies use."""
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "remedies")]
    made = tempfile.mkdtemp(prefix="remedies-")
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    return importlib.import_module("remedy_world").make_world(Path(made))


def followed(case: Any) -> str | None:
    """The error comes, has the words that are followed, and what follows them works."""
    before = signal.signal(signal.SIGALRM, _late)
    signal.alarm(SECONDS)
    try:
        return importlib.import_module("remedy_world").outcome(case, world())[1] or None
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def _late(*_: object) -> None:
    raise TimeoutError(f"it takes more than {SECONDS} s")


def cleaned(module: str) -> str | None:
    """`hone corpus clean` without a package: one line that says how to get it, and no folder."""
    from hone.cli import main

    out, err = Path(world() / "cleaned"), io.StringIO()
    kept = {name: sys.modules.pop(name) for name in [*sys.modules] if name.partition(".")[0] == module}
    sys.modules[module] = None  # pyright: ignore[reportArgumentType]
    try:
        with contextlib.redirect_stderr(err), contextlib.redirect_stdout(io.StringIO()):
            main(
                [
                    "corpus",
                    "clean",
                    world().rows([{"text": ENGLISH}]),
                    "--out",
                    str(out),
                    "--workers",
                    "1",
                    "--no-quality",
                ]
            )
    finally:
        del sys.modules[module]
        sys.modules.update(kept)
    left = out.exists()
    shutil.rmtree(out, ignore_errors=True)
    if len(err.getvalue().splitlines()) != 1 or 'pip install "hone[corpus]"' not in err.getvalue():
        return f"says {err.getvalue()!r}"
    return "a folder is left behind" if left else None


def online() -> list[str]:
    from hone.algo import ALGORITHMS

    return sorted(name for name, make in ALGORITHMS.items() if make().online)


def dialogues(quick: bool) -> Iterator[Case]:
    """Pairs of whole dialogues online: with a template transcripts become chats, without one they stay text."""
    forms: list[tuple[str, dict[str, Any], bool, Any]] = [
        ("HH-RLHF, no template", HH, False, ASKED),
        ("HH-RLHF, a template", HH, True, [USER]),
        ("messages, a template", CHATS, True, [USER]),
        ("texts, no template", TEXTS, False, "Question: 1+1?\nAnswer:"),
        ("texts, a template", TEXTS, True, "Question: 1+1?\nAnswer:"),
    ]
    for algo in online()[:: 5 if quick else 1]:
        for name, row, chat, asked in forms:
            group = "pairs of whole dialogues feed online algorithms"
            yield Case(group, f"{algo}: {name}", partial(prompts, row, algo, chat, asked))


def replies() -> Iterator[Case]:
    """Pairs for who reads single replies."""
    forms = (("HH-RLHF", HH, False), ("HH-RLHF, a template", HH, True), ("chats", CHATS, True))
    for algo in ("kto", "pointwise_reward_model"):
        for name, row, chat in (("pairs", PAIR, False), *forms):
            group = "pairs feed KTO and pointwise models, unpaired"
            yield Case(group, f"{algo}: {name}", partial(unpaired, row, algo, chat))
    for algo, chat in product(("dpo", "reward_model", "sft", "kto"), (False, True)):
        name = f"{algo}, {'a' if chat else 'no'} template"
        yield Case("a reply that is blank is left out", name, partial(blank_reply, algo, chat))
    for name, row, chat in forms:
        yield Case("pairs feed SFT with the chosen reply", name, partial(chosen, row, chat))


def cases(quick: bool) -> Iterator[Case]:
    yield from dialogues(quick)
    yield from replies()
    for algo, row in PLAIN_ROWS.items():
        yield Case("a model without a chat template reads text", algo, partial(read_at_all, row, algo))
    if HARMLESS.exists() and not quick:
        for algo in ("reward_model", "dpo", "kto", "ppo", "grpo", "rloo", "online_dpo", "sft"):
            for chat in (False, True):
                name = f"{algo}, {'a' if chat else 'no'} template"
                yield Case("hh_harmless as it is", name, partial(harmless, algo, chat))
    world()
    for module in ("py3langid", "profanity_check", "rensa"):
        yield Case("cleaning a corpus without its packages leaves nothing", module, partial(cleaned, module))
    for name, kind in (("settings", "SETTINGS"), ("data", "DATA"), ("commands", "COMMANDS"), ("calls", "CALLS")):
        tried = getattr(importlib.import_module(f"cases_{name}"), kind)
        for n, case in enumerate(tried[:: 9 if quick else 1]):
            yield Case(f"remedies followed: {name}", f"{n} {case.says}", partial(followed, case))
