"""Rewards, judges and sandboxes that are refused, and what each message asks for."""

from pathlib import Path
from typing import Any, cast

from places import decoder
from remedy_world import Case, World, call, given, lacks, typed

from hone.commands.sandbox import _limits
from hone.inference.defaults import Sampling
from hone.inference.label import Ledger, StepLabels, label_steps
from hone.launch.measure import summarise
from hone.model.scorer import Scorer
from hone.reward.group_scorer import GroupScorer
from hone.reward.learned.judge import Judge, JudgeSettings, check_settings
from hone.reward.learned.process_model import Dense, aggregate
from hone.reward.learned.reward_model import Ensemble, RewardModel
from hone.reward.sandbox.limits import MIB, BackendOptions, interpreter, library_of
from hone.reward.sandbox.sandbox import Call, Program, Sandbox, SandboxLimits, open_backend
from hone.reward.score import Reward, as_scorer, cached, combine
from hone.reward.verify import make_verifier
from hone.reward.verify.code.settings import CodeSettings, reward_arguments
from hone.reward.verify.code.verdict import code_reward
from hone.reward.workers.reward_worker import in_workers
from hone.search.beam import Beam
from hone.search.label import Labeller
from hone.types import Outcome, Rollout, Task

START = 'start: "a"'
TASK = Task(prompt="a", answer="1", extra={"inputs": ["1"], "outputs": ["1"]})


def judged(wrong: dict[str, Any], right: dict[str, Any], says: str) -> Case:
    """Settings of a judge."""
    return given(lambda w, s: check_settings(JudgeSettings(**{"model": "m", **s}), "my.yaml"), wrong, right, says)


def _prompted(world: World, prompt: str) -> None:
    path = Path(world.file(prompt, ".txt"))
    Judge(JudgeSettings(model="m", prompt=path.name), cast(Any, None), folder=path.parent)


def programs(wrong: dict[str, Any], right: dict[str, Any], says: str) -> Case:
    """Settings of how programs are judged."""
    return given(lambda w, settings: reward_arguments(CodeSettings(**settings), "code.yaml"), wrong, right, says)


def verifier(wrong: str, right: str, says: str) -> Case:
    return given(lambda w, name: make_verifier(name), wrong, right, says)


def written(kind: str, wrong: str, right: str, says: str, suffix: str = ".txt") -> Case:
    """A file that a verifier reads."""
    return given(lambda w, text: make_verifier(f"{kind}:{w.file(text, suffix)}"), wrong, right, says)


def _rollouts(*rewards: float | None) -> list[Rollout]:
    task = Task(prompt="a")
    return [
        Rollout(tokens=[5, 6], mask=[False, True], outcome=Outcome(value=r, reason="x"), task=task) for r in rewards
    ]


def _calibrated(world: World, *tokens: int) -> None:
    model = RewardModel(score=Scorer(decoder(258)), pad_id=0)
    model.mean_and_std([Rollout(tokens=[5, n], mask=[False, True]) for n in tokens])


def _one(completion: str) -> float:
    return 1.0


def _many(completions: list[str]) -> list[float]:
    return [1.0 for _ in completions]


def _both(completion: str, completions: list[str]) -> float:
    return 1.0


def _few(completions: list[str]) -> list[float]:
    return []


def _marked(world: World, share: float) -> None:
    GroupScorer(reward=cast(Any, None), max_invalid=share).check([_rollouts(None, 1.0)])


REWARDS = [
    given(lambda w, weight: combine({"a": (_one, weight)}), float("nan"), 1.0, "give a finite number"),
    given(lambda w, parts: combine(parts), {}, {"a": (_one, 1.0)}, "name at least one with its weight"),
    given(lambda w, f: as_scorer(f), _both, _one, "name them from"),
    given(lambda w, f: as_scorer(f)(_rollouts(1.0)), _few, _many, "return one value for each completion"),
    call(lambda w: cached(Reward(_many), size=9), lambda w: cached(Reward(_many), size=0), "leave out parts.cache"),
    given(lambda w, seconds: in_workers([_one], seconds=seconds, workers=1), 0.0, 1.0, "give a number above 0"),
    given(lambda w, k: Ensemble(members=[lambda r: [1.0]], k=k), -1.0, 1.0, "k of 0 or more"),
    given(lambda w, ids: _calibrated(w, *ids), (6, 6), (6, 7), "use at least two that differ"),
    given(lambda w, by: aggregate(by), "best", "min", "use one of min"),
    given(lambda w, use: Dense(model=cast(Any, None), use=use), "x", "reward", "use one of reward"),
    given(_marked, 0.1, 0.6, "or raise train.max_invalid"),
    given(lambda w, rewards: summarise([_rollouts(*rewards)]), (None,), (1.0,), "mend the reward function"),
    judged({"votes": 0}, {"votes": 1}, "set it to 1 or more"),
    judged({"low": 3.0, "high": 2.0}, {"low": 1.0, "high": 2.0}, "a mark above low"),
    given(_prompted, "mark it", "mark {completion}", "show the judge what to mark"),
    given(
        lambda w, name: Judge(JudgeSettings(model="m", rubric=name), cast(Any, None), folder=w.folder),
        "none.txt",
        "rewards.py",
        "check the path",
    ),
]
VERIFIERS = [
    verifier("nothing", "math", "there are math"),
    verifier("overlong:0", "overlong:64", "write overlong:64"),
    verifier("length:x", "length:20-200", "is not understood: write length:20-200"),
    call(
        lambda w: make_verifier(f"schema:{w / 'none.json'}"),
        lambda w: make_verifier(f"schema:{w.file('{}', '.json')}"),
        "give the path of a text",
    ),
    written("schema", '{"type": 3}', '{"type": "object"}', "is not a JSON Schema"),
    written("grammar", "start: :", 'start: "a"', "is not a grammar of Lark"),
    lacks("jsonschema", lambda w: make_verifier(f"schema:{w.file('{}', '.json')}"), "needs jsonschema"),
    lacks("lark", lambda w: make_verifier(f"grammar:{w.file(START, '.lark')}"), "needs lark"),
    given(lambda w, mode: code_reward("1", TASK, mode=mode), "most", "all", "use all or fraction"),
    programs({"seconds": 2.0**31}, {"seconds": 5.0}, "no machine has as much, lower it"),
    programs({"folders": ("jdk",)}, {"folders": ("/usr/lib",)}, "give the whole path of one"),
    programs({"folders": ("/etc",)}, {"folders": ("/usr/lib",)}, "name the folders in it"),
    programs({"file": "main.c"}, {"file": "main.c", "run": "./main"}, "as in file: main.c, run: ./main"),
    programs({"file": "a/main.c", "run": "./main"}, {"file": "main.c", "run": "./main"}, "give a name without folders"),
    programs({"file": "main.c", "run": "'"}, {"file": "main.c", "run": "./main"}, "write it as in a shell"),
    programs({"file": "main.c", "run": " "}, {"file": "main.c", "run": "./main"}, "write what builds or runs"),
    programs({"file": "main.c", "run": "nowhere x"}, {"file": "main.c", "run": "cat x"}, "install it in /usr"),
]


def _wanted(**more: Any) -> BackendOptions:
    return BackendOptions(limits=SandboxLimits(**more), slots=1, python=interpreter(), packages=())


def _ran(world: World, program: Program, seconds: float | None = None) -> None:
    with Sandbox(slots=1) as sandbox:
        sandbox.run(program, seconds=seconds)


def limited(name: str, wrong: float, right: float, says: str) -> Case:
    return given(lambda w, n: SandboxLimits(**{name: n}), wrong, right, says)


SANDBOXES = [
    limited("seconds", 0, 1, "give a number above 0"),
    limited("memory", 1, 64 * MIB, "an interpreter needs"),
    given(
        lambda w, disk: SandboxLimits(input=64 * MIB, memory=512 * MIB, disk=disk),
        32 * MIB,
        64 * MIB,
        "set disk to 64 MiB or more",
    ),
    given(lambda w, python: library_of(python), "/bin/none/python", interpreter(), "with python="),
    given(lambda w, text: _limits([text]), "x=3", "processes=3", "give NAME=N with one of"),
    given(lambda w, name: open_backend(name, _wanted()).close(), "x", "native", "use native or"),
    given(
        lambda w, calls: _ran(w, Program(source="def f(): pass", calls=calls, stdin="a")),
        [Call("f")],
        [],
        "give calls, or stdin, or a language",
    ),
    given(lambda w, seconds: _ran(w, Program(source=""), seconds), -1, 5, "give a number above 0"),
]


def _begun(world: World, votes: int, *, lose: bool = False, other: bool = False) -> None:
    path = Path(world.new(".jsonl"))
    Ledger(path, {"votes": 1}, whole="last").append([{"last": True}])
    if lose:
        path.with_name(path.name + ".settings.json").unlink()
    Ledger(Path(world.new(".jsonl")) if other else path, {"votes": votes}, whole="last")


def _closed(world: World, *, again: bool) -> None:
    sandbox = Sandbox(slots=1)
    sandbox.close()
    _ran(world, Program(source="")) if again else sandbox.run(Program(source=""))


def _with_task(completion: str, task: Task) -> float:
    return 1.0


def _sent(world: World, own: bool, value: Any = lambda: 3) -> None:
    """A task that holds a function, which cannot be sent to another process."""
    found = in_workers([_with_task], seconds=5.0, workers=1)[0] if own else as_scorer(_with_task)
    found([Rollout(tokens=[5], mask=[True], text="b", task=Task(prompt="a", extra={"x": value}))])


def _labelled(world: World, data: list[dict[str, Any]], reward: str = "length") -> None:
    label_steps(
        world / "model",
        data,
        world.new(".jsonl"),
        reward=world / f"rewards.py:{reward}",
        labels=StepLabels(k=1),
        how=Sampling(samples=1, max_tokens=2),
    )


def _calibrate(world: World, manifest: str) -> None:
    folder = world.folder_of("scorer")
    if manifest:
        (folder / "manifest.json").write_text(manifest)
    typed(world, "rewards", "calibrate", str(folder), world / "pairs.jsonl")


SOLVED = {"prompt": "1+1=", "answer": "2", "completion": "1\n1\n2"}
GUIDED = [
    call(lambda w: _closed(w, again=False), lambda w: _closed(w, again=True), "open a new one"),
    given(_sent, True, False, "set train.reward_apart=never"),
    given(lambda w, value: _sent(w, False, value), (n for n in ()), [3], "keep text, numbers and lists in it"),
    given(_labelled, [SOLVED, {"prompt": "1+1=", "answer": "2"}], [SOLVED], "give each one, or none"),
    given(lambda w, name: _labelled(w, [SOLVED], name), "raises", "length", "mend the reward"),
    given(_calibrate, "[]", "{}", "use an earlier checkpoint"),
    given(_begun, 2, 1, "use the same settings"),
    call(lambda w: _begun(w, 1, lose=True), lambda w: _begun(w, 1, lose=True, other=True), "choose another --out"),
    given(
        lambda w, n: Beam(sampler=cast(Any, None), process=cast(Any, None), params=cast(Any, None), beams=n),
        0,
        1,
        "both must",
    ),
    given(lambda w, k: _labeller(k), 0, 1, "set k to 1 or more"),
]


def _labeller(k: int) -> Labeller:
    nothing: Any = None
    return Labeller(sampler=nothing, tokenizer=nothing, stepper=nothing, reward=nothing, params=nothing, context=9, k=k)


REWARDED: list[Case] = [*REWARDS, *VERIFIERS, *SANDBOXES, *GUIDED]
