"""How a model writes where nobody says it: its generation config, then what suits."""

import json
from pathlib import Path

import pytest

from hone.config.recipe import LONGEST, SampleSpec
from hone.errors import HoneError
from hone.inference.defaults import Sampling, resolve_sampling, too_short


def written(folder: Path, **config: object) -> Path:
    (folder / "generation_config.json").write_text(json.dumps(config))
    return folder


def test_without_a_config_one_sample_is_the_likeliest_and_several_are_drawn(tmp_path: Path):
    one = resolve_sampling(Sampling(samples=1), tmp_path, context=4096).sampling
    assert (one.temperature, one.max_tokens, one.top_k, one.top_p) == (0.0, LONGEST, 0, 1.0)
    several = resolve_sampling(Sampling(samples=8), tmp_path, context=4096).sampling
    assert several.temperature == 1.0


def test_the_models_own_config_is_taken(tmp_path: Path):
    folder = written(tmp_path, do_sample=True, temperature=0.6, top_p=0.95, top_k=20, max_new_tokens=2048)
    found = resolve_sampling(Sampling(samples=1), folder, context=8192)
    assert (found.sampling.temperature, found.sampling.top_p, found.sampling.top_k, found.sampling.max_tokens) == (
        0.6,
        0.95,
        20,
        2048,
    )
    assert str(found) == (
        "temperature 0.6 top_k 20 top_p 0.95 (generation_config.json); at most 2048 tokens (generation_config.json); "
        "1 sample a problem"
    )


def test_what_is_asked_wins_and_brings_nothing_else_of_the_config(tmp_path: Path):
    folder = written(tmp_path, temperature=0.6, top_p=0.95, max_new_tokens=2048)
    found = resolve_sampling(Sampling(samples=4, temperature=1.0, max_tokens=99), folder, context=8192)
    assert (found.sampling.temperature, found.sampling.top_p, found.sampling.max_tokens) == (1.0, 1.0, 99)
    assert str(found).count("(as asked)") == 2


def test_a_config_that_does_not_sample_is_greedy_but_for_several_samples(tmp_path: Path):
    folder = written(tmp_path, do_sample=False, temperature=0.6)
    assert resolve_sampling(Sampling(samples=1), folder, context=100).sampling.temperature == 0.0
    assert resolve_sampling(Sampling(samples=2), folder, context=100).sampling.temperature == 1.0


def test_lengths_end_at_the_context_and_the_old_default_of_20_counts_for_nothing(tmp_path: Path):
    assert resolve_sampling(Sampling(), tmp_path, context=256).sampling.max_tokens == 255
    for config, expected in (
        ({"max_length": 20}, LONGEST),
        ({"max_length": 512}, 512),
        ({"max_new_tokens": 10_000}, 4095),
        ({"max_new_tokens": "many"}, LONGEST),
        ({"max_new_tokens": True}, LONGEST),
        ({"max_new_tokens": -3}, LONGEST),
    ):
        assert (
            resolve_sampling(Sampling(), written(tmp_path, **config), context=4096).sampling.max_tokens == expected
        ), config


def test_a_file_that_is_no_object_is_an_error_of_one_line(tmp_path: Path):
    (tmp_path / "generation_config.json").write_text("[1]")
    with pytest.raises(HoneError, match="generation_config"):
        resolve_sampling(Sampling(), tmp_path, context=100)


def test_where_much_is_cut_off_the_advice_has_the_number_to_set(tmp_path: Path):
    found = resolve_sampling(Sampling(max_tokens=64), tmp_path, context=8192)
    assert too_short(0.05, found, context=8192) == ""
    advice = too_short(1.0, found, context=8192)
    seen = "100% of the completions were cut off at 64 tokens, and mostly score 0"
    assert advice == f"{seen}: set max_tokens=128 (--max-tokens 128)"
    full = resolve_sampling(Sampling(max_tokens=99), tmp_path, context=100)
    advice = too_short(1.0, full, context=100)
    assert advice.startswith("100% of the completions were cut off where the context of 100 tokens ends, and mostly")


def test_a_runs_limit_is_its_own_or_what_the_context_leaves():
    assert SampleSpec(max_tokens=44).limit(8192) == 44
    assert SampleSpec().limit(8192) == LONGEST
    assert SampleSpec().limit(64) == 63
