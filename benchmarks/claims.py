"""What the pages for readers claim, as far as a program can try it: commands, settings, names, paths and snippets.

Each check takes a page and yields what is wrong with it, a line each. They try the pages of the tree that Hone is
imported from. docs/dev/claims.md has the claims that were tried by hand.
"""

import ast
import importlib
import re
import shlex
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from functools import cache
from io import StringIO
from pathlib import Path

import hone

ROOT = Path(hone.__file__).parents[2]
PLACEHOLDER = re.compile(r"[A-Z][A-Z_.]*")  # RECIPE, FILE: for the reader to fill in
OPEN = {"reward", "parts", "read.columns"}  # settings whose keys are the user's own
DATED = {"log.md", "claims.md", "trial.md", "faults.md", "mutants.md"}  # what was found on a day; most by a program
OTHERS = ("trainer/", "experimental/", "rewards.py", "FILE.py")  # files of TRL, and of the reader
SHELLS = {"", "sh", "bash", "console", "text"}
Check = Callable[[Path], Iterator[str]]


def pages() -> list[Path]:
    """Those that say how things are."""
    found = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [page for page in found if page.name not in DATED]


@cache
def parts(page: Path) -> tuple[list[tuple[str, str]], list[str]]:
    """The page's blocks of code with their languages, and the spans of code between them."""
    text = page.read_text(encoding="utf-8")
    blocks = re.findall(r"(?ms)^```(\w*)\n(.*?)^```", text)
    rest = re.sub(r"(?ms)^```\w*\n.*?^```", "", text)
    blocks += [("", line.strip()) for line in re.findall(r"(?m)^    (\S.*)$", rest)]
    spans = [" ".join(span.split()) for span in re.findall(r"(?s)(?<!`)`([^`]+)`(?!`)", rest)]
    return blocks, spans


def command_lines(page: Path) -> list[list[str]]:
    """What follows `hone` wherever it is called, in words."""
    blocks, spans = parts(page)
    lines = [line for language, block in blocks if language in SHELLS for line in block.splitlines()]
    found = [words_after_hone(line) for line in [*lines, *spans] if not promised_refusal(line)]
    return [words for words in found if words]


def promised_refusal(line: str) -> str:
    """`hone run grpo optim.lrr=1  # no setting ...` says itself that it fails, and how."""
    comment = line.partition(" #")[2].strip()
    return comment if comment.startswith("no setting") else ""


def words_after_hone(line: str) -> list[str]:
    """`echo 1 | .venv/bin/hone chat X  # ask` -> chat X

    >>> words_after_hone("echo 1 | .venv/bin/hone chat X  # ask"), words_after_hone("hone.run is a function")
    (['chat', 'X'], [])
    """
    try:
        words = shlex.split(line.partition(" #")[0])
    except ValueError:  # a sentence with an apostrophe
        return []
    for number, word in enumerate(words):
        called = word in ("hone", ".venv/bin/hone")
        if called and (number == 0 or words[number - 1] in ("|", "-m", "&&") or "=" in words[0]):
            return words[number + 1 :]
    return []


def commands(page: Path) -> Iterator[str]:
    """Commands that the command line refuses: an unknown name or option, an argument too many."""
    for words in command_lines(page):
        why = refused(words) or unknown_name(words)
        if why:
            yield f"hone {' '.join(words)}: {why}"


def refused(words: Sequence[str]) -> str:
    """What the parser says against it. A command may be mentioned without what it has to be given."""
    from hone.cli import _parse

    words = [word for word in words if word not in ("...", "…")]
    bare = len(words) <= 2 and all(re.fullmatch(r"[a-z-]+", word) for word in words)
    said = StringIO()
    try:
        with redirect_stderr(said), redirect_stdout(StringIO()):
            _parse([*words, "--help"] if bare else ["1" if re.fullmatch(r"[A-Z]", word) else word for word in words])
    except SystemExit as ended:
        why = said.getvalue().strip().rpartition("\n")[2]
        return why if ended.code and "are required" not in why else ""
    return ""


def unknown_name(words: Sequence[str]) -> str:
    """A recipe, an algorithm or a setting that the command is given and that does not exist."""
    from hone.algo import ALGORITHMS
    from hone.config.load import list_recipes

    command, given = words[0], next(iter(words[1:]), "")
    named = {"run": list_recipes(), "check": list_recipes(), "algos": ALGORITHMS}.get(command)
    if named is not None and re.fullmatch(r"[a-z_0-9]+", given) and given not in named:
        return f"no {given}"
    chosen = [word.removeprefix("algo=") for word in words if word.startswith("algo=")]
    return next((f"no algorithm {name}" for name in chosen if name not in ALGORITHMS), "")


def refusals(page: Path) -> Iterator[str]:
    """Settings of which the page says how they are refused, and that are not refused so."""
    from hone.config.overrides import override
    from hone.config.recipe import Recipe
    from hone.errors import HoneError

    for _, block in parts(page)[0]:
        for line in filter(promised_refusal, block.splitlines()):
            try:
                override(Recipe(), [word for word in words_after_hone(line) if "=" in word])
                yield f"{line}: it is taken"
            except HoneError as error:
                if promised_refusal(line) not in str(error):
                    yield f"{line}: {error}"


def defaults(page: Path) -> Iterator[str]:
    """Tables of settings with a column of defaults that are others."""
    from hone.commands.reference import written

    for table in re.findall(
        r"(?m)^\| setting \| default \|.*\n\|[-|]+\n((?:\|.*\n)+)", page.read_text(encoding="utf-8")
    ):
        for name, told in re.findall(r"(?m)^\| `([\w.]+)` \| ([^|]*?) *\|", table):
            default = written(known_settings()[name]) if name in known_settings() else "no such setting"
            if told.strip("`").removesuffix(".0") != default.strip('"').removesuffix(".0"):
                yield f"{name} is {told}: {default}"


def settings(page: Path) -> Iterator[str]:
    """Settings that do not exist, or do not take the value that is written."""
    written = {word for words in command_lines(page) for word in words}
    written |= {word for span in parts(page)[1] for word in span.split()}
    for word in sorted(written):
        name, equals, value = word.strip(",;.()").partition("=")
        if is_setting(name) and (why := wrong_setting(name, value if equals else "")):
            yield f"{word}: {why}"


@cache
def known_settings() -> dict[str, object]:
    from hone.commands.reference import all_settings

    return {setting.name: setting.default for setting in all_settings()}


def is_setting(name: str) -> bool:
    """Whether it is written like one: train.steps, algo.high."""
    groups = {known.partition(".")[0] for known in known_settings() if "." in known} | {"algo"}
    group, dot, rest = name.partition(".")
    return bool(dot) and group in groups and bool(re.fullmatch(r"[a-z_]+", rest.partition(".")[0])) and "(" not in name


def wrong_setting(name: str, value: str) -> str:
    from hone.algo import ALGORITHMS
    from hone.config.overrides import override, settings_of
    from hone.config.recipe import Recipe
    from hone.errors import HoneError

    if name.startswith("algo."):
        has = any(name.removeprefix("algo.") in settings_of(factory) for factory in ALGORITHMS.values())
        return "" if has else "no algorithm has it"
    if name.rpartition(".")[2] in ("py", "md", "json", "jsonl") or any(name.startswith(f"{group}.") for group in OPEN):
        return ""
    if name not in known_settings():
        return "no such setting"
    if value and not PLACEHOLDER.fullmatch(value):
        try:
            override(Recipe(), [f"{name}={value}"])
        except HoneError as error:
            return str(error)
    return ""


def targets(page: Path) -> Iterator[str]:
    """`make X` without such a target."""
    there = set(re.findall(r"(?m)^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8")))
    blocks, spans = parts(page)
    text = "\n".join([*(block for _, block in blocks), *spans])
    for name in re.findall(r"(?m)^make ([a-z-]+)", text):
        if name not in there:
            yield f"make {name}"


def benchmarks(page: Path) -> Iterator[str]:
    """`python -m benchmarks.X --option` without such a module or option."""
    blocks, spans = parts(page)
    for line in [*(line for _, block in blocks for line in block.splitlines()), *spans]:
        for module, rest in re.findall(r"python -m ((?:benchmarks|tests)\.[\w.]+)([^`#]*)", line):
            file = ROOT / f"{module.replace('.', '/')}.py"
            source = sources().get(file, "")
            wanted = re.findall(r"--[a-z-]+", rest)
            missing = [option for option in wanted if option not in source and f'"{option}"' not in all_sources()]
            if not source or missing:
                yield f"python -m {module} {' '.join(missing)}"


def extras(page: Path) -> Iterator[str]:
    """`hone[X]` that the package does not offer."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for names in re.findall(r"hone\[([\w,]+)\]", page.read_text(encoding="utf-8")):
        yield from (f"hone[{name}]" for name in names.split(",") if name not in project["optional-dependencies"])


def variables(page: Path) -> Iterator[str]:
    """Environment variables that nothing reads."""
    for name in sorted(set(re.findall(r"\bHONE_[A-Z_]+\b", page.read_text(encoding="utf-8")))):
        if name not in all_sources():
            yield name


def files(page: Path) -> Iterator[str]:
    """Python, C++ and test files that are nowhere in the tree."""
    names = [str(path.relative_to(ROOT)) for path in sources()]
    names += re.findall(r"<!-- file: (\S+) -->", page.read_text(encoding="utf-8"))  # the page has the reader write it
    for span in parts(page)[1]:
        for path in re.findall(r"^([\w/]+\.(?:py|cpp|h))(?:::\w+)?$", span):
            if not path.startswith(OTHERS) and not any(f"/{name}".endswith(f"/{path}") for name in names):
                yield path


@cache
def sources() -> dict[Path, str]:
    folders = ("src", "tests", "benchmarks", "recipes", "examples")
    found = [path for folder in folders for end in ("py", "cpp", "h") for path in (ROOT / folder).rglob(f"*.{end}")]
    return {path: path.read_text(encoding="utf-8") for path in [*found, ROOT / "conftest.py"]}


@cache
def all_sources() -> str:
    return "".join(sources().values())


def snippets(page: Path) -> Iterator[str]:
    """Python that does not compile, or imports what is not there."""
    for language, block in parts(page)[0]:
        if language == "python":
            try:
                tree = ast.parse(block)
            except SyntaxError as error:
                yield f"{error}: {block.splitlines()[0]}"
                continue
            yield from missing_names(tree)


def missing_names(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("hone"):
            module = importlib.import_module(node.module or "")
            yield from (f"{node.module}.{name.name}" for name in node.names if not hasattr(module, name.name))
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "hone" and not hasattr(hone, node.attr):
            yield f"hone.{node.attr}"


def links(page: Path) -> Iterator[str]:
    """Links and paths that lead nowhere."""
    text = page.read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
        if not (page.parent / link).exists():
            yield link
    for path in re.findall(r"(?<![\w$/.<-])((?:docs|tests|benchmarks|recipes|examples|src)/[\w./-]*\w)", text):
        if not any(candidate.exists() for candidate in (ROOT / path, ROOT / f"{path}.py")):
            yield path


CHECKS: dict[str, Check] = {
    "commands that the command line takes": commands,
    "settings that exist": settings,
    "settings that are refused as the page says": refusals,
    "defaults of settings": defaults,
    "targets of make": targets,
    "benchmarks and their options": benchmarks,
    "extras of the package": extras,
    "environment variables that are read": variables,
    "files by name": files,
    "snippets of Python": snippets,
    "links and paths": links,
}
