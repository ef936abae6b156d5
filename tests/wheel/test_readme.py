"""What the README and the pages of runs and models say works after `pip install hone`: in an empty folder, far from the
clone.

`make wheel` builds the wheel, installs it elsewhere and runs these. The demo is the quick one, and runs are of a few
steps; nothing is downloaded.
"""

import shlex
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path
from urllib.request import Request, urlopen

import pytest

from benchmarks.claims import command_lines, parts
from tests.wheel.place import INSTALLED, ROOT, Place

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not INSTALLED, reason="no wheel is installed elsewhere: `make wheel` does it and runs these"),
]
PAGES = [ROOT / "README.md", ROOT / "docs/runs.md", ROOT / "docs/models.md"]
SNIPPETS = [block for page in PAGES for language, block in parts(page)[0] if language == "python"]
SMALL = "train.steps=2 train.prompts=4 sample.group=4 train.minibatches=1 train.eval_every=0"
SMALL_SFT = "train.steps=2 train.prompts=4"


@dataclass(frozen=True)
class Step:
    """How a command of the pages is tried here."""

    words: str
    says: str
    code: int = 0
    kind: str = "core"
    said: str = ""


COMMANDS = {  # by what the pages write
    "recipes": Step("recipes", "On-policy distillation"),
    "recipes grpo": Step("recipes grpo", "def recipe() -> Recipe:"),
    "run grpo train.steps=20 algo=dapo algo.high=0.3": Step(
        f"run grpo algo=dapo algo.high=0.3 {SMALL} out=runs/dapo", "runs/dapo/checkpoints/step-000002"
    ),
    "check grpo": Step("check grpo", "0 fail"),
    "resume runs/grpo": Step("resume runs/grpo", "2 of 2 steps are done"),
    "resume runs/grpo train.steps=2000": Step("resume runs/grpo train.steps=3", "runs/grpo/checkpoints/step-000003"),
    "eval runs/demo/grpo/model runs/demo/data/held_out.jsonl --samples 8": Step(
        "eval runs/demo/grpo/model runs/demo/data/held_out.jsonl --samples 8", "pass@8"
    ),
    "algos": Step("algos", "reinforce"),
    "algos ppo": Step("algos ppo", "algo.beta="),
    "settings": Step("settings", "optim.lr="),
    "settings train": Step("settings train", "train.steps="),
    "fetch smollm2-135m": Step("fetch smollm2-135m", 'pip install "hone[gguf]"', code=2),
    "fetch stories260k": Step("fetch stories260k", "set HONE_DATA", code=2),
    "fetch OWNER/MODEL": Step("fetch OWNER/MODEL", "check the name and the network", code=2),
    "fetch FILE.gguf --to FOLDER": Step("fetch FILE.gguf --to FOLDER", "FOLDER", kind="full"),
    "run RECIPE model.path=smollm2-135m": Step(
        f"run sft model.path=smollm2-135m {SMALL_SFT} out=runs/named", "runs/named/checkpoints/step-000002"
    ),
    "chat smollm2-135m": Step("chat smollm2-135m --max-tokens 8", "no chat template", said="What is 1+2+3+4?\n"),
    "chat runs/demo/grpo/model": Step("chat runs/demo/grpo/model", "no chat template", said="What is 3+1+8+7?\n"),
    "chat runs/NAME": Step("chat runs/grpo --max-tokens 8", "no chat template", said="What is 3+1+8+7?\n"),
    "serve smollm2-135m --adapter maths=ADAPTER_FOLDER": Step(
        "serve smollm2-135m --adapter maths=adapters/terse", "pip install 'hone[serve]'", code=2
    ),  # and in the full environment: test_the_server_answers
    "demo": Step("demo --help", "--quick"),
    "demo --quick --out runs/quick": Step("demo --quick --out runs/quick", "runs/quick/report.html"),
    "check": Step("check --help", "RECIPE"),
    "check RECIPE": Step("check sft --json", '"findings"'),
    "run": Step("run --help", "RECIPE"),
    "rewards test DATASET": Step("rewards test runs/demo/data/problems.jsonl", "100 of 100 right answers score 1"),
    "report RUN_DIR": Step("report runs/grpo", "runs/grpo/report.html"),
    "sandbox doctor": Step("sandbox doctor", "a small program takes"),
    "corpus clean IN... --out FOLDER": Step(
        "corpus clean runs/demo/data/corpus.jsonl --out clean", "quality:min_words", kind="full"
    ),
    "plan scaling": Step("plan scaling --flops 1e21", "tokens/param"),
    "inspect MODEL --base BASE": Step(
        "inspect runs/demo/dpo/model --base runs/demo/sft/model", "norm of the whole update"
    ),
    "replay RUN_DIR/bad/FILE": Step("replay runs/bad/bad/step-000002.safetensors", "not finite"),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """What a reader has by then: the demo, a run of each kind, two adapters, a model by name."""
    place = Place(tmp_path_factory.mktemp("user"), tmp_path_factory.mktemp("home"))
    place.hone("demo", "--quick")
    place.hone("run", "grpo", *SMALL.split())
    place.hone("run", "sft_lora", *SMALL_SFT.split())
    for name in ("terse", "kind"):
        shutil.copytree(
            place.folder / "runs/sft_lora/checkpoints/step-000002/adapter", place.folder / "adapters" / name
        )
    shutil.copytree(place.folder / "runs/demo/sft/model", place.folder / "smollm2-135m")
    wild = "optim.lr=1e30 optim.clip_norm=1e30 train.max_bad_updates=1 out=runs/bad"
    assert place.run("hone", "run", "sft", "train.steps=3", "train.prompts=4", *wild.split()).returncode == 2
    make_gguf = "from gguf_files import model_of, written; from pathlib import Path; import sys"
    make_gguf += "; written(Path(sys.argv[1]), 'llama', model_of('llama'))"
    where = {**place.environment("full"), "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}:{ROOT / 'tests/model'}"}
    subprocess.run([sys.executable, "-c", make_gguf, place.folder / "FILE.gguf"], env=where, check=True)
    return place


def test_hone_comes_from_the_wheel_and_nothing_from_the_clone(place: Place):
    for kind in ("core", "full"):
        found = place.python("import hone, sys; print(hone.__file__, *sys.path, sep='\\n')", kind).splitlines()
        assert Path(found[0]).is_relative_to(Path(INSTALLED) / kind)
        assert not [path for path in found if Path(path).is_relative_to(ROOT / "src")]
        assert str(ROOT) not in found


def test_the_wheel_has_every_file_of_the_package():
    (wheel,) = Path(INSTALLED).glob("*.whl")
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("hone/")}
    there = {path for path in (ROOT / "src/hone").rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    assert packed == {str(path.relative_to(ROOT / "src")) for path in there}


def test_every_command_of_the_pages_is_tried_here():
    assert {" ".join(words) for page in PAGES for words in command_lines(page)} == set(COMMANDS)


@pytest.mark.parametrize("written", COMMANDS)
def test_a_command_of_the_pages_works(written: str, place: Place):
    step = COMMANDS[written]
    done = place.run("hone", *shlex.split(step.words), kind=step.kind, said=step.said)
    assert step.says in done.stdout + done.stderr
    assert done.returncode == step.code, done.stderr[-2000:]


def test_a_package_that_is_missing_is_named_and_nothing_is_left_behind(place: Place):
    words = ["corpus", "clean", "runs/demo/data/corpus.jsonl", "--out", "bare"]
    done = place.run("hone", *words)
    assert (done.returncode, 'pip install "hone[corpus]"' in done.stderr) == (2, True)
    assert not (place.folder / "bare").exists()
    place.hone(*words, *["--languages", "off", "--toxicity", "off", "--near", "off"])


def test_an_interrupted_run_is_resumed(place: Place):
    words = ["hone", "run", "grpo", *SMALL.split(), "train.steps=2000", "out=runs/long"]
    run = subprocess.Popen(words, cwd=place.folder, env=place.environment("core"), stderr=subprocess.PIPE, text=True)
    assert run.stderr is not None
    next(line for line in run.stderr if " 2/2000 " in line)
    run.terminate()
    run.stderr.read()
    assert run.wait() == 130
    done = len(list((place.folder / "runs/long/checkpoints").glob("step-*")))
    assert done >= 1
    steps = int((place.folder / "runs/long/checkpoints/latest").read_text().strip().removeprefix("step-")) + 1
    assert f"step-{steps:06d}" in place.hone("resume", "runs/long", f"train.steps={steps}")


@pytest.mark.parametrize("number", range(len(SNIPPETS)))
def test_the_python_of_the_pages_runs(number: int, place: Place):
    place.python(SNIPPETS[number])


@pytest.mark.parametrize("page", ["sampler.md", "sandbox.md"])
def test_the_python_of_a_page_runs(page: str, place: Place):
    for language, block in parts(ROOT / "docs" / page)[0]:
        if language == "python":
            place.python(block)


def test_the_example_runs_on_the_installed_package(place: Place):
    done = place.run("python", str(ROOT / "examples/minimal_grpo.py"))
    assert "step 200" in done.stdout


def test_the_server_answers(place: Place):
    words = ["hone", "serve", "smollm2-135m", "--adapter", "maths=adapters/terse", "--port", "0", "--token", "secret"]
    with subprocess.Popen(
        words,
        cwd=place.folder,
        env=place.environment("full"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as server:
        assert server.stdout is not None
        address = next(word for line in server.stdout for word in line.split() if word.startswith("http://127.0.0.1:"))
        models = Request(f"{address.removesuffix('/v1')}/v1/models", headers={"Authorization": "Bearer secret"})
        assert '"maths"' in urlopen(models).read().decode()
        server.terminate()
        server.stdout.read()
        assert server.wait() == 0


def test_a_checkpoint_loads_with_transformers(place: Place):
    source = (
        "from transformers import AutoModelForCausalLM as A; A.from_pretrained('runs/grpo/checkpoints/step-000002')"
    )
    place.python(source, "full")
