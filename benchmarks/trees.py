"""Did a refactoring cost time? Two trees of Hone do the same work in turns.

    python -m benchmarks.trees OLD_SRC [--quick]

OLD_SRC is the `src` folder of another checkout (`git worktree add /tmp/old COMMIT`). Each tree has a process of its
own, and both take turns: five rounds after one that does not count. A round is a whole run by `hone.run`, the door that
both trees share; its time is the median second of its later steps, as the run logs it. The goal is the project's own:
no more than 3 % slower. On a machine with a GPU the work is of its size, and runs there.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
ROUNDS, WARM, SLOWER = 5, 1, 1.03
TINY = {"hidden_size": 128, "intermediate_size": 512, "layers": 4, "heads": 8, "kv_heads": 8, "context": 128}
SMALL = {"hidden_size": 576, "intermediate_size": 1536, "layers": 30, "heads": 9, "kv_heads": 3, "context": 512}


def works(*, gpu: bool) -> dict[str, dict[str, Any]]:
    """What is timed, by name: the algorithm, the model's shape, and how much a step does."""
    if gpu:
        shape, many = {**SMALL, "vocab_size": 49152}, {"group": 8, "max_tokens": 256}
        return {
            "GRPO step, 135M, 32 x 8 completions of 256": {"algo": "grpo", "shape": shape, "prompts": 32, **many},
            "SFT step, 135M, 64 rows": {"algo": "sft", "shape": shape, "prompts": 64},
        }
    sampled = {"prompts": 24, "group": 8, "max_tokens": 44}
    return {
        "GRPO step, 0.9M, 24 x 8 completions of 44": {"algo": "grpo", "shape": TINY, **sampled},
        "PPO step, 0.9M, 24 x 8 completions of 44": {"algo": "ppo", "shape": TINY, **sampled},
        "SFT step, 0.9M, 64 rows": {"algo": "sft", "shape": TINY, "prompts": 64},
        "DPO step, 0.9M, 32 pairs": {"algo": "dpo", "shape": TINY, "prompts": 32},
    }


# --- one tree, in a process of its own: only `hone` and what it needs is imported ---


def tokenizer(folder: Path) -> str:
    """A folder with a tokenizer of a few hundred tokens, in Hugging Face's form."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<pad>", "<eos>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    made.train_from_iterator(["What is 1+2+3+4? It is 10."] * 3, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>", "pad_token": "<pad>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    return str(folder)


def run_once(work: dict[str, Any], folder: Path, *, steps: int) -> float:
    """The median seconds of a run's later steps."""
    import hone

    out, start = folder / "run", folder / f"start-{work['shape']['hidden_size']}"
    fresh = hone.ModelSpec(tokenizer=str(folder / "tokenizer"), **work["shape"])
    problems = [(f"What is {a}+{b}?", str(a + b)) for a in range(20) for b in range(20)]
    rows: list[dict[str, Any]] = [{"prompt": q, "answer": a} for q, a in problems]
    if work["algo"] == "sft":
        rows = [{"prompt": q, "completion": f"It is {a}. " * 6} for q, a in problems]
    if work["algo"] == "dpo":
        rows = [{"prompt": q, "chosen": f"It is {a}. " * 4, "rejected": f"It is {a}0. " * 4} for q, a in problems]
    online: dict[str, Any] = (
        {"reward": lambda completion, task: float(task.answer in completion)} if "group" in work else {}
    )
    sample = hone.SampleSpec(**{name: work[name] for name in ("group", "max_tokens") if name in work})
    off = dict.fromkeys(("truncated_stop", "varied_warn", "truncated_warn"))
    limits: Any = getattr(hone, "LimitSpec" if hasattr(hone, "LimitSpec") else "Limits")(**off)
    recipe = hone.Recipe(
        name="trees",
        model=hone.ModelSpec(path=str(start)) if start.is_dir() else fresh,
        data=rows,
        algo=getattr(hone.algo, work["algo"])(),
        sample=sample,
        train=hone.TrainSpec(steps=steps, prompts=work["prompts"]),
        save=hone.SaveSpec(minutes=0),
        limits=limits,
        out=str(out),
        **online,
    )
    with redirect_stdout(sys.stderr):
        hone.run(recipe)
    seconds = [json.loads(line)["seconds"] for line in (out / "metrics.jsonl").read_text().splitlines()]
    if not start.is_dir():  # the model as the run found it: the next run need not make it anew
        shutil.move(out / "start", start)
    shutil.rmtree(out)
    return statistics.median(seconds[len(seconds) // 3 :])


def worker() -> None:
    """Does the work that each line of standard input names, and prints its seconds."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        tokenizer(folder / "tokenizer")
        for line in sys.stdin:
            asked = json.loads(line)
            print(run_once(asked["work"], folder, steps=asked["steps"]), flush=True)


# --- both trees ---


def start(source: Path) -> "subprocess.Popen[str]":
    """A worker whose `hone` is that of the tree."""
    environment = {**os.environ, "PYTHONPATH": str(source), "OMP_WAIT_POLICY": "passive"}
    return subprocess.Popen(
        [sys.executable, str(Path(__file__).resolve()), "--worker"],
        env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip


def ask(process: "subprocess.Popen[str]", work: dict[str, Any], *, steps: int) -> float:
    """One round of one tree."""
    assert process.stdin is not None
    assert process.stdout is not None
    print(json.dumps({"work": work, "steps": steps}), file=process.stdin, flush=True)
    answer = process.stdout.readline()
    if not answer:
        raise RuntimeError(f"the worker ended with {process.wait()}")
    return float(answer)


def compare(old: Path, *, quick: bool) -> Iterator[dict[str, Any]]:
    """A row for each work: seconds a step of the new tree and the old, and their ratio."""
    import torch

    from benchmarks.form import row, say

    gpu, steps = torch.cuda.is_available(), 9 if quick else 18
    trees = {"old": start(old), "new": start(ROOT / "src")}
    try:
        for name, work in works(gpu=gpu).items():
            seconds: dict[str, list[float]] = {tree: [] for tree in trees}
            for turn in range(WARM + ROUNDS):
                for tree in sorted(trees, reverse=bool(turn % 2)):  # neither always comes first
                    seconds[tree].append(ask(trees[tree], work, steps=steps))
            took = {tree: statistics.median(found[WARM:]) for tree, found in seconds.items()}
            say(name, {tree: [f"{x:.4f}" for x in found] for tree, found in seconds.items()})
            ratio = took["new"] / took["old"]
            yield row(
                name, took["new"], peer=took["old"], unit="s", goal=f"<= {SLOWER} x the old tree", ok=ratio <= SLOWER
            )
    finally:
        for process in trees.values():
            process.kill()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path, nargs="?", help="the src folder of the other tree")
    parser.add_argument("--quick", action="store_true", help="half as many steps a run")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker()
        return 0
    if args.old is None or not (args.old / "hone").is_dir():
        parser.error("name the src folder of another checkout, as in `git worktree add /tmp/old COMMIT`, /tmp/old/src")
    from benchmarks.form import print_result

    return print_result(list(compare(args.old.resolve(), quick=args.quick)))


if __name__ == "__main__":
    sys.exit(main())
