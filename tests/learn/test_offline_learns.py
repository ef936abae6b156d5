"""Every offline algorithm learns, through loop.offline, what it is then asked of rows it has never seen."""

import itertools

import held_out
import tiny
import torch
from each import each

from hone.algo import ALGORITHMS, Algorithm
from hone.train.learner import Learner
from hone.types import Group

torch.set_num_threads(1)

SETTINGS = {"orpo": {"odds": 1.0}}
PREFERENCE = {"dpo", "ipo", "kto", "orpo", "simpo", "reward_model", "pointwise_reward_model"}
OFFLINE = [name for name in sorted(ALGORITHMS) if not ALGORITHMS[name]().online]


def trained(algo: Algorithm, rows: list[Group], *, steps: int) -> Learner:
    learner = tiny.learner_for(algo, lr=0.005)
    for _ in itertools.islice(tiny.run_offline(learner, algo, rows, size=24), steps):
        pass
    return learner


def separates_pairs(name: str) -> None:
    algo = ALGORITHMS[name](**SETTINGS.get(name, {}))
    rows, held = held_out.pairs()
    before = held_out.accuracy(tiny.learner_for(algo), algo, held)
    learner = trained(algo, held_out.labelled(rows) if "label" in algo.needs else rows, steps=100)
    assert before < 0.7
    assert held_out.accuracy(learner, algo, held) > 0.9


def lowers_nll(name: str) -> None:
    algo = ALGORITHMS[name]()
    rows, held = held_out.sequences(trained_prompt=name == "pretrain")
    before = held_out.nll(tiny.learner_for(algo), held)
    after = held_out.nll(trained(algo, rows, steps=150), held)
    assert before > 2.0
    assert after < 1.0


def classifies_steps(name: str) -> None:
    algo = ALGORITHMS[name]()
    rows, held = held_out.steps()
    assert held_out.step_accuracy(tiny.learner_for(algo), held) < 0.7
    assert held_out.step_accuracy(trained(algo, rows, steps=100), held) > 0.9


CASES = {
    **dict.fromkeys(PREFERENCE, separates_pairs),
    "sft": lowers_nll,
    "pretrain": lowers_nll,
    "process_reward_model": classifies_steps,
}


@each("name", OFFLINE)
def test_it_learns_what_holds_for_rows_it_has_not_seen(name: str) -> None:
    CASES[name](name)


def test_no_held_out_row_is_trained_on() -> None:
    for rows, held in (held_out.pairs(), held_out.steps(), held_out.sequences(trained_prompt=True)):
        seen = {tuple(tuple(r.tokens) for r in g) for g in rows}
        assert held
        assert not seen & {tuple(tuple(r.tokens) for r in g) for g in held}
