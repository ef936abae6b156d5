import sys

import pytest

from hone.config.load import list_recipes, load_function, load_recipe, summary
from hone.config.recipe import Recipe
from hone.errors import HoneError

GOOD = '"""Adds numbers.\n\nMore."""\nfrom hone import Recipe\n\ndef recipe():\n    return Recipe(name="good")\n'


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    (tmp_path / "recipes").mkdir()
    return tmp_path


def write(folder, name, text):
    (folder / name).write_text(text)
    return name


def error_of(source, load=load_recipe) -> str:
    with pytest.raises(HoneError) as caught:
        load(source)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_recipe_is_found_by_path_and_by_name(folder):
    write(folder, "recipes/good.py", GOOD)
    for source in ("recipes/good.py", "recipes/good.py:recipe", "good", "good:recipe"):
        assert load_recipe(source)() == Recipe(name="good")


def test_the_built_in_recipes_are_listed_with_their_first_line(folder):
    write(folder, "recipes/good.py", GOOD)
    write(folder, "recipes/_shared.py", "")
    write(folder, "recipes/broken.py", "def f(:\n")
    assert {"good", "broken"} <= set(list_recipes())
    assert "_shared" not in list_recipes()
    assert summary(list_recipes()["good"]) == "Adds numbers."
    assert "cannot be read" in summary(list_recipes()["broken"])


@pytest.mark.parametrize("name", ["only_one", "sum_to_ten", "recipe"])
def test_the_function_may_be_left_out_where_it_is_clear(folder, name):
    text = GOOD.replace("def recipe", f"def {name}")
    if name != "only_one":
        text += "\ndef other():\n    return 3\n"
    write(folder, "sum_to_ten.py", text)
    assert load_recipe("sum_to_ten.py")().name == "good"


def test_a_recipe_may_build_on_its_neighbour(folder):
    write(folder, "recipes/good.py", GOOD)
    text = "from dataclasses import replace\nimport good\n\ndef more():\n    return replace(good.recipe(), seed=7)\n"
    write(folder, "recipes/better.py", text)
    assert load_recipe("better")() == Recipe(name="good", seed=7)


def test_a_recipe_called_like_a_library_hides_nothing(folder):
    import math

    write(folder, "math.py", GOOD)
    assert load_recipe("math.py")().name == "good"
    assert sys.modules["math"] is math


def test_a_recipe_file_may_define_dataclasses(folder):
    text = (
        "from __future__ import annotations\nfrom dataclasses import dataclass\n@dataclass\nclass A:\n    x: int\n"
        + GOOD
    )
    write(folder, "records.py", text.replace('"""Adds numbers.\n\nMore."""\n', ""))
    assert load_recipe("records.py")().name == "good"


def test_what_is_wrong_with_a_recipe_is_said_in_one_line(folder):
    assert "no file absent.py" in error_of("absent.py")
    assert "or give the path of a .py file" in error_of("absent")
    write(folder, "recipes/good.py", GOOD)
    assert "did you mean 'good'" in error_of("goood")
    assert "no function 'recpie'; did you mean 'recipe'?" in error_of("recipes/good.py:recpie")
    assert "line 1 cannot be loaded: SyntaxError" in error_of(write(folder, "a.py", "def f(:\n"))
    assert "KeyError: 'x'" in error_of(write(folder, "b.py", "{}['x']\n"))
    assert "choose one with c.py:NAME (f, g)" in error_of(write(folder, "c.py", "def f(): ...\ndef g(): ...\n"))
    assert "it has none" in error_of(write(folder, "d.py", "from math import sqrt\n"))
    assert "e.py:f wants x" in error_of(write(folder, "e.py", "def f(x): ...\n"))
    assert "no file" in error_of(str(folder / "recipes" / "dir.py"))


def test_a_function_that_returns_no_recipe_is_refused(folder):
    write(folder, "three.py", "def f():\n    return 3\n")
    with pytest.raises(HoneError, match=r"three\.py:f returned int: a recipe returns a hone\.Recipe"):
        load_recipe("three.py")()


def test_a_file_that_failed_leaves_no_module_behind(folder):
    error_of(write(folder, "half.py", "x = 1\nraise RuntimeError('no')\n"))
    assert "half" not in sys.modules


def test_a_reward_function_is_loaded_by_reference(folder):
    write(folder, "rewards.py", "import math\n\ndef score(completion, task):\n    return 1.0\n")
    assert load_function("rewards.py:score")("", None) == 1.0
    assert "did you mean 'score'" in error_of("rewards.py:scores", load_function)
    assert "write path/file.py:function" in error_of("rewards.py", load_function)
    assert "write path/file.py:function" in error_of("rewards:score", load_function)


def test_a_recipes_name_may_be_written_with_hyphens(tmp_path, monkeypatch):
    (tmp_path / "recipes").mkdir()
    text = "import hone\n\n\ndef recipe():\n    return hone.Recipe(name='x')\n"
    (tmp_path / "recipes" / "sft_mine.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    assert load_recipe("sft-mine")().name == load_recipe("sft_mine")().name == "x"
