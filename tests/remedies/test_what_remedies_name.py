"""What a message tells a user to type exists: settings and the values they take, commands, options, extras, pages."""

import argparse
import importlib
import re
import tomllib
from collections.abc import Iterator

from sites import GAP, ROOT, SOURCE, strings

from hone.cli import build_parser
from hone.config.overrides import override
from hone.config.recipe import Recipe
from hone.errors import HoneError

GROUPS = "model|sample|train|read|optim|lora|critic|process|save|limits"
SETTING = re.compile(rf"(?<![\w./\"'])({GROUPS})\.([a-z_]+)(?:=([\w.:-]+))?(?![\w/(])")
# names of files and of other programs' settings, which only look like settings of a recipe
NO_SETTING = re.compile(r"\.(py|safetensors|json|jsonl|gguf|txt|bin|html|jinja|embed_tokens|layers|norm)\b")


def parsers(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Every command, as it is typed, with its parser."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, inner in action.choices.items():
                yield name, inner
                yield from ((f"{name} {deeper}", found) for deeper, found in parsers(inner))


def test_every_setting_that_a_text_names_exists_and_takes_the_value():
    wrong, seen = set[str](), 0
    for text in strings():
        for found in SETTING.finditer(text):
            name, value = f"{found[1]}.{found[2]}", (found[3] or "").rstrip(".,:;")
            rest = text[found.end() :]
            if NO_SETTING.search(found[0]) or found[3] == "value" or re.match(rf"{re.escape(GAP)}|\.\w", rest):
                continue
            seen += 1
            try:
                held: object = Recipe()
                for part in name.split("."):
                    held = getattr(held, part)
                if value and value.isascii() and not value.isupper() and GAP not in value:
                    override(Recipe(), [f"{name}={value}"])
            except (AttributeError, HoneError) as error:
                wrong.add(f"{name}={value}: {error} in {text[:90]!r}")
    assert wrong == set()
    assert seen > 100


def test_every_command_that_a_text_names_exists():
    known = {name for name, _ in parsers(build_parser())}
    wrong, seen = set[str](), 0
    for text in strings():
        for found in re.finditer(r"`hone ([a-z-]+)(?: ([a-z-]+))?", text):
            seen += 1
            if found[1] not in known:
                wrong.add(f"hone {found[1]} in {text[:80]!r}")
    assert wrong == set()
    assert seen > 20


def test_every_option_that_a_message_names_is_one_of_a_command():
    known = {
        option
        for _, parser in parsers(build_parser())
        for action in parser._actions
        for option in action.option_strings
    }
    known |= {"--debug", "--version", "--nproc-per-node", "--max-restarts"}  # of hone itself, and torchrun's
    wrong = set[str]()
    for text in strings():
        if " " not in text or text.startswith("-") or ":root{" in text:  # of another program, or of a page
            continue
        for option in re.findall(r"(?<![\w-])--[a-z][a-z-]+", text):
            if option not in known:
                wrong.add(f"{option} in {text[:80]!r}")
    assert wrong == set()


def test_every_extra_that_a_text_names_is_one_of_the_package():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = {found for text in strings() for found in re.findall(r"hone\[(\w+)\]", text)}
    assert named <= extras.keys()
    assert len(named) > 5


def test_every_target_variable_page_and_name_that_a_text_names_exists():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    whole = "\n".join(path.read_text() for path in SOURCE.rglob("*.py"))
    wrong = set[str]()
    for text in strings():
        wrong |= {f"make {name}" for name in re.findall(r"`make ([a-z-]+)", text) if name not in targets}
        wrong |= {page for page in re.findall(r"\bdocs/\w+\.md", text) if not (ROOT / page).exists()}
        for variable in re.findall(r"\bHONE_[A-Z]+\b", text):
            wrong |= set() if f'"{variable}"' in whole else {variable}
        for name in re.findall(r"\bhone\.[a-z_]+\.[a-z_]+\b(?!/)", text):
            wrong |= set() if _is_there(name) else {name}
    assert wrong == set()


def _is_there(name: str) -> bool:
    """Whether it is a module, or a name of one."""
    module, _, last = name.rpartition(".")
    try:
        return hasattr(importlib.import_module(module), last) or bool(importlib.import_module(name))
    except ImportError:
        return False
