"""Where the two differ, the relation between them is exact: this fails on the day either of them changes."""

import re
from pathlib import Path

import pytest
from each import each

pytest.importorskip("trl", reason="TRL is not installed: pip install -c constraints.txt -e .[dev]")

import trl

from tests.parity.differences import DIFFERENCES
from tests.parity.house import distance

PAGE = Path(__file__).parents[2] / "docs" / "dev" / "parity.md"


@each("name", DIFFERENCES)
def test_trl_is_as_stated_and_not_as_hone(name):
    found = DIFFERENCES[name]()
    assert max(distance(found.stated, found.peer)) <= 2e-6
    assert max(distance(found.ours, found.peer)) >= 1e-3


@each("name", DIFFERENCES)
def test_the_page_lists_it_with_its_numbers(name):
    found = DIFFERENCES[name]()
    (line,) = [x for x in PAGE.read_text().splitlines() if x.startswith(f"| {name} ")]
    cells = [cell.strip() for cell in line.split("|")]
    assert [float(x) for x in cells[4:6]] == pytest.approx([found.ours.loss, found.peer.loss], abs=2e-5)


def test_the_page_lists_no_other_difference():
    listed = re.findall(r"^\| ([a-z][^|]*?) \| .* \| -?\d+\.\d{5} \| -?\d+\.\d{5} \|", PAGE.read_text(), re.M)
    assert set(listed) == set(DIFFERENCES)


def test_the_page_names_the_version():
    assert f"TRL {trl.__version__}" in PAGE.read_text()
