"""The settings of a sampler are checked when they are made, and the message names the remedy."""

import math
from typing import Any

import pytest

from hone.errors import HoneError
from hone.rollout.protocol import SampleParams


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"temperature": -0.1}, "temperature is -0.1"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"temperature": math.inf}, "temperature is inf"),
        ({"top_k": -1}, "top_k is -1"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_p": 1.1}, "top_p is 1.1"),
        ({"top_p": math.nan}, "top_p is nan"),
        ({"min_p": -0.1}, "min_p is -0.1"),
        ({"min_p": 1.1}, "min_p is 1.1"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": 2**64}, "seed is"),
        ({"stop_ids": frozenset({3, -1})}, "stop_ids"),
    ],
)
def test_wrong_setting_is_refused_in_one_line_with_the_remedy(wrong: dict[str, Any], words: str):
    with pytest.raises(HoneError) as error:
        SampleParams(**{"max_tokens": 4, "stop_ids": frozenset(), **wrong})
    assert words in str(error.value)
    assert ": " in str(error.value)
    assert "\n" not in str(error.value)


def test_bounds_themselves_are_allowed():
    SampleParams(max_tokens=1, temperature=0.0, top_p=1.0, min_p=1.0, stop_ids=frozenset({0}), seed=2**64 - 1)


@pytest.mark.parametrize(
    ("settings", "truncated"),
    [({}, False), ({"temperature": 0.5}, False), ({"top_k": 1}, True), ({"top_p": 0.9}, True), ({"min_p": 0.1}, True)],
)
def test_truncated_says_whether_the_support_may_be_cut(settings: dict[str, Any], truncated: bool):
    assert SampleParams(max_tokens=1, stop_ids=frozenset(), **settings).truncated is truncated
