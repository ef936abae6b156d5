"""From a recipe to algorithm, model and learner: the place that turns settings into things; feeds.py does for data."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from hone.algo import ALGORITHMS, Algorithm, Teacher
from hone.algo.credit import may_be_per_token
from hone.algo.weight import mismatch
from hone.config.overrides import build_choice
from hone.config.recipe import LoraSpec, ModelSpec, Recipe, SampleSpec, TrainSpec
from hone.data.text.tokenizer import Tokenizer, check_fits, check_same_tokens
from hone.dist import collect
from hone.engine.params import SampleParams
from hone.errors import HoneError, count_noun
from hone.loop import check_algorithm
from hone.model.config import DecoderConfig
from hone.model.decoder import Decoder
from hone.model.formats.cache import folder_of, resolve
from hone.model.formats.folder import load_decoder
from hone.model.formats.peft import load_peft
from hone.model.lora import add_lora, plain_state
from hone.model.policy import OwnCritic, Policy, ReferenceView, SharedCritic, frozen_copy
from hone.model.scorer import ScalarHead, Scorer
from hone.model.teacher import TopKTeacher, trim_head
from hone.reward.learned.load import process_model
from hone.reward.learned.process_model import Dense
from hone.reward.steps import read_separator
from hone.train import optim
from hone.train.guard import Guard
from hone.train.learner import Learner, Trainable
from hone.train.optim import Masters
from hone.train.shards import Shards, shard_decoder
from hone.train.update import Correct
from hone.types import ForwardModel

# algorithms that train a head, and its kind
SCORERS = {"reward_model": "reward", "pointwise_reward_model": "reward", "process_reward_model": "step"}


def algorithm(recipe: Recipe) -> Algorithm:
    """The recipe's algorithm, checked against what the rest of the recipe asks for."""
    own = recipe.own_algo
    algo: Algorithm = build_choice(recipe.algo, ALGORITHMS) if own is None else own
    name, sample = recipe.algo_name, recipe.sample
    if "kl_baseline" in algo.needs and recipe.train.prompts < 2:
        raise HoneError(f"{name} compares each row with the next: set train.prompts to 2 or more")
    _check_settings(recipe, algo)
    if not algo.online:
        return algo
    if sample.group < algo.group:
        raise HoneError(f"{name} compares samples of one prompt: set sample.group to {algo.group} or more")
    if algo.teacher is not None and algo.teacher.top_k and (sample.top_k or sample.top_p < 1 or sample.min_p):
        raise HoneError(
            f"{name} with algo.top_k compares tokens that sample.top_k, top_p or min_p leave out: "
            "set algo.top_k=0, or sample.top_k=0 sample.top_p=1.0 sample.min_p=0.0"
        )
    train = recipe.train
    updates, corrected = train.epochs * train.minibatches, train.mismatch != "none"
    check_algorithm(algo, lag=train.lag, updates=updates, corrected=corrected)
    _check_minibatches(train)
    return algo


def _check_minibatches(train: TrainSpec) -> None:
    """Refuse more minibatches than prompts. A step may keep one row or pair a prompt, so some would be empty."""
    if train.minibatches > train.prompts:
        raise HoneError(
            f"train.minibatches is {train.minibatches}, but a step has {count_noun(train.prompts, 'prompt')}: "
            f"set train.minibatches={train.prompts} or less, or train.prompts={train.minibatches} or more"
        )


def check_teacher(recipe: Recipe, vocabulary: Tokenizer) -> None:
    """The teacher, where there is one, reads and writes the same tokens."""
    if recipe.teacher:
        folder = folder_of(recipe.teacher)
        check_same_tokens(vocabulary, Tokenizer.load(folder), folder)


def _check_settings(recipe: Recipe, algo: Algorithm) -> None:
    name = recipe.algo_name
    if recipe.teacher and algo.teacher is None:
        raise HoneError(f"{name} does not learn from a teacher: leave teacher out, or set algo=distil")
    if algo.teacher is not None and not recipe.teacher:
        raise HoneError(f"{name} learns from a teacher: set teacher=FOLDER, a model with the same tokenizer")
    if algo.teacher is not None and recipe.train.reference_refresh:
        raise HoneError("train.reference_refresh would put the policy in its teacher's place: set it to 0")
    if algo.trust_region is not None and recipe.train.shard != "none":
        raise HoneError(f"{name} works with the whole gradient as one vector: set train.shard=none")
    if algo.trust_region is not None and recipe.optim.offload:
        raise HoneError(f"{name} moves the weights itself and has no moments for them: set optim.offload=false")


def process(
    recipe: Recipe, algo: Algorithm, vocabulary: Tokenizer, *, device: torch.device | str = "cpu"
) -> Dense | None:
    """The process model's rewards, where the recipe names one, checked against what the algorithm reads."""
    spec, name, reads = recipe.process, recipe.algo_name, "step_reward" in algo.needs
    if not spec.path:
        if reads:
            raise HoneError(f"{name} with process=true reads step rewards: set process.path=FOLDER, a process model")
        return None
    if spec.use == "shaping" and not may_be_per_token(algo.credit):
        raise HoneError(
            f"{name} sums a row's rewards, which cancels potentials: set process.use=reward, or algo=ppo or reinforce"
        )
    settings = algo.credit.keywords if isinstance(algo.credit, partial) else {}
    if reads and "lam" in settings and spec.use != "reward":
        raise HoneError(
            f"{name} with lam takes the progress of scores itself: set process.use=reward, or leave lam out"
        )
    separator = read_separator(spec.separator)
    model = process_model(spec.path.split(","), vocabulary, separator=separator, how=spec.join, device=device)
    gamma = settings.get("gamma", 1.0)
    return Dense(model=model, use=spec.use, weight=spec.weight, gamma=gamma, outcome=reads)


def device_and_dtype(
    name: str = "auto", precision: str = "auto", *, setting: str = "train.device"
) -> tuple[torch.device, torch.dtype]:
    """The device and dtype of a model, as given or as the machine suggests. setting: the name that errors use."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise HoneError(f"{setting} is {name!r}: use auto, cpu, cuda or cuda:N") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise HoneError(f"{setting} is {name}, but torch sees no GPU here: set {setting}=cpu")
    half = precision == "bfloat16" or (precision == "auto" and device.type == "cuda")
    return device, torch.bfloat16 if half else torch.float32


def tokenizer(spec: ModelSpec) -> Tokenizer:
    """From its own folder or the model's; either may be a name in the model cache."""
    return Tokenizer.load(folder_of(spec.tokenizer or spec.path))


def load_model(model: str | Path, *, device: str = "auto", precision: str = "auto") -> tuple[Tokenizer, Decoder]:
    """The tokenizer and the model of a folder, a run or a fetched name; auto: as the machine suggests."""
    folder, (where, dtype) = folder_of(model), device_and_dtype(device, precision, setting="device")
    vocabulary, found = Tokenizer.load(folder), load_decoder(folder)
    check_fits(vocabulary, found.config.vocab_size)
    return vocabulary, found.to(where, dtype)


def decoder(spec: ModelSpec, vocabulary: Tokenizer, *, seed: int) -> Decoder:
    """The folder's model, or a fresh one of the given shape."""
    if spec.path:
        model = load_decoder(resolve(spec.path), trust_remote_code=spec.trust_remote_code)
    else:
        torch.manual_seed(seed)
        size = spec.vocab_size or vocabulary.vocab_size
        model = Decoder(
            DecoderConfig(
                vocab_size=size,
                hidden_size=spec.hidden_size,
                intermediate_size=spec.intermediate_size,
                num_hidden_layers=spec.layers,
                num_attention_heads=spec.heads,
                num_key_value_heads=spec.kv_heads,
                max_position_embeddings=spec.context,
            )
        )
    check_fits(vocabulary, model.config.vocab_size)
    return model


def add_adapter(model: Decoder, spec: LoraSpec, *, seed: int, saved: Path | None = None) -> Decoder:
    """The decoder with the adapter the recipe asks for, if any; saved: the run's own copy of one from a folder."""
    if spec.path:
        load_peft(model, saved or spec.path)
    elif spec.rank:
        add_lora(model, rank=spec.rank, alpha=spec.alpha, targets=spec.targets, rslora=spec.rslora, seed=seed)
    return model


RECOMPUTE = {"auto": None, "never": False, "always": True}


def trainable(recipe: Recipe, model: Decoder, algo: Algorithm) -> Policy | Scorer:
    """The decoder as the algorithm trains it: with a critic, as a scorer, or plain."""
    layout, again = recipe.train.layout, RECOMPUTE[recipe.train.recompute]
    if recipe.algo_name in SCORERS:
        torch.manual_seed(recipe.seed)  # the head is drawn
        # what is scored by itself has a level, which a bias learns; pairs have none
        head = ScalarHead(model.config.hidden_size) if algo.unit == 1 else None
        return Scorer(model, head=head, kind=SCORERS[recipe.algo_name], layout=layout, checkpoint_layers=again)
    critic = None
    if "value" in algo.wants:
        size = model.config.hidden_size
        critic = SharedCritic(size) if recipe.critic.kind == "shared" else OwnCritic(_twin(model))
    temperature = recipe.sample.temperature if algo.online else 1.0
    return Policy(model, critic=critic, temperature=temperature, layout=layout, checkpoint_layers=again)


def _twin(model: Decoder) -> Decoder:
    """A critic starts from the policy's weights: it has to understand the same text."""
    twin = Decoder(model.config)
    twin.load_state_dict(plain_state(model))
    return twin


def reference(recipe: Recipe, policy: Policy | Scorer, algo: Algorithm) -> ForwardModel | None:
    """The frozen policy, or the base under the adapter, where the algorithm compares with one."""
    if not isinstance(policy, Policy) or not (algo.needs & {"ref_logp", "ref_kl"} or "ref_kl" in algo.wants):
        return None
    if algo.teacher is not None:
        model = _teacher(recipe, policy, algo.teacher)
    else:
        model = ReferenceView(policy) if recipe.lora.used else frozen_copy(policy)
    policy.reference = model
    return model


def _teacher(recipe: Recipe, policy: Policy, spec: Teacher) -> Policy | TopKTeacher:
    """Another folder's model, frozen, where the policy is and at its temperature."""
    model = load_decoder(resolve(recipe.teacher), trust_remote_code=recipe.model.trust_remote_code)
    head = policy.decoder.lm_head.weight
    model = trim_head(model, len(head)).to(head.device, head.dtype)
    frozen = Policy(model, temperature=policy.temperature, layout=policy.layout).requires_grad_(False).eval()
    return TopKTeacher(frozen, spec.top_k) if spec.top_k else frozen


def is_sharded(recipe: Recipe) -> bool:
    """Whether ranks hold parts of the weights: where the recipe says so and there are several."""
    return recipe.train.shard != "none" and collect.world()[1] > 1


def shards(
    recipe: Recipe, policy: Policy | Scorer, ref: ForwardModel | None, *, device: torch.device, dtype: torch.dtype
) -> Shards:
    """The policy and its reference spread over ranks, from wherever they are."""
    half = dtype if dtype is torch.bfloat16 else None
    frozen = ref.policy if isinstance(ref, TopKTeacher) else ref
    if isinstance(frozen, Policy):
        shard_decoder(frozen.decoder, device=device, half=half)
    return Shards(policy, device=device, half=half, each=recipe.train.shard == "fsdp_lean")


def learner(recipe: Recipe, policy: Trainable, ref: ForwardModel | None, *, shards: Shards | None = None) -> Learner:
    """The policy with its optimiser and schedule."""
    o, t = recipe.optim, recipe.train
    actor, critic, masters = policy.actor_parameters(), policy.critic_parameters(), None
    if shards is not None:
        actor, critic = shards.parts_of(actor), shards.parts_of(critic)
    if o.offload and shards is not None:
        raise HoneError("optim.offload and train.shard both say where moments are: set one of them")
    if o.offload or any(p.dtype not in (torch.float32, torch.float64) for p in (*actor, *critic)):
        masters = Masters([*actor, *critic], device=torch.device("cpu") if o.offload else None)
        actor, critic = masters.of(actor), masters.of(critic)
    optimizer = optim.adamw(
        actor,
        critic,
        lr=o.lr,
        critic_lr=o.critic_lr,
        betas=o.betas,
        weight_decay=o.weight_decay,
        bits=o.bits,
        sizes=shards.sizes if shards is not None else {},
    )
    if masters is not None:
        optimizer.register_step_post_hook(masters.publish)
    schedule = optim.learning_rate_factor(o.schedule, warmup=o.warmup, steps=t.steps * t.epochs * t.minibatches)
    return Learner(
        policy=policy,
        optimizer=optimizer,
        schedule=schedule,
        reference=ref,
        masters=masters,
        shards=shards,
        micro_rows=t.micro_rows,
        micro_tokens=t.micro_tokens or t.tokens,
        clip_norm=o.clip_norm,
        guard=Guard(in_a_row=t.max_bad_updates, in_all=t.max_bad_total),
    )


def sample_params(
    spec: SampleSpec, vocabulary: Tokenizer, *, seed: int, context: int = 0, training: bool = False
) -> SampleParams:
    """The sampler's settings for a model of this context; training: what truncation keeps is recorded."""
    params = SampleParams(
        max_tokens=spec.limit(context),
        temperature=spec.temperature,
        top_k=spec.top_k,
        top_p=spec.top_p,
        min_p=spec.min_p,
        stop_ids=vocabulary.stop_ids,
        seed=seed,
    )
    return replace(params, record_support=training and params.truncated)


def correction(recipe: Recipe) -> Correct | None:
    """The factor that corrects for a sampler whose log-probs differ from the learner's."""
    if recipe.train.mismatch == "none":
        return None
    return partial(mismatch, how=recipe.train.mismatch, cap=recipe.train.mismatch_cap)
