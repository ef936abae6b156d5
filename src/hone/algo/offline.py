"""The offline algorithms by published name: from rows of a dataset. A factory's keyword arguments are its settings."""

from functools import partial

from hone.algo import prefer, terms, weight
from hone.algo.settings import NOT_NEGATIVE, POSITIVE, with_ranges
from hone.algo.table import Algorithm
from hone.errors import HoneError

GAINS = (("accuracy", prefer.gain_accuracy), ("margin", prefer.gain_margin))
LIKELIHOODS = (("accuracy", prefer.likelihood_accuracy),)


@with_ranges()
def pretrain() -> Algorithm:
    """Mean NLL of every token"""
    return Algorithm(loss=((1.0, terms.nll),))


@with_ranges()
def sft(*, average: str = "token") -> Algorithm:
    """NLL of the response tokens, stop token included, averaged by token or by row"""
    if average not in ("token", "row"):
        raise HoneError(f"average={average!r} does not exist: use token or row")
    return Algorithm(loss=((1.0, terms.nll),), weigh=weight.AVERAGES[average])


@with_ranges()
def reward_model(*, centre: float = 0.0) -> Algorithm:
    """Bradley-Terry: softplus(-(R_w - R_l - margin)), with a pull of both scores to 0 by `centre`"""
    loss = ((1.0, partial(prefer.bradley_terry, centre=centre)),)
    watch = (("accuracy", prefer.score_accuracy),)
    return Algorithm(loss=loss, wants=frozenset({"value"}), watch=watch, unit=2)


@with_ranges()
def pointwise_reward_model(*, loss: str = "squared") -> Algorithm:
    """Each completion by itself: the square of what its score is off by, halved; or with bce the log-odds of good"""
    if loss not in prefer.POINTWISE:
        raise HoneError(f"loss={loss!r} does not exist: use {' or '.join(prefer.POINTWISE)}")
    return Algorithm(loss=((1.0, prefer.POINTWISE[loss]),), needs=frozenset({"label"}), wants=frozenset({"value"}))


@with_ranges()
def process_reward_model() -> Algorithm:
    """Binary cross-entropy of right or wrong at each step's end"""
    return Algorithm(loss=((1.0, terms.step_bce),), needs=frozenset({"label"}), wants=frozenset({"value"}))


@with_ranges(beta=POSITIVE)
def dpo(*, beta: float = 0.1, smoothing: float = 0.0) -> Algorithm:
    """softplus(-beta u), u = gain of the chosen minus gain of the rejected (Rafailov et al. 2023)"""
    loss = ((1.0, partial(prefer.dpo, beta=beta, smoothing=smoothing)),)
    return Algorithm(loss=loss, needs=frozenset({"ref_logp"}), watch=GAINS, unit=2)


@with_ranges(beta=POSITIVE)
def ipo(*, beta: float = 0.1) -> Algorithm:
    """(u - 1/(2 beta))^2 (Azar et al. 2023)"""
    loss = ((1.0, partial(prefer.ipo, beta=beta)),)
    return Algorithm(loss=loss, needs=frozenset({"ref_logp"}), watch=GAINS, unit=2)


@with_ranges(beta=POSITIVE)
def kto(*, beta: float = 0.1, good: float = 1.0, bad: float = 1.0) -> Algorithm:
    """Desirable and undesirable rows against the KL of mismatched pairs (Ethayarajh et al. 2024)"""
    loss = ((1.0, partial(prefer.kto, beta=beta, good=good, bad=bad)),)
    return Algorithm(loss=loss, needs=frozenset({"ref_logp", "kl_baseline", "label"}))


@with_ranges()
def orpo(*, odds: float = 0.1) -> Algorithm:
    """NLL of the chosen plus `odds` times the log odds ratio: no reference (Hong et al. 2024)"""
    return Algorithm(loss=((1.0, prefer.chosen_nll), (odds, prefer.odds)), watch=LIKELIHOODS, unit=2)


@with_ranges(beta=POSITIVE, gamma=NOT_NEGATIVE)
def simpo(*, beta: float = 2.0, gamma: float = 1.0) -> Algorithm:
    """Length-normalised margin beyond gamma: no reference (Meng et al. 2024)"""
    return Algorithm(loss=((1.0, partial(prefer.simpo, beta=beta, gamma=gamma)),), watch=LIKELIHOODS, unit=2)
