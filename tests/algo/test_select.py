"""Which rollouts are learnt from: invalid rewards never choose, and nothing is chosen twice."""

from dataclasses import replace

import pytest
from algo_cases import rollout
from each import each

from hone.algo import dapo, expert_iteration, online_dpo, select
from hone.types import Group, Outcome, Stop


def rewards(groups: list[Group]) -> list[list[float | None]]:
    return [[select.reward_of(r) for r in g] for g in groups]


def group(*values: float | None) -> Group:
    return [rollout([i + 1, 9], v) for i, v in enumerate(values)]


def test_the_reward_of_an_unscored_rollout_is_none() -> None:
    assert select.reward_of(rollout([1], scored=False)) is None
    assert select.reward_of(rollout([1], None)) is None
    assert select.reward_of(rollout([1], 0.0)) == 0.0


def test_varied_drops_groups_without_signal() -> None:
    groups = [group(0, 0, 0), group(0, 1), group(1, None, 1), group(None, None), group(1), group(0.5, None, 0.0)]
    assert rewards(select.varied(groups)) == [[0, 1], [0.5, None, 0.0]]


@each(("length", "penalty"), [(0, 0.0), (80, 0.0), (81, -0.05), (90, -0.5), (100, -1.0), (101, -1.0), (500, -1.0)])
def test_the_overlong_penalty(length: int, penalty: float) -> None:
    # limit 100, margin 20: free up to 80, then (80 - n) / 20, then -1
    assert select.overlong_penalty(length, limit=100, margin=20) == pytest.approx(penalty)


def test_overlong_shaping_takes_the_rollouts_own_limit_and_a_fifth_of_it() -> None:
    # limit 10, margin 2: 8 tokens free, 9 tokens -.5, 10 tokens -1; the prompt does not count
    groups = [[rollout([1] * n, 1.0, limit=10) for n in (8, 9, 10)] + [rollout([1] * 10, None, limit=10)]]
    shaped = select.shape_overlong(groups)
    assert rewards(shaped) == [[1.0, 0.5, 0.0, None]]
    assert shaped[0][1].outcome is not None
    assert shaped[0][1].outcome.parts == {"overlong": -0.5}
    # limit 4, margin 4: every token costs a quarter
    assert rewards(select.shape_overlong([[rollout([1, 1], 1.0)]], limit=4, margin=4)) == [[0.5]]


def test_the_overlong_penalty_stands_beside_what_the_parts_of_a_reward_added() -> None:
    outcome = Outcome(value=1.0, parts={"math": 2.0}, added={"math": 1.0})
    ((r,),) = select.shape_overlong([[replace(rollout([1, 1], 1.0), outcome=outcome)]], limit=4, margin=4)
    assert r.outcome == Outcome(value=0.5, parts={"math": 2.0, "overlong": -0.5}, added={"math": 1.0, "overlong": -0.5})


def test_drop_truncated_leaves_out_what_the_limit_cut_off() -> None:
    cut, whole, ended = rollout([1], 1.0, stop=Stop.LENGTH), rollout([2], 0.0), rollout([3], 0.0, stop=Stop.STRING)
    assert select.drop_truncated([[cut, whole], [cut], [whole, ended]]) == [[whole], [whole, ended]]


def test_dapos_filter_asks_for_variation_among_the_rows_that_are_left() -> None:
    cut, right, wrong = rollout([1], 0.0, stop=Stop.LENGTH), rollout([2], 1.0), rollout([3], 0.0)
    groups = [[cut, right, right], [cut, right, wrong]]
    assert dapo(overlong="filter").select(groups) == [[right, wrong]]
    assert dapo(overlong="off").select(groups) == groups


def test_dapos_shaping_does_not_make_a_group_vary() -> None:
    groups = [[rollout([1] * 10, 0.0), rollout([1], 0.0)], [rollout([1] * 10, 1.0), rollout([1], 0.0)]]
    assert rewards(dapo().select(groups)) == [[0.0, 0.0]]  # 1 - 1 and 0


def test_verified_keeps_each_right_answer_once_in_order() -> None:
    a, b, wrong, broken = rollout([1], 1.0), rollout([2], 2.0), rollout([3], 0.5), rollout([4], None)
    twin = rollout([1], 1.0)
    groups = [[wrong, a, b, twin, broken], [wrong, broken], [b]]
    assert select.verified(groups) == [[a, b], [b]]
    assert select.verified(groups)[0][0] is a
    assert select.verified(groups, keep=1) == [[a], [b]]
    assert select.verified(groups, threshold=1.5) == [[b], [b]]
    assert expert_iteration(threshold=0.5, keep=2).select(groups) == [[wrong, a], [wrong], [b]]


def test_best_and_worst_is_a_pair_with_a_winner() -> None:
    groups = [group(0.5, None, 2.0, -1.0, 0.0), group(1, 1), group(None, 3.0), group(0, 1)]
    assert rewards(online_dpo().select(groups)) == [[2.0, -1.0], [1, 0]]


def test_chain_goes_from_left_to_right() -> None:
    groups = [group(0, 1), group(1, 1)]
    assert select.chain(groups, stages=()) == groups
    assert rewards(select.chain(groups, stages=(select.varied, lambda gs: gs + gs))) == [[0, 1], [0, 1]]
