"""Where steps end in text and tokens, and what a process model's scores become: rewards, potentials, ratings."""

import math

import pytest
import torch
from each import each

from hone.errors import HoneError
from hone.reward.learned.process_model import Dense, ProcessModel, shaping
from hone.reward.learned.reward_model import Ensemble, combine_scores
from hone.reward.score import Reward
from hone.reward.steps import Stepper, split_steps, text_ends
from hone.types import Batch, Forward, Outcome, Rollout, Stop

torch.set_num_threads(1)
WORDS = ["<eos>", "a", "b", " ", "\n", "\n\n", " a", "a\nb", "é", "b\n"]


def decode(tokens: list[int]) -> str:
    return "".join(WORDS[t] for t in tokens)


def rollout(*written: int, prompt: int = 2, stop: Stop = Stop.TOKEN, value: float | None = 1.0) -> Rollout:
    tokens = [1] * prompt + list(written)
    mask = [False] * prompt + [True] * len(written)
    return Rollout(tokens=tokens, mask=mask, stop=stop, outcome=Outcome(value=value))


def stepper(separator: str = "\n") -> Stepper:
    return Stepper(decode=decode, stop_ids={0}, separator=separator)


@each(
    ("text", "steps"),
    [
        ("", []),
        ("a", ["a"]),
        ("a\n", ["a\n"]),
        ("a\nb", ["a\n", "b"]),
        ("a\n\n \nb\n", ["a\n\n \n", "b\n"]),
        ("\n\na\nb", ["\n\na\n", "b"]),
        ("\n \n", ["\n \n"]),
    ],
)
def test_blank_pieces_belong_to_the_step_before_them(text, steps):
    assert split_steps(text) == steps
    assert "".join(split_steps(text)) == text


def test_an_empty_separator_is_refused():
    with pytest.raises(HoneError, match="separator of steps is empty"):
        split_steps("a", "")


def test_a_step_ends_with_its_separators_token_and_the_last_one_before_the_stop_token():
    r = rollout(1, 4, 2, 5, 1, 0)  # a\n | b\n\n | a <eos>
    assert stepper().ends_and_texts(r) == ([3, 5, 6], ["a\n", "b\n\n", "a"])
    assert stepper().ends(rollout(1, 4, 0)) == [3]
    assert stepper().ends(rollout(9, 9, 1, 0)) == [2, 3, 4]
    assert stepper().ends(rollout(0)) == []


def test_several_stop_ids_at_the_end_are_no_part_of_any_step():
    for trailing in ((0,), (0, 0), (0, 8, 0)):  # as where a turn's end and the text's end are both written
        two = Stepper(decode=decode, stop_ids={0, 8})
        assert two.ends_and_texts(rollout(1, 4, 2, *trailing)) == ([3, 4], ["a\n", "b"]), trailing
        assert two.ends_and_texts(rollout(*trailing)) == ([], []), trailing


def test_a_stop_id_before_the_end_is_text_like_any_other():
    assert stepper().ends_and_texts(rollout(1, 0, 4, 2, 0, 0)) == ([4, 5], ["a<eos>\n", "b"])


def test_a_token_that_reaches_into_the_next_step_belongs_to_it():
    assert stepper(" ").ends_and_texts(rollout(1, 6, 6, 0)) == ([2, 3, 4], ["a", " a", " a"])
    assert stepper().ends_and_texts(rollout(7, 2, 0)) == ([3], ["a\nbb"])  # no token ends the first step
    assert stepper().ends_and_texts(rollout(2, 7, 2, 0)) == ([2, 4], ["b", "a\nbb"])


def test_observed_tokens_are_no_part_of_any_step():
    tokens, mask = [1, 1, 4, 2, 2, 1, 4, 0], [False, True, True, False, False, True, True, True]
    assert stepper().ends(Rollout(tokens=tokens, mask=mask)) == [2, 6]


def test_characters_of_several_tokens_end_with_the_last_of_them():
    pieces = [b"a", b"\xc3", b"\xa9", b"\n", b"\xe2\x82", b"\xac", b"b"] * 9

    def by_bytes(tokens: list[int]) -> str:
        return b"".join(pieces[t] for t in tokens).decode(errors="replace")

    tokens = list(range(len(pieces)))
    ends = text_ends(tokens, by_bytes)
    expected = [len(b"".join(pieces[: i + 1]).decode(errors="ignore")) for i in tokens]
    assert ends == expected
    found = Stepper(decode=by_bytes).ends(Rollout(tokens=tokens, mask=[True] * len(tokens)))
    assert found == [3 + 7 * i for i in range(9)] + [len(tokens) - 1]


def test_steps_of_bytes_that_are_unreadable_beside_half_a_character():
    text = "日本語\n" * 9

    def by_fallback(tokens: list[int]) -> str:
        try:
            return bytes(tokens).decode()
        except UnicodeDecodeError:
            return "\ufffd" * len(tokens)

    tokens = list(text.encode())
    assert Stepper(decode=by_fallback).ends(Rollout(tokens=tokens, mask=[True] * len(tokens))) == list(range(9, 90, 10))


# --- scores ---


def logits(batch: Batch, want: frozenset[str]) -> Forward:
    """The token's own number, less 2: sigmoid of it is known."""
    return Forward(value=(batch.inputs - 2.0).double())


def process(*models, **settings) -> ProcessModel:
    return ProcessModel(models=models or (logits,), stepper=stepper(), pad_id=0, **settings)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def test_scores_are_read_after_each_steps_last_token():
    rows = [rollout(1, 4, 2, 5, 1, 0), rollout(0), rollout(2, 0)]
    found = process()(rows)
    assert [list(steps.ends) for steps in found] == [[3, 5, 6], [], [2]]
    assert found[0].scores == pytest.approx([sigmoid(2), sigmoid(3), sigmoid(-1)])
    assert found[2].scores == pytest.approx([0.5])


@pytest.mark.parametrize(("by", "expected"), [("min", -1.0), ("last", -1.0)])
def test_a_rating_sums_up_the_steps(by, expected):
    rows = [rollout(1, 4, 2, 5, 1, 0), rollout(0)]
    assert process().rate(rows, by=by) == pytest.approx([sigmoid(expected), 0.0])
    assert process().rate(rows, by="product")[0] == pytest.approx(sigmoid(2) * sigmoid(3) * sigmoid(-1))
    with pytest.raises(HoneError, match="use one of min, last, mean, product"):
        process().rate(rows, by="median")


def test_an_ensemble_is_its_mean_its_lowest_or_less_its_spread_by_hand():
    # of 1 and 5: mean 3, standard deviation 2 (variance 4, and 2.83 where one is taken off the count)
    values = torch.tensor([[1.0, 2.0], [5.0, 2.0]]).double().numpy()
    assert combine_scores(values, how="mean").tolist() == [3.0, 2.0]
    assert combine_scores(values, how="min").tolist() == [1.0, 2.0]
    assert combine_scores(values, how="penalty", k=0.5).tolist() == [2.0, 2.0]
    members = [lambda rollouts: [1.0, 2.0], lambda rollouts: [5.0, math.nan]]
    outcomes = Reward(Ensemble(members=members, how="penalty", k=2.0))([rollout(1), rollout(2)])
    assert (outcomes[0].value, dict(outcomes[0].parts)) == (-1.0, {"mean": 3.0, "spread": 2.0})
    assert not outcomes[1].valid
    both = process(logits, lambda batch, want: Forward(value=torch.zeros_like(batch.inputs).double()), how="min")
    assert both([rollout(1, 4, 1, 0)])[0].scores == pytest.approx([0.5, sigmoid(-1)])
    for wrong in ({"members": []}, {"members": members, "how": "max"}, {"members": members, "k": math.nan}):
        with pytest.raises(HoneError, match="ensemble"):
            Ensemble(**wrong)


def filled(r: Rollout, **settings) -> list[float]:
    ((found,),) = Dense(model=process(), **settings)([[r]])
    return list(found.step_reward)


def test_dense_rewards_lie_at_step_ends_and_the_outcome_only_where_it_is_asked_for():
    r = rollout(1, 4, 1, 0, value=10.0)
    nan = pytest.approx(math.nan, nan_ok=True)
    assert filled(r, weight=2.0) == [nan, nan, nan, pytest.approx(2 * sigmoid(2)), pytest.approx(2 * sigmoid(-1)), nan]
    assert filled(r, outcome=True)[3:5] == [pytest.approx(sigmoid(2)), 10.0]
    invalid = rollout(1, 4, 1, 0, value=None)
    assert filled(invalid, outcome=True)[4] == pytest.approx(sigmoid(-1))


def test_progress_is_what_a_step_adds_and_sums_to_the_last_score_or_to_the_outcome():
    r = rollout(1, 4, 2, 5, 1, 0, value=10.0)
    scores = [sigmoid(2), sigmoid(3), sigmoid(-1)]
    steps = [x for x in filled(r, use="progress", weight=2.0) if not math.isnan(x)]
    assert steps == pytest.approx([2 * scores[0], 2 * (scores[1] - scores[0]), 2 * (scores[2] - scores[1])])
    assert sum(steps) == pytest.approx(2 * scores[-1])
    told = [x for x in filled(r, use="progress", outcome=True) if not math.isnan(x)]
    assert told == pytest.approx([scores[0], scores[1] - scores[0], 10.0 - scores[1]])
    assert sum(told) == pytest.approx(10.0)
    assert all(map(math.isnan, filled(rollout(0), use="progress", outcome=True))), "no step, no reward"


@pytest.mark.parametrize("gamma", [1.0, 0.9])
@pytest.mark.parametrize("stop", [Stop.TOKEN, Stop.STRING, Stop.LENGTH])
def test_shaping_changes_a_rows_discounted_sum_by_the_first_potential_and_by_that_of_a_cut_off_end(gamma, stop):
    r = rollout(1, 4, 2, 5, 1, stop=stop)
    found = [x for x, on in zip(filled(r, use="shaping", weight=3.0, gamma=gamma), r.mask, strict=True) if on]
    total = sum(gamma**t * x for t, x in enumerate(found))
    last = 3 * sigmoid(-1) if stop is Stop.LENGTH else 0.0
    assert total == pytest.approx(gamma ** len(found) * last - 0.0)
    assert found[1] == pytest.approx(gamma * 3 * sigmoid(2))
    assert shaping([2.0, 5.0], gamma=0.5, after=4.0) == [0.5, -3.0]


def test_a_score_that_is_no_number_makes_the_reward_invalid():
    broken = process(lambda batch, want: Forward(value=torch.full(batch.inputs.shape, math.nan)))
    ((found,),) = Dense(model=broken)([[rollout(1, 0)]])
    assert found.outcome is not None
    assert not found.outcome.valid
    with pytest.raises(HoneError, match="use one of reward, progress, shaping"):
        Dense(model=broken, use="bonus")
