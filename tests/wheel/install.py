"""Builds Hone's wheel and installs it elsewhere, in two environments: `core` has what `pip install hone` brings, `full`
the packages of its extras too.

`python -m tests.wheel.install FOLDER` makes FOLDER/core and FOLDER/full. Packages other than Hone are links to those of
this environment, so that nothing is downloaded; only packages that the wheel asks for are linked.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
BUILT_FROM = ("pyproject.toml", "README.md", "LICENSE")
EXTRAS = ("gguf", "hub", "tensorboard", "data", "corpus", "hf", "verify", "serve", "math")
Wanted = tuple[str, tuple[str, ...]]  # a package and the extras of it that are wanted
HERE = Path(sysconfig.get_path("purelib"))


def build(folder: Path, clone: Path = ROOT) -> Path:
    """The wheel of a copy of the source, so that nothing is left in the clone and nothing old is packed."""
    copy = folder / "source"
    shutil.copytree(clone / "src", copy / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in BUILT_FROM:
        shutil.copy(clone / name, copy / name)
    _pip("wheel", "--no-deps", "--no-build-isolation", "-w", str(folder), str(copy))
    (wheel,) = folder.glob("*.whl")
    return wheel


def install(wheel: Path, environment: Path, *, extras: tuple[str, ...] = ()) -> None:
    """A new environment with the wheel in it, and links to the packages that it asks for."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    python = environment / "bin" / "python"
    _pip("--python", str(python), "install", "--no-deps", "--no-index", str(wheel))
    (packages,) = environment.glob("lib/python*/site-packages")
    (hone,) = metadata.distributions(name="hone", path=[str(packages)])
    for name in needed(hone.requires or [], extras):
        for entry in entries(name):
            link = packages / entry
            if not link.exists():
                link.symlink_to(HERE / entry)


def needed(asked: list[str], extras: tuple[str, ...]) -> set[str]:
    """The names of all packages that these requirements lead to."""
    found = set[Wanted]()
    waiting = list(_wanted(asked, extras))
    while waiting:
        one = waiting.pop()
        if one not in found:
            found.add(one)
            waiting += _wanted(metadata.requires(one[0]) or [], one[1])
    return {name for name, _ in found}


def _wanted(asked: list[str], extras: tuple[str, ...]) -> Iterator[Wanted]:
    for text in asked:
        requirement = Requirement(text)
        if requirement.marker is None or any(requirement.marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            yield canonicalize_name(requirement.name), tuple(sorted(requirement.extras))


def entries(package: str) -> set[str]:
    """What a package has in site-packages: its folders, modules and metadata."""
    files = metadata.files(package) or []
    return {file.parts[0] for file in files} - {"..", "__pycache__"}


def _pip(*words: str) -> None:
    plain = {
        name: value for name, value in os.environ.items() if name != "PYTHONPATH"
    }  # else pip finds the clone there
    subprocess.run([sys.executable, "-m", "pip", "-q", "--disable-pip-version-check", *words], env=plain, check=True)


def main() -> None:
    folder = Path(sys.argv[1]).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    wheel = build(folder)
    install(wheel, folder / "core")
    install(wheel, folder / "full", extras=EXTRAS)
    print(wheel)


if __name__ == "__main__":
    main()
