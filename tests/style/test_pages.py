"""The pages for readers: the README's tree is the repository's, and no link or path leads nowhere."""

import re

from tree import ROOT, SOURCE, tracked

from benchmarks.claims import links

README = (ROOT / "README.md").read_text(encoding="utf-8")
TREE = README.partition("## The tree\n")[2].partition("\n```\n\n")[0]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_the_tree_names_every_part_of_the_package_and_nothing_else():
    inside = {path.relative_to(SOURCE / "hone").parts[0] for path in tracked() if path.is_relative_to(SOURCE / "hone")}
    named = set(re.findall(r"(?<![\w./])(\w+\.py)\b", TREE)) | set(re.findall(r"(?m)^  (\w+)/ ", TREE))
    assert named == inside - {"__init__.py"}


def test_the_tree_names_every_folder_beside_the_package():
    folders = {path.relative_to(ROOT).parts[0] for path in tracked() if len(path.relative_to(ROOT).parts) > 1}
    named = set(re.findall(r"(?m)(?:^|  )(\w+)/", "".join(TREE.partition("examples/")[1:])))
    assert {f for f in folders if not f.startswith(".")} == named | {"src"}


def test_the_readme_leads_to_every_page():
    linked = {ROOT / link for link in re.findall(r"\]\((docs/[^)#]+)\)", README)}
    assert {*PAGES[2:], ROOT / "docs" / "report.png"} <= linked


def test_links_and_paths_lead_somewhere():
    wrong = [f"{page.name}: {link}" for page in PAGES for link in links(page)]
    assert not wrong, "\n".join(wrong)
