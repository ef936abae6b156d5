"""Commands that are refused, and the command that each message asks for."""

from remedy_world import World, call, command, typed

COMMANDS = [
    command("plan scaling", "plan scaling --flops 1e18", "give one of --flops"),
    command("plan scaling --gpu-hours 3", "plan scaling --gpu-hours 3 --peak 1e15", "needs --peak"),
    command(
        "plan scaling --flops 1e18 --layers 3",
        "plan scaling --flops 1e18 --layers 3 --width 64 --context 64",
        "give all three",
    ),
    command("plan scaling --flops 1e18 --law mine", "plan scaling --flops 1e18 --law hoffmann", "choose from both, "),
    command(
        "plan scaling --gpu-hours 1 --peak 1e15 --mfu 2",
        "plan scaling --gpu-hours 1 --peak 1e15 --mfu 0.4",
        "above 0 and up to 1",
    ),
    command("settings train.lagg", "settings train.lag", "`hone settings` lists them all"),
    command("settings nothing", "settings", "`hone settings` lists them all"),
    command(
        "eval WORLD/model WORLD/problems.jsonl --samples 0",
        "eval WORLD/model WORLD/problems.jsonl --samples 1 --max-tokens 2",
        "set n to 1 or more",
    ),
    command(
        "eval WORLD/model WORLD/problems.jsonl --limit -1",
        "eval WORLD/model WORLD/problems.jsonl --limit 1 --max-tokens 2",
        "give a number of problems, or 0 for all",
    ),
    command(
        "eval WORLD/model WORLD/text.jsonl",
        "eval WORLD/model WORLD/problems.jsonl --max-tokens 2",
        'column "prompt" is missing',
    ),
    command(
        "eval WORLD/nothing/here WORLD/problems.jsonl",
        "eval WORLD/model WORLD/problems.jsonl --max-tokens 2",
        "check the path",
    ),
    command(
        "rewards test WORLD/asked.jsonl",
        "rewards test WORLD/asked.jsonl --prompt question --gold result",
        "--prompt COLUMN",
    ),
    command("rewards test WORLD/results.jsonl", "rewards test WORLD/results.jsonl --gold result", "--gold COLUMN"),
    command(
        "rewards test WORLD/problems.jsonl --limit -1", "rewards test WORLD/problems.jsonl --limit 0", "give 0 or more"
    ),
    command(
        "rewards calibrate WORLD/judge WORLD/pairs.jsonl",
        "rewards calibrate WORLD/scorer WORLD/pairs.jsonl",
        "give a reward model",
    ),
    command(
        "rewards calibrate WORLD/scorer WORLD/pairs.jsonl --limit -1",
        "rewards calibrate WORLD/scorer WORLD/pairs.jsonl --limit 0",
        "give a number of rows, or 0 for all",
    ),
    command(
        "corpus clean WORLD/text.jsonl --out WORLD/c2 --rule min_words=nan",
        "corpus clean WORLD/text.jsonl --out WORLD/c9 --rule min_words=off --languages off --toxicity off --workers 1",
        "is nan: set it to a number, or off",
    ),
    command(
        "corpus overlap WORLD/text.jsonl",
        "corpus overlap WORLD/text.jsonl --eval WORLD/answers.jsonl --workers 1",
        "name the evaluation sets with --eval",
    ),
    command(
        "corpus clean WORLD/text.jsonl --out WORLD/c --drop-overlap",
        "corpus clean WORLD/text.jsonl --out WORLD/c1 --no-quality --languages off --toxicity off --workers 1",
        "or leave out --drop-overlap",
    ),
    command(
        "corpus clean WORLD/answers.jsonl --out WORLD/c2 --languages off --toxicity off --workers 1",
        "corpus clean WORLD/answers.jsonl --out WORLD/c2 --languages off --toxicity off --workers 1 --column prompt",
        "name its column with --column",
    ),
    command(
        "corpus clean WORLD/text.jsonl --out WORLD/c3 --near x",
        "corpus clean WORLD/text.jsonl --out WORLD/c3 --near off --languages off --toxicity off --workers 1",
        "give a number, or off",
    ),
    command(
        "corpus clean WORLD/text.jsonl --out WORLD/c4 --rule max=1",
        "corpus clean WORLD/text.jsonl --out WORLD/c4 --rule min_words=1 --languages off --toxicity off --workers 1",
        "NAME=LIMIT or NAME=off",
    ),
    command(
        "corpus clean WORLD/text.jsonl --out WORLD/c5 --languages xx",
        "corpus clean WORLD/text.jsonl --out WORLD/c5 --languages en --toxicity off --workers 1",
        "choose from",
    ),
    command(
        "corpus clean WORLD/nothing --out WORLD/c6",
        "corpus clean WORLD/text.jsonl --out WORLD/c6 --languages off --toxicity off --workers 1",
        "give the path of a file or folder of texts",
    ),
    command(
        "corpus clean WORLD/text.jsonl --out WORLD/c7 --split page",
        "corpus clean WORLD/text.jsonl --out WORLD/c7 --split line --languages off --toxicity off --workers 1",
        "choose from blank, line, file",
    ),
    command(
        "corpus clean WORLD/text.jsonl --out WORLD --workers 1",
        "corpus clean WORLD/text.jsonl --out WORLD/c8 --workers 1 --languages off --toxicity off",
        "choose an empty folder",
    ),
    command("algos nothing", "algos grpo", "nothing"),
    call(
        lambda w: _begun(w, again="no-restart"), lambda w: _begun(w, again="--restart"), "start it anew with --restart"
    ),
    call(lambda w: _run_twice(w, "run"), lambda w: _run_twice(w, "resume"), "continue it with `hone resume"),
    call(lambda w: _changed(w), lambda w: _changed(w, "--allow-change"), "add --allow-change"),
]


def _begun(world: World, *, again: str) -> None:
    """A corpus that was cleaned, and once more with another rule."""
    out = world.new()
    words = [
        "corpus",
        "clean",
        world / "text.jsonl",
        "--out",
        out,
        "--workers",
        "1",
        "--languages",
        "off",
        "--toxicity",
        "off",
    ]
    typed(world, *words)
    typed(world, *words, "--no-quality", *(["--restart"] if again == "--restart" else []))


def _trained(world: World) -> str:
    out = world.new()
    path = world.file("from hone import Recipe\n\n\ndef recipe():\n    return Recipe()\n", ".py")
    words = [
        f"out={out}",
        f"model.path={world / 'model'}",
        f"data={world / 'answers.jsonl'}",
        "algo=sft",
        "train.steps=1",
    ]
    typed(world, "run", path, *words, "train.prompts=2", "train.device=cpu")
    return f"{out} {path} {' '.join(words)} train.prompts=2 train.device=cpu"


def _run_twice(world: World, how: str) -> None:
    out, path, *words = _trained(world).split()
    typed(world, *(["run", path, *words] if how == "run" else ["resume", out]))


def _changed(world: World, *more: str) -> None:
    out, *_ = _trained(world).split()
    typed(world, "resume", out, "train.steps=2", "optim.lr=0.01", *more)
