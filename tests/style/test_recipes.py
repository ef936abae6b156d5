"""Every built-in recipe builds, and makes sense once it has data."""

import sys

import pytest
from tree import RECIPES, ROOT

from hone.algo import ALGORITHMS
from hone.config.load import list_recipes, load_recipe, summary
from hone.config.overrides import build_choice, override
from hone.config.recipe import plan
from hone.config.rules import validate


@pytest.fixture
def in_clone(monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_builds_by_name(path, in_clone):
    recipe = load_recipe(path.stem)()
    given = [] if recipe.data else ["data=some.jsonl"]
    given += [] if recipe.model.path or recipe.model.tokenizer else ["model.path=some"]
    recipe = override(recipe, given)
    validate(recipe)
    algo = build_choice(recipe.algo, ALGORITHMS)
    assert algo.online == recipe.online
    assert recipe.sample.group >= algo.group or not algo.online
    assert "row" in plan(recipe)
    assert summary(path), f"{path.name} needs a docstring: `hone recipes` shows it"


def test_the_recipes_of_the_clone_are_the_built_in_ones(in_clone):
    assert set(list_recipes()) >= {path.stem for path in RECIPES}
