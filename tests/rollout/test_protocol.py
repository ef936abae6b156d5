"""The settings of a sampler are checked when they are made, and the message names the remedy."""

import math
from typing import Any

import pytest
from each import each

from hone.engine.params import SampleParams
from hone.errors import HoneError


@each(
    ("wrong", "words"),
    [
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"max_tokens": 1.5}, "max_tokens is 1.5: set it to a whole number"),
        ({"max_tokens": "5"}, "max_tokens is '5': set it to a whole number"),
        ({"seed": 1.5}, "seed is 1.5: set it to a whole number"),
        ({"top_k": 1.5}, "top_k is 1.5"),
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
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0"),
        ({"repetition_penalty": math.nan}, "repetition_penalty is nan"),
        ({"repetition_penalty": math.inf}, "repetition_penalty is inf"),
        ({"bias": {1: math.nan}}, "bias is not finite"),
        ({"bias": {1: -math.inf}}, "bias is not finite"),
        ({"bias": {-1: 1.0}}, "bias has a negative token"),
        ({"banned": frozenset({-2})}, "banned has a negative"),
        ({"stop": ("end", "")}, "a stop string is empty"),
        ({"top_logprobs": 21}, "top_logprobs is 21"),
        ({"temperature": "hot"}, "temperature is 'hot': set it to a number"),
        ({"top_p": None}, "top_p is None: set it to a number"),
        ({"stop": (5,)}, "stop is (5,): give a tuple of strings; token ids go into stop_ids"),
        ({"stop": 5}, "stop is 5: give a tuple of strings"),
        ({"stop_ids": frozenset({"a"})}, "stop_ids is frozenset({'a'}): give token ids"),
        ({"stop_ids": 2}, "stop_ids is 2: give token ids"),
        ({"banned": frozenset({1.5})}, "banned is frozenset({1.5}): give token ids"),
        ({"bias": [1.0]}, "bias is [1.0]: give a number for each token id"),
        ({"bias": {"a": 1.0}}, "bias is {'a': 1.0}: give token ids"),
        ({"bias": {1: "x"}}, "bias is {1: 'x'}: give a number for each token id"),
        ({"top_logprobs": -1}, "top_logprobs is -1"),
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


@each(
    ("settings", "altered"),
    [
        ({}, ()),
        ({"temperature": 0.5}, ()),
        ({"temperature": 0.0, "stop": ("x",), "top_logprobs": 3}, ()),
        ({"bias": {4: 0.0}}, ()),
        ({"top_k": 1}, ("top_k",)),
        ({"top_p": 0.9}, ("top_p",)),
        ({"min_p": 0.1}, ("min_p",)),
        ({"repetition_penalty": 0.9}, ("repetition_penalty",)),
        ({"bias": {4: -1.0}}, ("bias",)),
        ({"banned": frozenset({0})}, ("banned",)),
        ({"top_k": 2, "banned": frozenset({1})}, ("top_k", "banned")),
    ],
)
def test_altered_names_what_the_learner_does_not_see(settings: dict[str, Any], altered: tuple[str, ...]):
    assert SampleParams(max_tokens=1, stop_ids=frozenset(), **settings).altered == altered


def test_one_stop_string_without_a_tuple_is_refused():
    with pytest.raises(HoneError, match="stop is 'AI', a string: give a tuple of strings"):
        SampleParams(max_tokens=1, stop_ids=frozenset(), stop="AI")  # type: ignore[arg-type]
