"""hone rewards calibrate: zero mean and unit variance on the data, saved with the model and nothing else touched."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from small import World, recipe, write_rows

import hone
from hone.cli import main
from hone.errors import HoneError
from hone.inference.calibrate import calibrate
from hone.launch import feeds
from hone.model.formats.folder import load_scorer
from hone.reward.learned.load import reward_model
from hone.storage.files import verify

torch.set_num_threads(1)


@pytest.fixture
def scorer(world: World, tmp_path: Path) -> Path:
    return Path(shutil.copytree(world / "scorer", tmp_path / "scorer"))


def scores(world: World, folder: Path, name: str) -> np.ndarray:
    """Of every completion, as a run's reward has them."""
    rollouts = [r for group in feeds.groups(str(world.data(name)), world.tokenizer, context=0) for r in group]
    return np.array(reward_model([str(folder)], world.tokenizer, device="cpu")(rollouts))


@pytest.mark.parametrize("name", ["answers", "pairs"])
def test_scores_have_zero_mean_and_unit_variance_wherever_the_model_is_read(name: str, world: World, scorer: Path):
    before = scores(world, scorer, name)
    found = calibrate(scorer, world.data(name))
    after = scores(world, scorer, name)
    assert (found.rows, found.mean, found.std) == (
        len(before),
        pytest.approx(before.mean()),
        pytest.approx(before.std()),
    )
    assert (after.mean(), after.std()) == (pytest.approx(0, abs=1e-6), pytest.approx(1, abs=1e-6))
    np.testing.assert_allclose(after, (before - before.mean()) / before.std(), atol=1e-6)
    again = calibrate(scorer, world.data(name))
    assert (again.mean, again.std) == (pytest.approx(found.mean), pytest.approx(found.std)), "not of scores it changed"


def test_weights_and_the_rest_of_the_config_stay(world: World, scorer: Path):
    files = {path.name: path.read_bytes() for path in scorer.iterdir()}
    before = json.loads(files.pop("config.json"))
    calibrate(scorer, world.data("pairs"))
    assert {name: (scorer / name).read_bytes() for name in files} == files
    assert {path.name for path in scorer.iterdir()} == {*files, "config.json"}, "nothing is left behind"
    after = json.loads((scorer / "config.json").read_text())
    made = after.pop("hone")
    assert after == {name: value for name, value in before.items() if name != "hone"}
    assert (made["kind"], made["mean"] != 0, made["std"] != 1) == ("reward", True, True)


def test_a_checkpoint_of_a_run_stays_whole(world: World, tmp_path: Path):
    folder = hone.run(recipe(world, "pointwise_reward_model", tmp_path / "run", "train.steps=1"))
    calibrate(folder, world.data("scores"))
    verify(folder)
    assert load_scorer(folder).std != 1


def test_the_command_says_what_it_found(world: World, scorer: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["rewards", "calibrate", str(scorer), world.data("pairs"), "--limit", "3", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["rows"] == 6, "both of three pairs"
    assert main(["rewards", "calibrate", str(scorer), world.data("pairs")]) == 0
    assert "standard deviation" in capsys.readouterr().out


def test_what_cannot_be_calibrated_is_said_and_nothing_is_written(world: World, scorer: Path, tmp_path: Path):
    config = (scorer / "config.json").read_bytes()
    same = write_rows(tmp_path / "same.jsonl", [{"prompt": "1+1=", "completion": "2"}] * 3)
    for data, says in ((same, "use at least two that differ"), (world.data("problems"), "nothing to train on")):
        with pytest.raises(HoneError, match=says):
            calibrate(scorer, data)
    assert (scorer / "config.json").read_bytes() == config
    with pytest.raises(HoneError, match="it is a language model"):
        calibrate(world / "model", world.data("pairs"))
    process = hone.run(recipe(world, "process_reward_model", tmp_path / "run", "train.steps=1"))
    with pytest.raises(HoneError, match="is a step model, whose scores are chances already"):
        calibrate(process, world.data("pairs"))
