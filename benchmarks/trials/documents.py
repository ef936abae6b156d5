"""What the documents say: recipes without the clone, the installed wheel, and each page as a list of claims."""

import json
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path

from benchmarks.claims import CHECKS, ROOT, pages, sources
from benchmarks.trials.case import Case
from hone.algo import ALGORITHMS
from hone.config.load import list_recipes, load_recipe
from tests.wheel.install import build, install

TITLE = "What the documents say"
RECIPES = (
    "distil", "dpo", "grpo", "lora_gsm8k", "ppo", "ppo_process", "pretrain", "pretrain_tinyshakespeare", "process",
    "reward", "sft", "sft_gsm8k", "sft_lora",
)  # fmt: skip
INSTALLED = {  # a command that `pip install hone` shall give, and what it prints
    "recipes": "GRPO with a verifier",
    "algos": "Advantage actor-critic",
    "algos ppo": "kl_target",
    "settings": "optim.lr=",
    "run grpo": "`hone demo` makes it",
    "check ppo": "`hone demo` makes it",
    "plan scaling --flops 1e21": "tokens/param",
    "sandbox doctor": "a small program takes",
    "serve MODEL": "hone[serve]",
    "corpus clean texts.jsonl --out clean": "hone[corpus]",
    "--help": "hone run grpo",
}
CLEANERS = ("py3langid", "rensa", "profanity_check")  # packages of hone[corpus]
DOCUMENT = """\
The harbour lies in a wide bay, and most of the town was built on the slope above it. In the morning the boats come
back with what was caught during the night, and by noon the market is over. Older houses have roofs of slate; newer
ones along the road to the station have tiles, which are cheaper but do not last as long in the salt air. There is
a school, a small library that opens on three days of the week, and a workshop where nets are mended. People who
visit usually stay for the festival at the end of summer, when lamps are hung from every window and nobody goes to
bed early."""
GPU_TESTS = "tests/run/test_killed_on_a_device.py"


def cases(quick: bool) -> Iterator[Case]:
    """quick: the wheel is not built, and pytest not run."""
    yield from recipe_cases()
    yield from sentence_cases()
    for about, check in CHECKS.items():
        for page in pages():
            yield Case(
                "claims of the pages that a program can try", f"{page.name}: {about}", partial(wrong, check, page)
            )
    if not quick:
        yield from wheel_cases()
        yield Case("sentences that were false", "tests marked gpu skip without one", gpu_tests_fail)


def wrong(check: Callable[[Path], Iterator[str]], page: Path) -> str | None:
    return "; ".join(check(page)) or None


def recipe_cases() -> Iterator[Case]:
    """In an empty folder."""
    group = "recipes without the clone"
    for name in RECIPES:
        yield Case(group, f"`hone run {name}` finds it", partial(elsewhere, lambda name=name: load_recipe(name)()))
        yield Case(group, f"`hone recipes` lists {name}", partial(elsewhere, lambda name=name: list_recipes()[name]))
    yield Case(group, "a recipe of one's own comes first", partial(elsewhere, own_recipe))


def elsewhere(does: Callable[[], object]) -> None:
    """Do it in an empty folder; what it raises is the failure."""
    before, path = Path.cwd(), list(sys.path)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            does()
        finally:
            os.chdir(before)
            sys.path[:] = path


def own_recipe() -> None:
    Path("recipes").mkdir()
    Path("recipes/grpo.py").write_text("import hone\n\n\ndef recipe():\n    return hone.Recipe(name='mine')\n")
    assert load_recipe("grpo")().name == "mine"
    assert load_recipe("sft")().name == "sft", "and hides the others"


def sentence_cases() -> Iterator[Case]:
    group = "sentences that were false"
    for name, factory in ALGORITHMS.items():
        said = "lag" in (factory.__doc__ or "")
        yield Case(group, f"{name} is what its line says", lambda said=said: "it speaks of a lag" if said else None)
    yield Case(group, "majority voting is called", uncalled_vote)
    yield Case(group, "the number of tests", partial(stands_in_readme, r"14,700 tests"))
    yield Case(group, "the sampler's peer was warm", partial(stands_in_readme, r"\| 116 x"))
    yield Case(group, "the model of docs/distil.md is the demo's", old_distillation)
    for package in CLEANERS:
        yield Case(group, f"`hone corpus clean` without {package}", partial(cleaned_without, package))


def uncalled_vote() -> str | None:
    package = (text for path, text in sources().items() if path.is_relative_to(ROOT / "src"))
    called = any(re.search(r"(?<!def )\bmajority\(", text) for text in package)
    return None if called else "nothing in the package calls it"


def stands_in_readme(pattern: str) -> str | None:
    """Also on the page of speed, which has the README's old table."""
    pages = [page for page in (ROOT / "README.md", ROOT / "docs/speed.md") if page.exists()]
    found = re.search(pattern, "\n".join(page.read_text(encoding="utf-8") for page in pages))
    return f"the README says {found[0]}" if found else None


def old_distillation() -> str | None:
    """Its numbers were those of an earlier demo: a teacher of 46 %, where the README's table has 84.5."""
    text = (ROOT / "docs/distil.md").read_text(encoding="utf-8")
    return "the teacher has 46 %" if "teacher has 46 %" in text else None


def cleaned_without(package: str) -> str | None:
    """It must name the extra and leave no folder."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "texts.jsonl").write_text(json.dumps({"text": DOCUMENT}) + "\n")
        source = f"import sys; sys.modules[{package!r}] = None; from hone.cli import main; sys.exit(main(sys.argv[1:]))"
        words = [sys.executable, "-c", source, "corpus", "clean", "texts.jsonl", "--out", "clean"]
        done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=120)
        if done.returncode != 2 or "hone[corpus]" not in done.stderr:
            return done.stderr or f"exit code {done.returncode}"
        return "a partial folder is left" if Path(folder, "clean").exists() else None


def gpu_tests_fail() -> str | None:
    words = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-x", "-p", "no:cacheprovider", GPU_TESTS]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=300)
    return None if done.returncode == 0 else done.stdout.strip().rpartition("\n")[2]


def wheel_cases() -> Iterator[Case]:
    group = "the wheel, installed elsewhere"
    for path in (*(f"hone/recipes/{name}.py" for name in RECIPES), *sorted(packaged())):
        yield Case(group, f"it has {path}", lambda path=path: None if path in wheel_names() else "it has not")
    for words, says in INSTALLED.items():
        yield Case(group, f"hone {words}", partial(installed_command, words, says))


def packaged() -> set[str]:
    """What belongs to the package besides Python."""
    files = (path for path in (ROOT / "src/hone").rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc"))
    return {str(path.relative_to(ROOT / "src")) for path in files}


@cache
def environment() -> Path:
    """The wheel of the tree on trial, in an environment of its own."""
    folder = Path(tempfile.mkdtemp())
    install(build(folder, ROOT), folder / "core")
    return folder


@cache
def wheel_names() -> set[str]:
    (wheel,) = environment().glob("*.whl")
    return set(zipfile.ZipFile(wheel).namelist())


def installed_command(words: str, says: str) -> str | None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "texts.jsonl").write_text('{"text": "Some words."}\n')
        path = os.pathsep.join([str(environment() / "core/bin"), os.environ["PATH"]])
        env = {"PATH": path, "HOME": folder, "NO_COLOR": "1", "COLUMNS": "200"}
        done = subprocess.run(
            ["hone", *words.split()], cwd=folder, env=env, capture_output=True, text=True, timeout=120
        )
        said = done.stdout + done.stderr
        return None if says in said else said.strip().rpartition("\n")[2] or "it prints nothing"
