"""The pages for readers: the README's tree is the repository's, and no link or path leads nowhere."""

import re
from pathlib import Path

import pytest
from tree import ROOT, SOURCE, tracked

README = (ROOT / "README.md").read_text(encoding="utf-8")
TREE = README.partition("## The tree\n")[2].partition("\n```\n\n")[0]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_the_tree_names_every_part_of_the_package_and_nothing_else():
    inside = {path.relative_to(SOURCE / "hone").parts[0] for path in tracked() if path.is_relative_to(SOURCE / "hone")}
    named = set(re.findall(r"(?<![\w./])(\w+\.py)\b", TREE)) | set(re.findall(r"(?m)^  (\w+)/ ", TREE))
    assert named == inside - {"__init__.py"}


def test_the_tree_names_every_folder_beside_the_package():
    folders = {path.relative_to(ROOT).parts[0] for path in tracked() if len(path.relative_to(ROOT).parts) > 1}
    named = set(re.findall(r"(?m)(?:^|  )(\w+)/", TREE.partition("recipes/")[1] + TREE.partition("recipes/")[2]))
    assert {f for f in folders if not f.startswith(".")} == named | {"src"}


def test_the_readme_leads_to_every_page():
    linked = {ROOT / link for link in re.findall(r"\]\((docs/[^)#]+)\)", README)}
    assert {*PAGES[2:], ROOT / "docs" / "report.png"} <= linked


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_paths_lead_somewhere(page: Path):
    text = page.read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
        assert (page.parent / link).exists(), link
    for path in re.findall(r"(?<![\w$/.<-])((?:docs|tests|benchmarks|recipes|examples|src)/[\w./-]*\w)", text):
        found = [ROOT / path, ROOT / f"{path}.py"]
        assert any(candidate.exists() for candidate in found), path
