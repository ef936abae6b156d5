"""The online algorithms by published name. A factory's keyword arguments are the method's settings.

Shared settings: `beta` is the coefficient of the KL to the reference and `kl` says where it goes and how it is
estimated: "reward:k1", or in the loss "loss:k2", "loss:k3" or "loss:exact" ("loss:k3*ratio" corrects for off-policy
samples, see terms.kl_penalty); `kl_target` makes beta adaptive. beta = 0 needs no reference model.
"""

from dataclasses import dataclass, replace
from functools import partial

from hone.algo import control as steering
from hone.algo import credit, prefer, select, terms, weight
from hone.algo.control import Control
from hone.algo.settings import POSITIVE, with_ranges
from hone.algo.table import Algorithm, Loss, Teacher, TrustRegion
from hone.errors import HoneError

Watch = tuple[tuple[str, terms.Term], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kl:
    """The parts that a KL setting adds to an algorithm."""

    reward: str = ""  # the estimator subtracted from the reward
    loss: Loss = ()
    needs: frozenset[str] = frozenset()
    wants: frozenset[str] = frozenset()
    control: tuple[Control, ...] = ()


def _set(*names: str) -> frozenset[str]:
    return frozenset(names)


def _parse_kl(kl: str) -> tuple[str, str, bool]:
    """("loss" or "reward", estimator, whether weighed by the ratio), or an error that names the choices."""
    place, _, rest = str(kl).partition(":")
    estimator, _, ratio = rest.partition("*")
    if place not in ("reward", "loss") or estimator not in ("k1", "k2", "k3", "exact"):
        raise HoneError(f"kl={kl!r} is not a KL setting: write reward: or loss:, then k1, k2, k3 or exact")
    if ratio not in ("", "ratio") or (ratio and (place == "reward" or estimator == "exact")):
        raise HoneError(f"kl={kl!r}: *ratio goes with loss:k1, loss:k2 and loss:k3 only")
    if place == "reward" and estimator != "k1":
        # the gradient of a reward is A grad log pi: k2 and k3 would also punish tokens that are rarer than in the
        # reference, and the exact KL is the same for every action
        raise HoneError(
            f"kl={kl!r}: in the reward only k1 has the gradient of the KL: use reward:k1 or loss:{estimator}"
        )
    if place == "loss" and estimator == "k1" and not ratio:
        raise HoneError("kl='loss:k1' has zero expected gradient: use reward:k1, loss:k2 or loss:k1*ratio")
    return place, estimator, bool(ratio)


def _kl(beta: float, kl: str, kl_target: float | None) -> _Kl:
    place, estimator, through_ratio = _parse_kl(kl)
    if beta == 0:
        if kl_target is not None:
            raise HoneError(
                "kl_target steers beta, which is 0 and would stay 0: set beta above 0 or leave kl_target out"
            )
        return _Kl()
    steer = steering.constant("kl_coef", beta)
    if kl_target is not None:
        steer = steering.adaptive_kl(beta, target=kl_target, reads="ref_kl")
    exact = _set("ref_kl") if estimator == "exact" else _set()
    if place == "reward":
        return _Kl(reward=estimator, needs=_set("old_logp", "ref_logp", "kl_coef"), control=(steer,))
    term = partial(terms.kl_penalty, estimator=estimator, through_ratio=through_ratio)
    needs = _set("ref_logp", "kl_coef", *(("old_logp",) if through_ratio else ()))
    return _Kl(loss=((1.0, term),), needs=needs, wants=exact, control=(steer,))


def _online(
    k: _Kl,
    loss: Loss,
    *,
    needs: frozenset[str] = _set(),
    wants: frozenset[str] = _set("logp"),
    steer: tuple[Control, ...] = (),
    **rest: object,
) -> Algorithm:
    """An online algorithm with the parts of its KL setting."""
    return Algorithm(
        loss=(*loss, *k.loss),
        needs=needs | k.needs,
        wants=wants | k.wants,
        control=(*steer, *k.control),
        online=True,
        **rest,  # pyright: ignore[reportArgumentType]
    )


def _ratio(name: str) -> terms.Term:
    if name not in terms.RATIOS:
        raise HoneError(f"ratio={name!r} does not exist: use one of {', '.join(terms.RATIOS)}")
    return terms.RATIOS[name]


def _clip(low: float, high: float, *, ratio: str = "token", dual: float | None = None) -> tuple[Loss, Watch]:
    """The clipped surrogate, and as a metric the share of tokens that it clips."""
    r = _ratio(ratio)
    loss = partial(terms.clipped, low=low, high=high, dual=dual, ratio=r)
    return ((1.0, loss),), (("clip_fraction", partial(terms.is_clipped, low=low, high=high, dual=dual, ratio=r)),)


def _critic(value: float, entropy: float, *, clip: float | None = None) -> tuple[Loss, frozenset[str]]:
    """The terms of the critic and of the entropy bonus, and the fields of the forward pass that they read."""
    loss: Loss = ((value, partial(terms.value_error, clip=clip)),)
    if not entropy:
        return loss, _set("logp", "value")
    return (*loss, (entropy, terms.neg_entropy)), _set("logp", "value", "entropy")


def _values(bootstrap: bool) -> frozenset[str]:
    return _set("old_value", "bootstrap") if bootstrap else _set("old_value")


# --- REINFORCE and kin: strictly on policy, a row's log-prob is summed ---


@with_ranges()
def reinforce(
    *, gamma: float = 1.0, beta: float = 0.0, kl: str = "reward:k1", kl_target: float | None = None
) -> Algorithm:
    """-G_t log pi, with the return from t on (Williams 1992)"""
    k = _kl(beta, kl, kl_target)
    adv = partial(credit.reward_to_go, gamma=gamma, kl=k.reward)
    return _online(k, ((1.0, terms.policy_gradient),), credit=adv, weigh=weight.row_sum, on_policy=True)


@with_ranges()
def reinforce_baseline(
    *,
    decay: float = 0.9,
    gamma: float = 1.0,
    beta: float = 0.0,
    kl: str = "reward:k1",
    kl_target: float | None = None,
) -> Algorithm:
    """REINFORCE less a running mean of earlier iterations' rewards"""
    plain = reinforce(gamma=gamma, beta=beta, kl=kl, kl_target=kl_target)
    steer = (*plain.control, steering.running_baseline(decay))
    return replace(plain, needs=plain.needs | {"baseline"}, control=steer)


@with_ranges()
def rloo(*, beta: float = 0.0, kl: str = "reward:k1", kl_target: float | None = None) -> Algorithm:
    """REINFORCE less the mean of the group's other rewards (Ahmadian et al. 2024)"""
    k = _kl(beta, kl, kl_target)
    adv = partial(credit.leave_one_out, kl=k.reward)
    return _online(k, ((1.0, terms.policy_gradient),), credit=adv, weigh=weight.row_sum, on_policy=True, group=2)


@with_ranges()
def reinforce_pp(*, clip: float = 0.2, gamma: float = 1.0, beta: float = 0.01, kl: str = "reward:k1") -> Algorithm:
    """REINFORCE++: per-token returns with the KL inside, whitened over the iteration, clipped (Hu 2025)"""
    k = _kl(beta, kl, None)
    loss, watch = _clip(clip, clip)
    adv = partial(credit.reward_to_go, gamma=gamma, kl=k.reward)
    return _online(k, loss, watch=watch, credit=adv, whiten=True, needs=_set("old_logp"))


@with_ranges()
def reinforce_pp_baseline(*, clip: float = 0.2, beta: float = 0.01, kl: str = "loss:k2") -> Algorithm:
    """REINFORCE++-baseline: reward less the group's mean, whitened over the iteration, KL by k2 in the loss"""
    k = _kl(beta, kl, None)
    loss, watch = _clip(clip, clip)
    adv = partial(credit.group_centred, kl=k.reward)
    return _online(k, loss, watch=watch, credit=adv, whiten=True, needs=_set("old_logp"), group=2)


# --- actor and critic ---


@with_ranges()
def a2c(
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    value: float = 0.5,
    entropy: float = 0.01,
    bootstrap: bool = False,
    beta: float = 0.0,
    kl: str = "reward:k1",
    kl_target: float | None = None,
) -> Algorithm:
    """Advantage actor-critic: -A log pi with a learned V (Mnih et al. 2016)"""
    k = _kl(beta, kl, kl_target)
    critic, wants = _critic(value, entropy)
    adv = partial(credit.gae, gamma=gamma, lam=lam, kl=k.reward)
    loss = ((1.0, terms.policy_gradient), *critic)
    return _online(k, loss, credit=adv, needs=_values(bootstrap), wants=wants, on_policy=True)


@with_ranges()
def trpo(
    *,
    delta: float = 0.01,
    damping: float = 0.1,
    cg_steps: int = 10,
    backtracks: int = 10,
    gamma: float = 1.0,
    lam: float = 0.95,
    value: float = 0.5,
    beta: float = 0.0,
) -> Algorithm:
    """Maximise A pi/pi_old within mean KL(old || new) <= delta: a natural-gradient step (Schulman et al. 2015)"""
    k = _kl(beta, "reward:k1", None)  # in the loss the trust region would not bound it
    loss = ((1.0, terms.ratio_gradient), (value, terms.value_error))
    adv = partial(credit.gae, gamma=gamma, lam=lam, kl=k.reward)
    region = TrustRegion(delta=delta, damping=damping, cg_steps=cg_steps, backtracks=backtracks)
    needs, wants = _set("old_logp", "old_value"), _set("logp", "value")
    return _online(k, loss, credit=adv, whiten=True, needs=needs, wants=wants, trust_region=region)


@with_ranges()
def ppo(
    *,
    clip: float = 0.2,
    value_clip: float | None = 0.2,
    gamma: float = 1.0,
    lam: float = 0.95,
    value: float = 0.5,
    entropy: float = 0.0,
    beta: float = 0.0,
    kl: str = "reward:k1",
    kl_target: float | None = None,
    bootstrap: bool = False,
    dual: float | None = None,
) -> Algorithm:
    """-min(r A, clip(r) A) with GAE and a clipped value loss (Schulman et al. 2017)"""
    k = _kl(beta, kl, kl_target)
    policy, watch = _clip(clip, clip, dual=dual)
    critic, wants = _critic(value, entropy, clip=value_clip)
    adv = partial(credit.gae, gamma=gamma, lam=lam, kl=k.reward)
    needs = _values(bootstrap) | {"old_logp"}
    return _online(k, (*policy, *critic), watch=watch, credit=adv, whiten=True, needs=needs, wants=wants)


@with_ranges(beta=POSITIVE)
def ppo_penalty(
    *,
    beta: float = 0.1,
    kl_target: float = 0.01,
    exact: bool = False,
    gamma: float = 1.0,
    lam: float = 0.95,
    value: float = 0.5,
    entropy: float = 0.0,
) -> Algorithm:
    """-r A + beta KL(old || pi), beta doubled or halved to hold the KL near its target (Schulman et al. 2017)"""
    critic, wants = _critic(value, entropy)
    loss = ((1.0, terms.ratio_gradient), (1.0, partial(terms.old_penalty, exact=exact)), *critic)
    return _online(
        _Kl(),
        loss,
        credit=partial(credit.gae, gamma=gamma, lam=lam),
        whiten=True,
        needs=_set("old_logp", "old_value", "kl_coef"),
        wants=wants | (_set("old_kl") if exact else _set()),
        steer=(steering.penalty_kl(beta, target=kl_target),),
    )


@with_ranges(beta=POSITIVE)
def klq(*, beta: float = 0.05, gamma: float = 1.0, lam: float = 0.95, kl_target: float | None = None) -> Algorithm:
    """Token-level KL-regularised Q-learning: regress Q = beta log(pi/ref) + V on lambda-returns (2508.17000)"""
    k = _kl(beta, "reward:k1", kl_target)
    adv = partial(credit.gae, gamma=gamma, lam=lam, kl=k.reward)
    return _online(k, ((1.0, terms.q_error),), credit=adv, needs=_set("old_value"), wants=_set("logp", "value"))


# --- group-relative ---


@with_ranges()
def grpo(
    *,
    clip: float = 0.2,
    beta: float = 0.04,
    kl: str = "loss:k3",
    kl_target: float | None = None,
    ratio: str = "token",
    average: str = "row",
    process: bool = False,
    lam: float | None = None,
) -> Algorithm:
    """Clipped, with the group's z-score as advantage; average "row" as published, "token" or "limit" (2402.03300)"""
    k, steps = _kl(beta, kl, kl_target), process or lam is not None
    if steps and k.reward:
        raise HoneError("process rewards are credited step by step: put the KL in the loss, as in kl=loss:k3")
    loss, watch = _clip(clip, clip, ratio=ratio)
    adv = credit.group_process if steps else partial(credit.group_zscore, kl=k.reward)
    adv = adv if lam is None else partial(credit.group_progress, lam=lam)
    needs = _set("old_logp", *(("step_reward",) if steps else ()))
    return _online(k, loss, watch=watch, credit=adv, weigh=weight.average(average), needs=needs, group=2)


@with_ranges()
def dr_grpo(*, clip: float = 0.2, max_tokens: int = 0, beta: float = 0.0, kl: str = "loss:k3") -> Algorithm:
    """GRPO without its two biases: no division by std, a constant length (0: the sampling limit) (Liu et al. 2025)"""
    k = _kl(beta, kl, None)
    loss, watch = _clip(clip, clip)
    return _online(
        k,
        loss,
        watch=watch,
        credit=partial(credit.group_centred, kl=k.reward),
        weigh=partial(weight.fixed_length, max_tokens=max_tokens),
        needs=_set("old_logp"),
        group=2,
    )


@with_ranges()
def dapo(
    *, low: float = 0.2, high: float = 0.28, overlong: str = "shape", limit: int = 0, margin: int = 0
) -> Algorithm:
    """Clip higher, refill with groups that vary, token mean, overlong shaping, filter or off (Yu et al. 2025)"""
    stages: dict[str, tuple[select.Select, ...]] = {
        # "shape" reads the raw rewards: a penalty for length alone is no signal. "filter" reads the rows that are left.
        "shape": (select.varied, partial(select.shape_overlong, limit=limit, margin=margin)),
        "filter": (select.drop_truncated, select.varied),
        "off": (select.varied,),
    }
    if overlong not in stages:
        raise HoneError(f"overlong={overlong!r} does not exist: use one of {', '.join(stages)}")
    if 0 < limit < margin:
        raise HoneError(f"margin={margin} is more than limit={limit}: it is the last part of the limit, lower it")
    loss, watch = _clip(low, high)
    return _online(
        _Kl(),
        loss,
        watch=watch,
        credit=credit.group_zscore,
        needs=_set("old_logp"),
        select=partial(select.chain, stages=stages[overlong]),
        refill=True,
        group=2,
    )


@with_ranges()
def gspo(*, low: float = 3e-4, high: float = 4e-4) -> Algorithm:
    """GRPO with one ratio a row, the geometric mean of its tokens' (Zheng et al. 2025)"""
    loss, watch = _clip(low, high, ratio="row")
    needs = _set("old_logp")
    return _online(_Kl(), loss, watch=watch, credit=credit.group_zscore, weigh=weight.row_mean, needs=needs, group=2)


@with_ranges()
def cispo(*, max_ratio: float = 5.0) -> Algorithm:
    """-sg(min(r, max)) A log pi: the weight is capped, no token's gradient is dropped (MiniMax 2025)"""
    return _online(
        _Kl(),
        ((1.0, partial(terms.truncated, max_ratio=max_ratio)),),
        watch=(("clip_fraction", partial(terms.is_truncated, max_ratio=max_ratio)),),
        credit=credit.group_zscore,
        needs=_set("old_logp"),
        group=2,
    )


# --- from samples to supervised or preference losses ---


@with_ranges(beta=POSITIVE)
def online_dpo(*, beta: float = 0.1, smoothing: float = 0.0) -> Algorithm:
    """DPO on the best and the worst of each freshly sampled group (Guo et al. 2024)"""
    return Algorithm(
        loss=((1.0, partial(prefer.dpo, beta=beta, smoothing=smoothing)),),
        needs=_set("ref_logp"),
        watch=(("accuracy", prefer.gain_accuracy), ("margin", prefer.gain_margin)),
        select=select.best_and_worst,
        online=True,
        group=2,
        unit=2,
    )


@with_ranges()
def expert_iteration(*, threshold: float = 1.0, keep: int = 0) -> Algorithm:
    """SFT on one's own rows that verify, each once, at most `keep` a prompt (0: all) (Anthony et al. 2017)"""
    chosen = partial(select.verified, threshold=threshold, keep=keep)
    return Algorithm(loss=((1.0, terms.nll),), select=chosen, online=True)


@with_ranges()
def distil(*, top_k: int = 0) -> Algorithm:
    """KL(student || teacher) at each token of the student's own samples (on-policy GKD, Agarwal et al. 2024)

    top_k: over the student's likeliest tokens and one bucket for the rest; 0: over the whole vocabulary.
    """
    return Algorithm(
        loss=((1.0, terms.reference_kl),),
        wants=_set("logp", "ref_kl"),  # logp is for metrics: the sampler's gap, the entropy
        teacher=Teacher(top_k=top_k),
        online=True,
    )
