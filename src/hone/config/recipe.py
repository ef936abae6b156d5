"""The settings of a run as frozen dataclasses, those of a reward among them, and a step in words. No torch here.

`hone settings` prints the comment above or beside a field as its meaning, so each is understood by itself.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from hone.config.load import load_algorithm
from hone.config.overrides import Choice, unknown
from hone.errors import HoneError, count_noun
from hone.log.limits import LimitSpec

VERIFIERS = ("math", "format", "choice", "exact", "code", "f1", "gym")  # rewards by name
# and those with a setting behind their name, as in "regex:[0-9]+"
WITH_SETTING = ("regex", "tags", "schema", "grammar", "length", "overlong", "language", "repetition", "numeric", "code")
# a reward model, or several as one: "model:A", "model:A,B", "model-min:A,B", "model-penalty-0.5:A,B"
MODEL = re.compile(r"model(?:-(mean|min|penalty)(?:-(\d+(?:\.\d+)?))?)?:([^,]+(?:,[^,]+)*)")
JUDGE = "judge"  # a language model, as in "judge:FILE.yaml"
REWARDS = (
    *VERIFIERS, *(f"{kind}:SETTING" for kind in WITH_SETTING), "model:FOLDER", "judge:FILE.yaml", "FILE.py:function",
)  # fmt: skip
Reward = str | Mapping[str, float] | Callable[..., Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class PartsSpec:
    """How each part of the reward counts, by its name, as in parts.high.length=1.0."""

    low: Mapping[str, float] = field(default_factory=dict[str, float])  # the least that a part's own value counts as
    high: Mapping[str, float] = field(default_factory=dict[str, float])  # the most that it counts as, before its weight
    # as in "0:1 200:0.1": factors of a part's weight at steps, linear between them; evaluations go by the weight alone
    schedule: Mapping[str, str] = field(default_factory=dict[str, str])
    # seconds a completion may take, in place of train.reward_timeout; the part then runs in a process of its own
    timeout: Mapping[str, float] = field(default_factory=dict[str, float])
    cache: Mapping[str, int] = field(default_factory=dict[str, int])  # outcomes to remember by content; 0: none
    held_out: str = ""  # a verifier that marks every completion and adds nothing: how often does the reward disagree?


def is_reward_name(name: str) -> bool:
    """Whether it names one of Hone's own verifiers or a reward model."""
    kind, _, setting = name.partition(":")
    return name in VERIFIERS or (kind in (*WITH_SETTING, JUDGE) and bool(setting)) or MODEL.fullmatch(name) is not None


def is_function(name: str) -> bool:
    """Whether it names a function of a file."""
    return ".py:" in name and not is_reward_name(name)


def is_part(name: str) -> bool:
    """What may stand in a weighted sum of rewards."""
    return is_reward_name(name) or is_function(name)


def check_reward(reward: Reward) -> None:
    """HoneError where a part has no name that is known."""
    names = list(reward) if isinstance(reward, Mapping) else []
    names += [reward] if isinstance(reward, str) and not is_function(reward) else []
    for name in names:
        if not is_part(name):
            raise unknown("reward", name, REWARDS)


def check_parts(parts: PartsSpec, reward: Reward) -> None:
    """HoneError where a setting is of a part that the reward does not have, or makes no sense."""
    names = list(reward) if isinstance(reward, Mapping) else [reward] if isinstance(reward, str) else []
    for setting in ("low", "high", "schedule", "timeout", "cache"):
        for name, value in getattr(parts, setting).items():
            if name not in names:
                raise unknown("part", name, names, owner=f"parts.{setting} is by part of the reward, which")
            if setting in ("timeout", "cache") and (value < 0 or (setting == "timeout" and not value)):
                raise HoneError(f"parts.{setting}.{name} is {value}: give a number above 0")
            if setting == "timeout" and (why := _own_time(name)):
                raise HoneError(f"parts.timeout.{name}: {why}")
    if parts.held_out and not is_part(parts.held_out):
        raise unknown("reward", parts.held_out, REWARDS, owner="parts.held_out")


def _own_time(name: str) -> str:
    """Why a part cannot be given its seconds, "" where it can."""
    if MODEL.fullmatch(name):
        return "a model runs in the run's own process: leave it out"
    return {
        JUDGE: "a judge's file has a timeout of its own: set it there",
        "math": "answers are compared in processes that have a time of their own: leave it out",
        "code": "a program that takes too long is wrong, not invalid: set seconds in a code:FILE.yaml",
    }.get(name.partition(":")[0], "")


# offline algorithms on rows
SINGLE = frozenset({"pretrain", "sft", "kto", "pointwise_reward_model", "process_reward_model"})
PAIRED = frozenset({"dpo", "ipo", "orpo", "simpo", "reward_model"})  # offline algorithms on pairs of rows
OFFLINE = SINGLE | PAIRED
LONGEST = 1024  # tokens of a completion, where nothing says how many


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """The policy: a model folder, or with an empty path a fresh decoder of this shape."""

    path: str = ""  # a model's folder, a run's, or a fetched name; empty: a fresh model of the shape below
    tokenizer: str = ""  # folder of the tokenizer; empty: the model's
    vocab_size: int = 0  # tokens that a fresh model knows; 0: as many as the tokenizer has
    hidden_size: int = 128  # numbers in which a fresh model's layers carry a token
    intermediate_size: int = 512  # numbers in which their feed-forward parts do
    layers: int = 4  # of a fresh model
    heads: int = 4  # of attention in each layer of a fresh model
    kv_heads: int = 4  # heads with keys and values of their own, which the others share
    context: int = 256  # the most tokens of a row, prompt and completion together
    trust_remote_code: bool = False  # let a model of transformers bring code of its own, which then runs here


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleSpec:
    """How completions are sampled."""

    group: int = 8  # samples a prompt
    max_tokens: int = 0  # the most tokens of a completion; 0: what the context leaves beside the prompt, at most 1024
    temperature: float = 1.0  # logits are divided by it, when sampling and, online, when training
    top_k: int = 0  # sample from the so many likeliest tokens; 0: off
    top_p: float = 1.0  # sample from the likeliest tokens that together have this probability; 1: off
    min_p: float = 0.0  # sample from tokens with at least this share of the likeliest one's probability; 0: off
    max_rows: int = 512  # rows in the sampler at once

    def limit(self, context: int) -> int:
        """The most tokens of a completion, for a model with this context. context 0: any context."""
        return self.max_tokens or max(1, min(LONGEST, context - 1 if context else LONGEST))


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSpec:
    """How many of what. Online, a step is one iteration: sample, score, then epochs x minibatches updates."""

    steps: int = 100  # how many the run has
    prompts: int = 32  # online: prompts a step; offline: rows, or pairs, a step
    epochs: int = 1  # how often an online step goes over what it has sampled
    minibatches: int = 1  # parts into which each epoch cuts what was sampled, an update each
    tokens: int = 0  # offline: the most tokens a step, padding included, in place of `prompts`; 0: off
    micro_rows: int = 64  # rows in memory at once; changes no number
    micro_tokens: int = 0  # tokens in memory at once, in place of micro_rows; 0: `tokens`, or off
    # padded: a row a line; packed: several; shared: no padding, and what a group's rows begin with only once
    layout: Literal["padded", "packed", "shared"] = "shared"
    # what a layer computed is computed again for its gradient, instead of kept; auto: where a GPU's memory asks for it;
    # never: all logits are kept as well, of which the others keep the last chunk
    recompute: Literal["auto", "never", "always"] = "auto"
    refill_rounds: int = 8  # how often an algorithm may ask for more prompts to fill a step
    # what corrects for a sampler whose log-probs (gen_logp) are not the learner's (old_logp); truncate: a token weighs
    # by the ratio of the two, cut at mismatch_cap; mask: one whose ratio is beyond the cap, either way, is left out
    mismatch: Literal["none", "truncate", "mask"] = "none"
    mismatch_cap: float = 2.0  # the largest ratio that train.mismatch lets stand
    # 1: online, the next step's prompts are sampled and scored while the learner updates, by the weights before that
    # update; takes a second copy of the weights, and train.mismatch to correct for it
    lag: Literal[0, 1] = 0
    max_invalid: float = 0.2  # stop when more than this share of the rewards is invalid
    # reward functions run in processes of their own, so that one that hangs or crashes only makes its outcome invalid;
    # auto: those of FILE.py:function, not those made in Python, which may share what they know with the program
    reward_apart: Literal["auto", "always", "never"] = "auto"
    reward_timeout: float = 60.0  # seconds a completion may take in a process of its own
    reward_memory: float = 0.0  # GiB such a process may take with all it starts; 0: its share of half the machine's
    # an update whose loss or gradient is NaN or infinite is skipped and its rows kept: stop after so many
    max_bad_updates: int = 10  # in a row
    max_bad_total: int = 100  # stop after so many skipped updates in all
    # go back to the last regular checkpoint, and on with the data that follows, when the loss lies so many of its usual
    # deviations above its median, or the weights are no longer finite; 0: off
    rollback: float = 0.0
    reference_refresh: int = 0  # copy the policy into the reference every so many steps; 0: never
    eval_every: int = 0  # measure on eval_data every so many steps; 0: only at the end
    eval_samples: int = 1  # completions of each problem of eval_data
    device: str = "auto"  # cpu, cuda or cuda:N; auto: a GPU where there is one
    # of the weights and what is computed with them; auto: float32 on a CPU, bfloat16 on a GPU
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    # fsdp: each rank that torchrun starts holds a part of every weight and moment; fsdp_lean: and of every gradient,
    # which then are summed over ranks after each micro-batch. With one rank there is nothing to share out
    shard: Literal["none", "fsdp", "fsdp_lean"] = "none"
    threads: int = 0  # of the CPU; 0: as torch chooses, but 1 beside a GPU
    deterministic: bool = True  # sums in one order, so that a run repeats to the bit; false: torch's on a GPU in any


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadSpec:
    """How data is read."""

    skip_bad: bool = False  # skip, count and list rows that cannot be used, instead of refusing the data
    # rows longer than the context: refused, dropped, or cut at their end (never a prompt of an online run)
    overlong: Literal["error", "drop", "truncate"] = "error"
    stream: Literal["auto", "always", "never"] = "auto"  # leave data on the disk; auto: what is over 256 MiB
    buffer: int = 10_000  # rows of a stream in memory, among which they are shuffled
    chunk: int = 0  # characters of a .txt document, in whole lines; 0: a document ends at a blank line
    chat: Literal["auto", "always", "never"] = "auto"  # instructions as messages; auto: where there is a chat template
    turns: Literal["joined", "split"] = "joined"  # split: a chat in several rows where its template rewrites history
    # Hone's names of columns to those of the files, as in read.columns.prompt=question
    columns: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimSpec:
    """AdamW and its learning rate."""

    lr: float = 1e-4  # the learning rate, after its warm-up
    critic_lr: float | None = None  # the critic's learning rate; none: the same as lr
    betas: tuple[float, float] = (0.9, 0.95)  # how much AdamW's moments keep of themselves in each update
    weight_decay: float = 0.0  # the part of each weight that an update takes off, times the learning rate
    warmup: int = 0  # updates over which the learning rate rises to lr
    schedule: Literal["constant", "cosine", "linear"] = "constant"  # of lr after its warm-up; the others end at a tenth
    clip_norm: float = 1.0  # a gradient longer than this is cut to it
    bits: Literal[8, 32] = 32  # of each of the optimiser's moments
    offload: bool = False  # keep moments and the copies they belong to in the host's memory, and step there


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSpec:
    """A low-rank adapter, fresh or from a folder in PEFT's format; neither rank nor path: train all the weights."""

    rank: int = 0  # of each matrix that is added; 0: no fresh adapter
    alpha: float = 16.0  # what is added is multiplied by alpha / rank
    targets: tuple[str, ...] = ("all-linear",)  # layers that get one: all, ends of names, or patterns
    rslora: bool = False  # multiply it by alpha / sqrt(rank), not alpha / rank
    path: str = ""  # start from this adapter; it brings the four settings above

    @property
    def used(self) -> bool:
        """Whether adapters are trained, not the weights."""
        return self.rank > 0 or bool(self.path)


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticSpec:
    """Where the value comes from."""

    # own: a model beside the policy; shared: a head on it; none: own for an algorithm that needs one
    kind: Literal["none", "own", "shared"] = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSpec:
    """A process reward model that scores each step of what is sampled, beside the reward; no path: none."""

    path: str = ""  # a model's folder; several, with commas between them, are joined
    # reward: each step's chance of being right is its reward; progress: by how much the step has raised it; shaping: it
    # is a potential, which changes no optimum and needs an algorithm with a return for each token
    use: Literal["reward", "progress", "shaping"] = "reward"
    weight: float = 1.0  # what the process rewards are multiplied by
    separator: str = ""  # what ends a step, where \n is a line break; empty: what the model was trained on, or \n
    join: Literal["mean", "min", "penalty"] = "mean"  # of several models; penalty: the mean less the standard deviation


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveSpec:
    """When to write checkpoints and which to keep; the last step is always saved."""

    # the most minutes between checkpoints, which begin early in a run and come more seldom where they take long, so
    # that they cost less than 1 % of the time; 0: none by the clock
    minutes: float = 5.0
    every: int = 0  # steps between checkpoints, beside those by the clock; 0: none by steps
    keep: int = 2  # keep the newest so many, and besides what the settings below name
    milestones: int = 0  # keep those whose step is a multiple of this; 0: none
    best: str = ""  # keep the one with the best value of this metric, as in eval/reward or eval/loss; empty: none
    best_is: Literal["highest", "lowest"] = "highest"  # which value of that metric is the best


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Everything a run is made of."""

    name: str = "run"  # of the run, and of its folder
    seed: int = 0  # of all that is drawn at random
    model: ModelSpec = field(default_factory=ModelSpec)  # the policy
    # what is trained on: a file (.jsonl .json .csv .tsv .parquet .arrow .txt, text also .gz), a pattern, "gsm8k:train"
    # or "hf:owner/name:split"; several as "a.jsonl*0.7+b.jsonl*0.3"; in Python also rows (dicts), Tasks, or a list of
    # (data, weight)
    data: str | Sequence[Any] = ""
    eval_data: str | Sequence[Any] = ""  # held-out data, given as `data` is, on which the run is measured; empty: none
    teacher: str = ""  # of distil: a model's folder or fetched name, with the same tokenizer as the model's
    # what completions are marked by: weights of parts, as in reward.math=1.0 reward.format=0.1, or {"math": 1.0,
    # "format": 0.1}; one name, "rewards.py:function", or in Python a function
    reward: str | Mapping[str, float] | Callable[..., Any] = field(default_factory=dict[str, float])
    # the algorithm by name, with settings, as in algo=dapo algo.high=0.3: `hone algos` lists them; or one of your own,
    # "algorithms.py:function"; in Python also a value, as in hone.algo.grpo(beta=0.0)
    algo: Choice | Any = field(default_factory=lambda: Choice("grpo"))
    sample: SampleSpec = field(default_factory=SampleSpec)  # how completions are sampled
    train: TrainSpec = field(default_factory=TrainSpec)  # how many steps, of what size, on what
    read: ReadSpec = field(default_factory=ReadSpec)  # how data is read
    optim: OptimSpec = field(default_factory=OptimSpec)  # the optimiser
    lora: LoraSpec = field(default_factory=LoraSpec)  # the adapter, if one is trained
    critic: CriticSpec = field(default_factory=CriticSpec)  # where values come from
    process: ProcessSpec = field(default_factory=ProcessSpec)  # a process reward model
    parts: PartsSpec = field(default_factory=PartsSpec)  # how each part of the reward counts
    save: SaveSpec = field(default_factory=SaveSpec)  # checkpoints
    limits: LimitSpec = field(default_factory=LimitSpec)  # when to warn and when to stop
    out: str = "runs/{name}"  # the run's folder
    tensorboard: bool = False  # metrics for TensorBoard too, in the run's folder

    def __post_init__(self) -> None:
        for name in ("data", "eval_data"):  # an iterator can be read once, a recipe's data more often
            if isinstance(given := getattr(self, name), Iterable) and not isinstance(given, str | Sequence | Mapping):
                object.__setattr__(self, name, list(given))
        if isinstance(self.reward, str) and is_reward_name(self.reward):
            object.__setattr__(self, "reward", {self.reward: 1.0})

    @property
    def run_dir(self) -> Path:
        """Where the run is written."""
        return Path(self.out.replace("{name}", self.name))

    @property
    def online(self) -> bool:
        """Whether the algorithm samples its own data."""
        return self.algo_name not in OFFLINE if self.own_algo is None else bool(self.own_algo.online)

    @property
    def paired(self) -> bool:
        """Whether the algorithm learns from pairs of rows."""
        return self.algo_name in PAIRED if self.own_algo is None else getattr(self.own_algo, "unit", 1) == 2

    @property
    def own_algo(self) -> Any:
        """The algorithm as a value, where it is of FILE.py:function or was made in Python; None: one of Hone's."""
        if not isinstance(self.algo, Choice):
            return self.algo
        return load_algorithm(self.algo) if is_function(self.algo.name) else None

    @property
    def algo_name(self) -> str:
        """What the algorithm is called; a value made in Python may have no name."""
        return getattr(self.algo, "name", "") or "this algorithm"


def plan(recipe: Recipe) -> str:
    """What one step does, in one unit: rows."""
    train, each = recipe.train, recipe.sample.group
    if train.tokens:
        most = train.micro_tokens or train.tokens
        return f"at most {train.tokens} tokens = 1 update; micro-batches of at most {most} tokens"
    rows = count_noun(train.prompts * each, "row")
    made = f"{count_noun(train.prompts, 'prompt')} x {count_noun(each, 'sample')} = {rows}"
    if not recipe.online:
        each = 2 if recipe.paired else 1
        made = f"{count_noun(train.prompts, 'pair')} = " if each == 2 else ""
        made += count_noun(train.prompts * each, "row")
    cut = f"{count_noun(train.epochs, 'epoch')} x {count_noun(train.minibatches, 'minibatch')}"
    updates = count_noun(train.epochs * train.minibatches, "update")
    return f"{made}; {cut} = {updates}; {_micro_batches(train, train.prompts * each)}"


def _micro_batches(train: TrainSpec, rows: int) -> str:
    """Minibatches are nearly equal parts of the rows, micro-batches slices of those."""
    if train.micro_tokens:
        return f"micro-batches of at most {train.micro_tokens} tokens"
    small, larger = divmod(rows, train.minibatches)
    sizes = [small + (i < larger) for i in range(train.minibatches)]
    number = train.epochs * sum(-(-size // train.micro_rows) for size in sizes)
    most = min(max(sizes), train.micro_rows)
    even = all(size % most == 0 for size in sizes)
    shown = f"{count_noun(most, 'row')} each" if even else f"at most {count_noun(most, 'row')}"
    return f"{count_noun(number, 'micro-batch')} of {shown}"
