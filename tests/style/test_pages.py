"""The pages for readers: short where they must be, complete, reachable, and as new as the code."""

import html
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import yaml
from tree import ROOT, SOURCE, tracked

from benchmarks import reference
from benchmarks.claims import links

README = (ROOT / "README.md").read_text(encoding="utf-8")
TREE = README.partition("## The rooms\n")[2].partition("\n```\n\n")[0]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
SITE = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
NOT_NAMED = {"__init__.py", "__main__.py", "py.typed"}


def too_long(text: str, most: int = 120) -> list[str]:
    """Lines of prose: what is neither code nor a table."""
    prose = re.sub(r"(?ms)^```.*?^```", "", text)
    return [line for line in prose.splitlines() if len(line) > most and not line.startswith("|")]


def test_the_readme_is_read_in_five_minutes():
    assert len(README.splitlines()) <= 150
    assert too_long(README) == []
    assert too_long("| " + "x" * 130 + "\n" + "y" * 121 + "\n```\n" + "z" * 130 + "\n```\n") == ["y" * 121]


def test_the_tree_names_every_part_of_the_package_and_nothing_else():
    inside = {path.relative_to(SOURCE / "hone").parts[0] for path in tracked() if path.is_relative_to(SOURCE / "hone")}
    package = TREE.partition("src/hone/")[2].partition("examples/")[0]
    named = set(re.findall(r"(?m)(?:^|  )(\w+\.py)  ", package)) | set(re.findall(r"(?m)(?:^|  )(\w+)/  ", package))
    assert named == inside - NOT_NAMED


def test_the_tree_names_every_folder_beside_the_package():
    folders = {path.relative_to(ROOT).parts[0] for path in tracked() if len(path.relative_to(ROOT).parts) > 1}
    named = set(re.findall(r"(?m)(?:^|  )(\w+)/", "".join(TREE.partition("examples/")[1:])))
    assert {f for f in folders if not f.startswith(".")} == named | {"src"}


def entries(nav: list[Any]) -> Iterator[str]:
    """The pages of a navigation, however deep."""
    for part in nav:
        for inside in part.values():
            yield from [inside] if isinstance(inside, str) else entries(inside)


def test_the_navigation_leads_to_every_page():
    there = {str(page.relative_to(ROOT / "docs")) for page in PAGES[2:]}
    named = list(entries(SITE["nav"]))
    assert set(named) == there
    assert len(named) == len(there)


def test_the_readme_shows_the_report_and_leads_to_the_site():
    linked = set(re.findall(r"\]\((docs/[^)#]+)\)", README))
    assert {"docs/report.png", "docs/index.md", "docs/architecture.md"} <= linked


def test_links_and_paths_lead_somewhere():
    wrong = [f"{page.name}: {link}" for page in PAGES for link in links(page)]
    assert not wrong, "\n".join(wrong)


def test_the_reference_is_as_new_as_the_code():
    old = [name for name, text in reference.pages().items() if not as_written(name, text)]
    assert old == [], "run `python -m benchmarks.reference`"


def as_written(name: str, text: str) -> bool:
    """Help is laid out by argparse, a little differently in every Python: only its words count."""
    stored = (reference.FOLDER / name).read_text(encoding="utf-8")
    return stored.split() == text.split() if name == "cli.md" else stored == text


def test_every_algorithm_is_in_the_reference_once():
    assert sorted(name for names in reference.KINDS.values() for name in names) == sorted(reference.ALGORITHMS)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site as `make docs` builds it, elsewhere."""
    folder = tmp_path_factory.mktemp("site")
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    places = {
        "site_dir: build/site": "site_dir: site",
        "paths: [src]": f"paths: [{SOURCE}]",
        "[benchmarks/": f"[{ROOT}/benchmarks/",
    }
    elsewhere = reduce(lambda text, place: text.replace(*place), places.items(), text)
    (folder / "mkdocs.yml").write_text(elsewhere)
    shutil.copytree(ROOT / "docs", folder / "docs")
    command = [str(Path(sys.executable).with_name("zensical")), "build", "--clean", "--strict"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "site"


def test_the_site_asks_nothing_of_another_host(site: Path):
    pages = list(site.rglob("*.html"))
    assert len(pages) >= len(PAGES) - 2
    asked = re.compile(r"<(?:script|link|img|iframe)\b[^>]*(?:src|href)=\"?(https?:)?//")
    assert [page.name for page in pages if asked.search(page.read_text(encoding="utf-8"))] == []


def test_the_site_has_the_public_names(site: Path):
    text = (site / "reference" / "api.html").read_text(encoding="utf-8")
    for name in ("hone.run", "hone.Recipe", "hone.algo.grpo", "hone.reward.math"):
        assert f'id="{name}"' in text, name


def test_the_site_explains_the_fields_of_the_public_classes(site: Path):
    text = html.unescape(re.sub(r"<[^>]+>", "", (site / "reference" / "api.html").read_text(encoding="utf-8")))
    plain = " ".join(text.split())
    for field in ("logprobs tuple[float, ...] of each token", "steps int how many the run has. Default: 100"):
        assert field in plain, field
