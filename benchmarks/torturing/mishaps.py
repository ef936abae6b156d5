"""What goes wrong inside a run: memory, rewards, the sampler, numbers that are none, and the clock."""

import itertools
import json
import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from benchmarks.torturing import victim
from benchmarks.torturing.case import Case
from benchmarks.torturing.points import Points
from benchmarks.torturing.world import STEPS, World, differences, metrics, temporary
from hone.engine.engine import Engine
from hone.model.policy import Policy
from hone.model.scorer import ScalarHead, Scorer
from hone.rollout.local import SharedPrompt
from hone.storage import files
from hone.train import optim
from hone.train.learner import Learner

LAST = f"checkpoints/step-{STEPS:06d}"
ROOM = 4  # rows that fit into memory


def nth(owner: Any, name: str, when: Callable[[int], bool], act: Callable[..., Any]) -> Callable[[Points], None]:
    """Prepares a child: at these calls of the function, `act` is given it with its arguments instead."""

    def prepare(points: Points) -> None:
        function, count = getattr(owner, name), itertools.count(1)

        def called(*arguments: Any, **named: Any) -> Any:
            chosen = when(next(count))
            return act(function, *arguments, **named) if chosen else function(*arguments, **named)

        setattr(owner, name, called)

    return prepare


def weights_of(run: Path) -> dict[str, Tensor]:
    """The model of the last step."""
    return load_file(run / LAST / "model.safetensors")


def memory(world: World, folder: Path, *, most: int = 6) -> Case:
    """No room for more than a few rows, in forward or in backward: halved, and the gradient stays what it was."""
    folder.mkdir(parents=True)
    case, largest = Case("out of memory in a micro-batch"), 0.0
    for loop in ("sft", "ppo", "dpo", "grpo", "trpo", "reward_model")[:most]:
        victim.run(world.recipe(loop, folder / loop / "whole", "train.prompts=6"), folder / "log")
        told = victim.run(world.recipe(loop, folder / loop / "run", "train.prompts=6"), folder / "log", prepare=_narrow)
        case.ended(told, 0)
        case.expect("out of memory with" in told.said, f"{loop}: not said")
        a, b = (weights_of(folder / loop / name) for name in ("whole", "run"))
        largest = max(largest, *(float((a[name] - b[name]).abs().max()) for name in a))
    case.expect(largest < 1e-4, f"a weight differs by {largest:.1e}")  # a step moves it by up to 1e-3
    case.ends = f"micro-batches are halved until they fit; a weight differs by {largest:.0e} at most, which is rounding"
    return case


def _narrow(points: Points) -> None:
    for model in (Policy, Scorer):
        nth(model, "forward", lambda n: True, _forward)(points)


def _forward(function: Callable[..., Any], model: Any, batch: Any, *arguments: Any, **named: Any) -> Any:
    if len(batch) > ROOM:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    return function(model, batch, *arguments, **named)


def rewards(world: World, folder: Path) -> Case:
    """Rewards that hang, die, crash or leave on some completions: those are invalid, as where they are NaN."""
    folder.mkdir(parents=True)
    case, found = Case("a reward that hangs, is killed, crashes its interpreter, or leaves it"), list[dict[str, Any]]()
    for name in ("nan", "hangs", "dies", "crashes", "leaves"):
        settings = [f"reward={world / 'rewards.py'}:{name}", "train.max_invalid=0.95", "train.reward_timeout=0.2"]
        told = victim.run(world.recipe("grpo", folder / name, *settings), folder / "log")
        case.ended(told, 0)
        case.expect(any(0 < row["invalid"] < 1 for row in metrics(folder / name)), f"{name}: nothing was invalid")
        found.append({n: x.numpy().tobytes() for n, x in weights_of(folder / name).items()})
    case.expect(all(x == found[0] for x in found), "weights depend on how a reward failed")
    case.ends = "those completions are invalid with the reason, others count, the run ends with the same bits"
    return case


def sampler(world: World, folder: Path, *, most: int = 6) -> Case:
    """The sampler raises: the steps before are saved, and resumed the run is as if it never had."""
    folder.mkdir(parents=True)
    case, count = Case("a sampler that raises"), itertools.count()
    for loop in ("grpo", "grpo, sampled ahead", "ppo", "dapo", "online_dpo", "distil")[:most]:
        whole = folder / f"whole-{next(count)}"
        calls = victim.run(world.recipe(loop, whole), folder / "log").counts["sampling"] // 2
        # what is sampled beside the last step is for a longer run, which says so and ends well
        for at in (calls // 2, calls // 3 if loop == AHEAD else calls - 3):
            out = folder / f"run-{next(count)}"
            broken = nth(Engine, "run_step", lambda n, at=at: n >= at, _raise)
            told = victim.run(world.recipe(loop, out), folder / "log", prepare=broken)
            case.ended(told, 1, "error: RuntimeError: the GPU fell off the bus")
            done = max((row["step"] for row in metrics(out)), default=0)
            kept = max(files.checkpoints(out / "checkpoints"), default=0)
            case.expect(kept >= done, f"{loop}: {done} steps done, {kept} kept")
            saved = [line for line in told.said.splitlines() if "is saved" in line]
            case.ends = case.ends or f"{saved[0]}: {told.words}" if saved else case.ends
            victim.run(world.recipe(loop, out), folder / "log")
            case.wrong += [f"{loop}: other {name}" for name in differences(whole, out)]
            case.wrong += [f"{loop}: left {name}" for name in temporary(out)]
    return case


def _raise(function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    raise RuntimeError("the GPU fell off the bus")


def clock(world: World, folder: Path, *, most: int = 3) -> Case:
    """Each look at the clock finds it an hour earlier."""
    folder.mkdir(parents=True)
    case = Case("a clock that moves backwards (inside the process)")
    for i, loop in enumerate(("grpo, sampled ahead", "sft", "grpo")[:most]):
        whole, out = folder / f"whole-{i}", folder / f"run-{i}"
        victim.run(world.recipe(loop, whole), folder / "log")
        case.ended(victim.run(world.recipe(loop, out), folder / "log", prepare=_backwards), 0)
        case.wrong += [f"{loop}: other {name}" for name in differences(whole, out)]
        seconds = [json.loads(line)["seconds"] for line in (out / "metrics.jsonl").read_text().splitlines()]
        case.expect(all(0 < x < 60 for x in seconds), f"{loop}: steps of {seconds} s")
    case.ends = "nothing differs: durations are measured by a clock that cannot be set"
    return case


def _backwards(points: Points) -> None:
    start, hours = time.time(), itertools.count()
    time.time = lambda: start - 3600.0 * next(hours)
    time.time_ns = lambda: int(1e9 * time.time())


# --- losses that leap ---

BACK = ("train.steps=20", "save.every=2", "train.rollback=20", "limits.truncated_stop=none")


def spikes(world: World, folder: Path, *, most: int = 7) -> Case:
    """Something wrecks the weights after a step: with train.rollback the run goes back, killed in between or not."""
    folder.mkdir(parents=True)
    case = Case("loss spikes, and weights that are lost, with train.rollback")
    tries = [
        ("sft", 14, _wreck),
        ("grpo", 15, _lose),
        ("sft", 15, _wreck),
        ("pretrain", 15, _wreck),
    ]  # 14 is saved, too
    tries += [(loop, 15, _lose) for loop in ("sft", "dpo", "trpo")]
    for i, (loop, step, how) in enumerate(tries[:most]):
        struck = nth(Learner, "end_iteration", lambda n: True, partial(_after, step, how))
        whole, cut = folder / f"whole-{i}", folder / f"cut-{i}"
        told = victim.run(world.recipe(loop, whole, *BACK), folder / "log", prepare=struck)
        case.ended(told, 0)
        said = [line for line in told.said.splitlines() if "went back to the weights of" in line]
        case.expect(bool(said), f"{loop}: did not go back")
        case.ends = said[-1] if said else case.ends
        bad = [name for path in files.checkpoints(whole / "checkpoints").values() for name in _bad_in(path)]
        case.wrong += [f"{loop}: {name} was saved" for name in bad]
        for moment in (("updating", 60), ("renaming", 30), ("updating", 2)):
            victim.run(world.recipe(loop, cut, *BACK), folder / "log", prepare=struck, kill=moment)
        victim.run(world.recipe(loop, cut, *BACK), folder / "log", prepare=struck)
        case.wrong += [f"{loop}, killed: other {name}" for name in differences(whole, cut, steps=20)]
    return case


def _after(step: int, how: Callable[[Learner], None], function: Callable[..., Any], learner: Learner) -> None:
    function(learner)
    if learner.version == step:
        how(learner)


def _wreck(learner: Learner) -> None:
    for p in optim.parameters_of(learner.optimizer):
        p.data.mul_(-30.0)


def _lose(learner: Learner) -> None:
    _poison(optim.parameters_of(learner.optimizer))


# --- numbers that are none ---


def _poison(tensors: Sequence[Tensor | None]) -> None:
    first = next(x for x in tensors if x is not None)
    first.detach().view(-1)[1] = torch.nan


def _in_weights(points: Points) -> None:
    count = itertools.count(1)

    def strike(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if next(count) == 3:
            _poison(optimizer.param_groups[0]["params"])

    register_optimizer_step_post_hook(strike)


def _in_gradient(function: Callable[..., Any], parameters: Sequence[Any], *arguments: Any, **named: Any) -> Any:
    _poison([p.grad for p in parameters])
    return function(parameters, *arguments, **named)


def _in_log_probs(function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    found = function(*arguments, **named)
    if torch.is_grad_enabled() and found.logp.requires_grad:
        found.logp.data.view(-1)[:] = torch.nan
    return found


def _in_samples(function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    found = function(*arguments, **named)
    found.gen_logp[-1] = math.nan
    return found


def _in_values(function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    return function(*arguments, **named).mul(torch.nan)


AHEAD = "grpo, sampled ahead"
NANS: dict[str, tuple[tuple[str, ...], Callable[[Points], None] | None]] = {
    "weights": (("sft", "dpo", "grpo", "ppo", "trpo", AHEAD), _in_weights),
    "gradient": (("sft", "dpo", "grpo", "ppo"), nth(optim, "clip_gradients", lambda n: n == 3, _in_gradient)),
    "log-prob": (("sft", "dpo", "grpo", "ppo"), nth(Policy, "forward", lambda n: n % 7 == 0, _in_log_probs)),
    "sampler": ((AHEAD, "grpo", "ppo", "online_dpo"), nth(SharedPrompt, "rollout", lambda n: n == 32, _in_samples)),
    "value": (
        ("ppo", "ppo, own critic, minibatches", "a2c", "klq"),
        nth(ScalarHead, "forward", lambda n: n % 5 == 3, _in_values),
    ),
    "reward": ((AHEAD, "grpo", "ppo", "rloo", "expert_iteration"), None),
}
ENDS = {"weights": "not finite", "sampler": "not finite"}  # in which the run ends, with these words


def nans(world: World, folder: Path, *, most: int = 6) -> Case:
    """NaN in weights, gradient, log-probs, values or rewards: no update and no checkpoint with it."""
    folder.mkdir(parents=True)
    case = Case("NaN in weights, gradient, log-prob (the learner's, the sampler's), value or reward")
    count, skipped, stopped = itertools.count(), 0, 0
    for where, (loops, prepare) in NANS.items():
        for loop in loops[:most]:
            out = folder / f"run-{next(count)}"
            settings = [f"reward={world / 'rewards.py'}:nan", "train.max_invalid=0.95"] if where == "reward" else []
            told = victim.run(world.recipe(loop, out, *settings), folder / "log", prepare=prepare)
            case.ended(told, 2 if where in ENDS else 0, ENDS.get(where, ""))
            bad = [name for path in files.checkpoints(out / "checkpoints").values() for name in _bad_in(path)]
            case.wrong += [f"{where} of {loop}: {name} was saved" for name in bad]
            rows = metrics(out)
            happened = sum(row.get("skipped", 0) > 0 for row in rows)
            case.expect(where != "gradient" or happened == 1, f"{where} of {loop}: {happened} updates were skipped")
            case.expect(where != "value" or happened > 0, f"{where} of {loop}: no update was skipped")
            case.expect(where != "reward" or any(r["invalid"] > 0 for r in rows), f"{loop}: no reward was invalid")
            skipped, stopped = skipped + happened, stopped + (told.code == 2)
            case.ends = case.ends or told.words  # the first are those of weights
    case.ends = f"{skipped} updates skipped and told, {stopped} runs stopped, 0 saved: {case.ends}"
    return case


def _bad_in(folder: Path) -> list[str]:
    """The tensors of a checkpoint that are not finite."""
    found = list[str]()
    for path in folder.rglob("*.safetensors"):
        tensors = {name: x for name, x in load_file(path).items() if x.is_floating_point()}
        found += [f"{folder.name}/{path.name}: {name}" for name, x in tensors.items() if not x.isfinite().all()]
    return found
