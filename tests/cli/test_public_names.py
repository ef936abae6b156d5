import inspect
import subprocess
import sys
import tomllib
from dataclasses import fields, is_dataclass
from pathlib import Path

import griffe
import pytest
from each import each

import hone
from hone.commands.reference import meanings

ROOT = Path(__file__).parents[2]
FIELD_COMMENTS = ROOT / "benchmarks" / "field_comments.py"  # mkdocs.yml has it too


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


def public_classes() -> list[type]:
    found = [getattr(room, name) for room in (hone, hone.algo, hone.rewards) for name in room.__all__]
    return list(dict.fromkeys(x for x in found if isinstance(x, type)))


def test_every_field_of_a_public_class_is_explained_beside_it():
    for kind in filter(is_dataclass, public_classes()):
        assert [f.name for f in fields(kind) if f.name not in meanings(kind)] == [], kind.__name__


def test_every_public_method_is_documented():
    for kind in public_classes():
        for name, member in vars(kind).items():
            if not name.startswith("_") and (inspect.isfunction(member) or isinstance(member, property)):
                assert inspect.getdoc(member), f"{kind.__name__}.{name}"


def test_the_api_page_shows_the_fields_of_a_class_with_their_types():
    package = griffe.load(
        "hone.types", search_paths=[ROOT / "src"], extensions=griffe.load_extensions(str(FIELD_COMMENTS))
    )
    (table,) = [part for part in package["Outcome"].docstring.parsed if part.kind.value == "attributes"]
    assert [field.name for field in table.value] == [f.name for f in fields(hone.Outcome)]
    assert (str(table.value[0].annotation), table.value[0].description) == ("float | None", "None: invalid.")


def test_run_is_a_function_and_algo_a_package():
    assert callable(hone.run)
    assert hone.algo.grpo(beta=0.0).name == "grpo"
    assert hone.algo.grpo is hone.algo.ALGORITHMS["grpo"]


def test_other_names_are_attribute_errors():
    with pytest.raises(AttributeError, match="no attribute 'runn'"):
        _ = hone.runn  # pyright: ignore


def test_the_version_is_the_one_of_the_project():
    assert hone.__version__ == tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
