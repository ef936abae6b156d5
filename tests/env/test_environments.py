"""What environments return, in each form they may return it in, and what an episode's rollout carries."""

import math

import pytest
from each import each

from hone.env.protocol import Step, as_messages, as_step
from hone.types import Rollout

USER = {"role": "user", "content": "Higher."}
TOOL = {"role": "tool", "content": "4", "name": "add"}


@each("said, messages", [("Higher.", (USER,)), (TOOL, (TOOL,)), ([TOOL, USER], (TOOL, USER)), ("", ()), ([], ())])
def test_a_text_is_one_message_of_the_user_and_messages_stay_as_they_are(said, messages):
    assert as_messages(said) == messages


@each("answer", [Step(messages=[USER], reward=0.5, done=True), ("Higher.", 0.5, True), ([USER], 0.5, 1)])
def test_a_step_and_a_tuple_say_the_same(answer):
    assert as_step(answer) == Step(messages=(USER,), reward=0.5, done=True)


def test_a_rollout_carries_what_each_turn_earned_and_refuses_another_length():
    nan = math.nan
    mask = (False, True, True, False, True)
    earned = (nan, nan, 0.5, nan, 1.0)
    row = Rollout(tokens=(1, 2, 3, 4, 5), mask=mask, turn_reward=earned, messages=(USER, TOOL))
    assert (row.copy_with(version=3).turn_reward, row.copy_with(version=3).messages) == (earned, (USER, TOOL))
    with pytest.raises(ValueError, match="5 tokens but 1 entries in turn_reward"):
        Rollout(tokens=(1, 2, 3, 4, 5), mask=mask, turn_reward=(1.0,))
