"""`hone settings`: every setting by its dotted name, the dataclass's default, and the meaning from its source."""

import dataclasses
import re
from dataclasses import dataclass, replace
from typing import Any

import pytest
from each import each

from hone.cli import main
from hone.commands.reference import RecipeSetting, all_settings, meanings, written
from hone.config.overrides import Choice, override, to_json
from hone.config.recipe import ModelSpec, Recipe, TrainSpec

SETTINGS = list(all_settings())


def hone(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["settings", *arguments])
    out, err = capsys.readouterr()
    return code, out, err


def leaves(config: Any, above: str = "") -> dict[str, Any]:
    """Defaults by dotted name, found another way than by the command."""
    found = dict[str, Any]()
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        nested = dataclasses.is_dataclass(value) and not isinstance(value, Choice)
        found |= leaves(value, f"{above}{field.name}.") if nested else {f"{above}{field.name}": value}
    return found


def printed(out: str) -> dict[str, str]:
    """name -> default of each line that has one."""
    return dict(re.findall(r"(?m)^  ([a-z][\w.]*)=(\S+)", out))


@dataclass
class Sample:
    """A docstring is no comment."""

    bare: int = 0
    # above
    # it
    both: int = 1  # and beside

    # apart from what follows

    text: str = "# no comment"
    spread: tuple[int, ...] = (  # begun
        1,  # and ended
    )

    def method(self) -> int:
        unlike: int = 3  # not a field
        return unlike


def test_comments_above_and_beside_a_field_are_its_meaning():
    assert meanings(Sample) == {"both": "above it and beside", "spread": "begun and ended"}


def test_every_setting_has_a_meaning():
    assert [setting.name for setting in SETTINGS if not setting.meaning] == []


def test_meanings_are_those_of_the_source():
    (recompute,) = [s for s in SETTINGS if s.name == "train.recompute"]
    assert recompute.meaning == meanings(TrainSpec)["recompute"]
    assert recompute.meaning.startswith("what a layer computed is computed again for its gradient, instead of kept; ")
    assert recompute.choices == ("auto", "never", "always")


def test_all_settings_are_listed_with_the_defaults_of_the_dataclasses(capsys: pytest.CaptureFixture[str]):
    code, out, _ = hone(capsys)
    expected = leaves(Recipe())
    assert code == 0
    assert printed(out) == {name: written(value) for name, value in expected.items()}
    for group in ("recipe", "model", "train", "limits"):
        assert len(re.findall(f"(?m)^{group}: ", out)) == 1


@each("setting", SETTINGS, ids=lambda s: s.name)
def test_a_default_is_written_as_it_can_be_set(setting: RecipeSetting):
    assert to_json(override(Recipe(), [f"{setting.name}={written(setting.default)}"])) == to_json(Recipe())


def test_a_default_that_changes_is_printed_as_it_is_then():
    changed = Recipe(model=ModelSpec(layers=9), train=replace(TrainSpec(), recompute="never"))
    found = {setting.name: written(setting.default) for setting in all_settings(changed)}
    assert (found["model.layers"], found["train.recompute"]) == ("9", "never")


@pytest.mark.parametrize(
    ("prefix", "names"),
    [
        ("train.recompute", ["train.recompute"]),
        ("train.micro", ["train.micro_rows", "train.micro_tokens"]),
        ("critic", ["critic.kind"]),
        ("algo.high", ["algo"]),
        ("reward.math", ["reward"]),
    ],
)
def test_a_prefix_chooses(prefix: str, names: list[str], capsys: pytest.CaptureFixture[str]):
    code, out, _ = hone(capsys, prefix)
    assert (code, list(printed(out))) == (0, names)


def test_a_setting_is_printed_with_its_choices_and_its_meaning(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("COLUMNS", "60")
    _, out, _ = hone(capsys, "train.recompute")
    first, *rest = out.splitlines()
    assert first == "  train.recompute=auto  (auto, never, always)"
    assert " ".join(line.strip() for line in rest) == meanings(TrainSpec)["recompute"]
    assert max(map(len, rest)) <= 60


@pytest.mark.parametrize(
    ("prefix", "hint"),
    [
        ("train.recomputed", "; did you mean 'train.recompute'?"),
        ("learning_rate", "; did you mean 'optim.lr'?"),
        ("bits", "; did you mean 'optim.bits'?"),
        ("trian", "; did you mean 'train'?"),
        ("sampel", "; did you mean 'sample' or 'save'?"),
        ("quux", ";"),
    ],
)
def test_a_prefix_that_matches_nothing_names_the_nearest(prefix: str, hint: str, capsys: pytest.CaptureFixture[str]):
    said = f"hone: error: no setting {prefix!r}{hint} `hone settings` lists them all\n"
    assert hone(capsys, prefix) == (2, "", said)
