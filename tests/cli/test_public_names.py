import subprocess
import sys
import tomllib
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest
from each import each

import hone

ROOT = Path(__file__).parents[2]


def test_importing_hone_does_not_import_torch():
    code = "import sys, hone; from hone import Recipe, Choice, HoneError; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "False"


@each("name", hone.__all__)
def test_every_public_name_is_there(name):
    assert getattr(hone, name) is getattr(hone, name)


def test_the_settings_of_every_group_of_a_recipe_are_public():
    groups = [value for f in fields(hone.Recipe) if is_dataclass(value := getattr(hone.Recipe(), f.name))]
    assert {type(group).__name__ for group in groups} <= {*hone.__all__}


def test_type_checkers_read_the_annotations_of_the_installed_package():
    packed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    assert "py.typed" in packed["hone"]
    assert (ROOT / "src" / "hone" / "py.typed").is_file()


def test_run_is_a_function_and_algo_a_package():
    assert callable(hone.run)
    assert hone.algo.grpo(beta=0.0).name == "grpo"
    assert hone.algo.grpo is hone.algo.ALGORITHMS["grpo"]


def test_other_names_are_attribute_errors():
    with pytest.raises(AttributeError, match="no attribute 'runn'"):
        _ = hone.runn  # pyright: ignore


def test_the_version_is_the_one_of_the_project():
    assert hone.__version__ == tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
