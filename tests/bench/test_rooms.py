"""The drawing of rooms: what imports what, in which layer, and where imports go in a circle."""

from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks.rooms import Tree, circles_of, code_lines, drawing, implied, layers_of, read

FILES = {
    "__init__.py": "TYPE_CHECKING = False\nif TYPE_CHECKING:\n    from hone.top.job import run\n",
    "types.py": "import torch\n",
    "low/__init__.py": "",
    "low/a.py": "from hone.types import Batch\nfrom hone.low import b\n",
    "low/b.py": "def late():\n    from hone.low.a import thing\n",
    "top/job.py": "import hone.low.a\nfrom hone.types import Batch\n\nif TYPE_CHECKING:\n    from hone.side import x\n",
    "side.py": "from hone import run\n",
}


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return read(tmp_path)


def test_imports_count_wherever_they_stand_but_not_for_types_alone(tree: Tree):
    assert tree.imports == {
        "hone": {"top.job"},  # the package's own are names that it passes on
        "types": set(),
        "low.a": {"types", "low.b"},
        "low.b": {"low.a"},
        "top.job": {"low.a", "types"},
        "side": {"hone"},
    }
    assert tree.folders == {"low", "top"}


def test_counts(tree: Tree):
    assert tree.counts() == {
        "rooms": 2,
        "modules": 6,
        "modules beside the rooms": 3,
        "imports between modules": 7,
        "imports from room to room": 5,
        "modules in import cycles": 2,
        "modules in the largest cycle": 2,
        "rooms in import cycles": 0,
    }
    assert (tree.size("low"), tree.knotted("low"), tree.knotted("top")) == (2, 2, 0)


def test_a_room_stands_above_all_that_it_imports(tree: Tree):
    assert layers_of(tree.rooms) == {"types": 0, "low": 1, "top": 2, "hone": 3, "side": 4}


def test_rooms_that_import_each_other_share_a_layer():
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set[str](), "e": {"b"}}
    assert circles_of(graph) == [["d"], ["a", "b", "c"], ["e"]]
    assert layers_of(graph) == {"d": 0, "a": 1, "b": 1, "c": 1, "e": 2}


def test_an_import_is_implied_where_a_third_room_leads_there(tree: Tree):
    assert implied(tree.rooms, "top", "types")
    assert not implied(tree.rooms, "top", "low")


def test_the_drawing_has_a_box_for_each_and_marks_what_is_knotted(tree: Tree):
    made = drawing(tree, "a < b")
    ElementTree.fromstring(made)  # well formed
    assert made.count('<g class="room">') == 1
    assert made.count('<g class="knot">') == 1
    assert made.count('<g class="loose">') == 3
    assert "2 modules, 2 in a cycle" in made
    assert made.count('class="direct"') == 4
    assert made.count('class="implied"') == 1
    assert 'class="circle"' not in made


def test_lines_of_code_are_no_comments_docstrings_or_empty_lines():
    text = '"""One.\n\nTwo."""\n\n# three\ndef f(x):\n    """Four."""\n    return (\n        x\n    )\n'
    assert code_lines(text) == 4
