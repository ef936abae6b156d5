"""Every value of every file that Hone reads of a run or of its settings, replaced by each kind of wrong value: what
comes is a line that says what is wrong, never a bug."""

import json
import random
import shutil
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from mutants import mutants
from safetensors import safe_open
from safetensors.torch import save
from small import World, recipe

import hone
from hone.checkpoint.record import _digest, recorded_recipe
from hone.cli import main
from hone.config.overrides import from_yaml, to_json
from hone.config.recipe import ReadSpec, Recipe
from hone.config.rules import validate
from hone.demo import journey, stages
from hone.errors import HoneError
from hone.inference.label import Ledger
from hone.launch import replay
from hone.launch.job import prepare
from hone.launch.rewards import judge
from hone.log.sinks import read
from hone.model.formats.cache import resolve
from hone.report.report import write_report
from hone.reward.learned.judge import JudgeSettings
from hone.reward.verify.code.settings import CodeSettings, reward_arguments
from hone.reward.verify.structure import schema
from hone.storage import files as checkpoint
from hone.storage import names
from hone.train.learner import Learner

torch.set_num_threads(1)
FEW = 12  # of each file, chosen at random but always the same; the slow test takes all
AHEAD = ("train.lag=1", "train.mismatch=truncate")


def written(path: Path, document: Any) -> Path:
    path.write_bytes(json.dumps(document, ensure_ascii=False).encode("utf-8", "backslashreplace"))
    return path


def tried(document: Any, attempt: Callable[[Any], object], *, most: int = 0) -> int:
    """How many of the changed documents were taken; each other one raises HoneError."""
    chosen, taken = list(mutants(document)), 0
    random.Random(0).shuffle(chosen)
    for what, changed in islice(chosen, most or None):
        try:
            attempt(changed)
            taken += 1
        except HoneError:
            continue
        except Exception as error:
            raise AssertionError(f"{what}: {type(error).__name__}: {error}") from error
    assert taken < len(chosen)
    return taken


def plain(value: Any) -> Any:
    return json.loads(json.dumps(to_json(value)))


# --- settings ---


@pytest.mark.parametrize("most", [80, pytest.param(0, marks=pytest.mark.slow)])
def test_a_file_of_settings(most: int, tmp_path: Path):
    base = plain(Recipe(data="a.jsonl", reward={"math": 1.0}, read=ReadSpec(columns={"prompt": "q"})))
    base["parts"] |= {"low": {"math": 0.0}, "schedule": {"math": "0:1"}, "cache": {"math": 1}}

    def attempt(changed: Any) -> None:
        validate(from_yaml(written(tmp_path / "settings.yaml", changed), Recipe()))

    tried(base, attempt, most=most)


def test_a_judges_file_and_a_verifiers(tmp_path: Path, world: World):
    def attempt(changed: Any) -> None:
        judge(str(written(tmp_path / "judge.yaml", changed)))

    def verifier(changed: Any) -> None:
        path = written(tmp_path / "code.yaml", changed)
        reward_arguments(from_yaml(path, CodeSettings()), path)

    tried(plain(JudgeSettings(model="m", endpoint="http://127.0.0.1:9/v1")), attempt, most=100)
    tried(plain(CodeSettings()), verifier, most=100)


@pytest.mark.parametrize(
    "text",
    [
        "&a {x: *a}", "&a [*a]", "a: *b", "? [1, 2]\n: 3", "a: !!bool maybe", "a: !!int x", "a: 2001-99-99", "- 1",
        "<<: 3", "a: 1\n---\nb: 2", "!!python/object:os.system x", "[" * 1200, "{" * 1200, "seed: " + "9" * 5000,
        "train: {steps: .inf}", "train: [1]", "model: 3", "algo: {name: {}}", "algo: []", "reward: [math]", "'': 1",
        "reward: {math: {a: 1}}", "data: {a: 1}", "save: null", "read: {columns: [a]}", "optim: {betas: 3}",
        "name: !!binary aGVsbG8=", "!!binary aGVsbG8=: 1", "a..b: 1", "train.steps.x: 1", "\x00", "a: !!set {x}",
    ],
)  # fmt: skip
def test_odd_yaml(text: str, tmp_path: Path):
    (tmp_path / "settings.yaml").write_text(text)
    with pytest.raises(HoneError):
        validate(from_yaml(tmp_path / "settings.yaml", Recipe()))


# --- a run's folder ---


@pytest.fixture(scope="module")
def runs(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps of several kinds of run, and one with an update that was skipped."""
    folder = tmp_path_factory.mktemp("runs")
    mix = f"data={world.data('answers')}*0.5+{world.data('answers')}*0.5"
    for name, algo, settings in (
        ("grpo", "grpo", ("algo.kl_target=0.1", "train.rollback=5", "save.every=1")),
        ("mix", "sft", (mix,)),
        ("ahead", "grpo", AHEAD),
    ):
        hone.run(recipe(world, algo, folder / name, *settings, "train.steps=2"))
    end = Learner.end_iteration

    def struck(learner: Learner) -> None:
        end(learner)
        next(iter(learner.trained().values())).data.mul_(torch.nan if learner.version == 1 else 1.0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Learner, "end_iteration", struck)
        with pytest.raises(HoneError):
            hone.run(recipe(world, "sft", folder / "bad", "train.steps=2"))
    return folder


def sign(folder: Path) -> None:
    """As if these files had been written so: a damaged one is found by its hash already."""
    files = {p.name: checkpoint.digest(p) for p in folder.iterdir() if p.is_file() and p.name != names.MANIFEST}
    (folder / names.MANIFEST).write_text(json.dumps(files))


def with_state(runs: Path, name: str, tmp_path: Path) -> Iterator[tuple[Any, Callable[[Any], None]]]:
    """The state of a run's last checkpoint, and what goes on from it."""
    out = tmp_path / name
    shutil.copytree(runs / name, out)
    saved = out / "checkpoints/step-000002"
    made = recorded_recipe(out)

    def attempt(changed: Any) -> None:
        written(saved / "state.json", changed)
        sign(saved)
        prepare(made, resume_from=saved)

    yield json.loads((saved / "state.json").read_text()), attempt


@pytest.mark.parametrize("name", ["grpo", "mix"])
def test_the_state_in_a_checkpoint(name: str, runs: Path, tmp_path: Path):
    for state, attempt in with_state(runs, name, tmp_path):
        tried(state, attempt, most=FEW)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["grpo", "mix", "ahead"])
def test_every_value_of_the_state_in_a_checkpoint(name: str, runs: Path, tmp_path: Path):
    for state, attempt in with_state(runs, name, tmp_path):
        tried(state, attempt)


def test_rollouts_that_were_sampled_ahead(runs: Path, tmp_path: Path):
    out = tmp_path / "ahead"
    shutil.copytree(runs / "ahead", out)
    saved, made = out / "checkpoints/step-000002", recorded_recipe(out)
    with safe_open(saved / "ahead.safetensors", framework="pt") as file:
        about, tensors = json.loads(file.metadata()["hone"]), {n: file.get_tensor(n).clone() for n in file.keys()}  # noqa: SIM118

    def attempt(changed: Any) -> None:
        text = json.dumps(changed, ensure_ascii=False).encode("utf-8", "backslashreplace").decode()
        (saved / "ahead.safetensors").write_bytes(save(tensors, metadata={"hone": text}))
        sign(saved)
        prepare(made, resume_from=saved)

    tried(about, attempt, most=FEW)


def test_the_rows_of_a_skipped_update(runs: Path, tmp_path: Path):
    out = tmp_path / "bad"
    shutil.copytree(runs / "bad", out)
    path = out / "bad/step-000002.safetensors"
    with safe_open(path, framework="pt") as file:
        about, tensors = json.loads(file.metadata()["hone"]), {n: file.get_tensor(n).clone() for n in file.keys()}  # noqa: SIM118

    def attempt(changed: Any) -> None:
        text = json.dumps(changed, ensure_ascii=False).encode("utf-8", "backslashreplace").decode()
        path.write_bytes(save(tensors, metadata={"hone": text}))
        replay.replay(path)

    tried(about, attempt, most=FEW // 2)


@pytest.mark.parametrize("signed", [True, False], ids=["signed", "damaged"])
def test_the_settings_of_a_run(signed: bool, runs: Path, tmp_path: Path):
    out = tmp_path / "grpo"
    shutil.copytree(runs / "grpo", out)
    about = json.loads((out / "config.json").read_text())

    def attempt(changed: Any) -> None:
        if signed and isinstance(changed, dict) and "recipe" in changed:
            changed = {**changed, "digest": _digest(changed["recipe"])}
        written(out / "config.json", changed)
        validate(recorded_recipe(out))

    tried(about, attempt, most=60)


def test_the_manifest_of_a_checkpoint(runs: Path, tmp_path: Path):
    out = tmp_path / "mix"
    shutil.copytree(runs / "mix", out)
    path = out / "checkpoints/step-000002/manifest.json"
    before = json.loads(path.read_text())
    tried(before, lambda changed: checkpoint.verify(written(path, changed).parent), most=60)
    for name in ("../../config.json", str(out / "config.json")):
        written(path, {**before, name: checkpoint.digest(out / "config.json")})
        with pytest.raises(HoneError, match="which is outside of it"):
            checkpoint.verify(path.parent)


@pytest.mark.parametrize("name", ["metrics.jsonl", "samples.jsonl"])
def test_a_line_of_a_log(name: str, runs: Path, tmp_path: Path):
    line = (runs / "grpo" / name).read_bytes().splitlines()[0]

    def attempt(changed: Any) -> None:
        path = written(tmp_path / name, changed)
        path.write_bytes(path.read_bytes() + b"\n" + line + b"\n")
        rows, samples = (read(path), []) if name == "metrics.jsonl" else ([], read(path))
        write_report(tmp_path / "report.html", title="x", table=[], runs={"x": rows}, samples=samples)

    tried(json.loads(line), attempt, most=50)


# --- which checkpoint ---


@pytest.mark.parametrize("text", [
    "", "x", "..", "../../elsewhere", "/etc", "step-000002/../../..", "../checkpoints/step-000002", "step-000002/",
    "\x00", "a" * 5000, "step-", "step-2x", b"\xff\xfe", "step-000002\nstep-000001",
])  # fmt: skip
def test_latest_names_a_checkpoint_of_the_run_or_is_refused(text: str | bytes, runs: Path, tmp_path: Path):
    out = tmp_path / "mix"
    shutil.copytree(runs / "mix", out)
    assert resolve(out) == out / "checkpoints/step-000002"
    (out / "checkpoints/latest").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(HoneError, match=r"names no checkpoint of this run: remove it, or give one of them"):
        resolve(out)
    (out / "checkpoints/latest").unlink()
    assert resolve(out) == out / "checkpoints/step-000002", "the remedy"


def test_a_link_out_of_the_run_is_not_followed(runs: Path, world: World, tmp_path: Path, capsys):
    out, other = tmp_path / "mix", tmp_path / "elsewhere"
    shutil.copytree(runs / "mix", out)
    shutil.copytree(out / "checkpoints/step-000002", other)
    (out / "checkpoints/latest").unlink()
    for target in (other, other / "config.json"):
        (out / "checkpoints/latest").symlink_to(target)
        with pytest.raises(HoneError, match="names no checkpoint of this run"):
            resolve(out)
        (out / "checkpoints/latest").unlink()
    shutil.rmtree(out / "checkpoints/step-000002")
    (out / "checkpoints/step-000002").symlink_to(other)
    (out / "checkpoints/latest").write_text("step-000002")
    with pytest.raises(HoneError, match="names no checkpoint of this run"):
        resolve(out)
    assert main(["resume", str(out), "train.steps=3"]) == 2
    assert "is a link, and may lead out of the run" in capsys.readouterr().err


def test_a_run_in_a_folder_that_is_a_link_is_a_run(runs: Path, tmp_path: Path):
    shutil.copytree(runs / "mix", tmp_path / "mix")
    (tmp_path / "link").symlink_to(tmp_path / "mix")
    assert resolve(tmp_path / "link") == tmp_path / "link/checkpoints/step-000002"
    hone.resume(tmp_path / "link", settings=["train.steps=3"])


# --- what other commands left ---


def test_how_far_a_demo_has_come(tmp_path: Path):
    out = tmp_path / "demo"
    journey.begin(out, stages.QUICK, 0)
    before = json.loads((out / journey.PROGRESS).read_text()) | {"done": {"tokenizer": {"seconds": 1.0}}}

    def attempt(changed: Any) -> None:
        out.mkdir(exist_ok=True)
        journey.begin(written(out / journey.PROGRESS, changed).parent, stages.QUICK, 0)

    tried(before, attempt, most=50)


def test_a_schema_that_is_none(tmp_path: Path):
    rules = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    tried(rules, lambda changed: schema(str(written(tmp_path / "s.json", changed))))


def test_the_settings_of_labels_that_were_begun(tmp_path: Path):
    path = tmp_path / "labels.jsonl"
    Ledger(path, {"a": 1}, whole="done")
    path.write_text("")
    settings = path.with_name("labels.jsonl.settings.json")

    def attempt(changed: Any) -> None:
        written(settings, changed)
        Ledger(path, {"a": 1}, whole="done")

    tried({"a": 1}, attempt)
