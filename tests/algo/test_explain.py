"""`hone algos NAME` says what every algorithm minimises, what each setting means and when to change it."""

import re

from hone.algo import ALGORITHMS
from hone.algo.explain import METHODS, OWN, SETTINGS, setting
from hone.algo.settings import allowed
from hone.config.overrides import settings_of


def test_every_algorithm_has_a_formula_a_paper_and_a_use():
    assert list(METHODS) == list(ALGORITHMS)
    for name, method in METHODS.items():
        assert method.formula, name
        assert method.paper, name
        assert len(method.use.split()) > 5, name


def test_every_setting_of_every_algorithm_is_explained():
    for name, factory in ALGORITHMS.items():
        for one in settings_of(factory):
            found = setting(name, one)
            assert len(found.meaning) > 10, f"{name}.{one}"
            assert len(found.change) > 5, f"{name}.{one}"


def test_nothing_is_explained_that_no_algorithm_has():
    there = {f"{name}.{one}" for name, factory in ALGORITHMS.items() for one in settings_of(factory)}
    assert set(OWN) <= there
    assert set(SETTINGS) <= {one.partition(".")[2] for one in there}


def test_what_a_formula_calls_by_a_settings_name_is_a_setting():
    """A formula in which clip or beta stands is of an algorithm that has it, or the reader looks for it in vain."""
    known = set(SETTINGS) - {"loss", "value", "process", "limit", "low", "high", "keep", "ratio", "average", "margin"}
    for name, method in METHODS.items():
        words = set(re.findall(r"[a-z_]+", method.formula)) & known
        unheard = {w for w in words if w not in settings_of(ALGORITHMS[name]) and w not in ("good", "bad", "odds")}
        assert unheard <= ({"clip"} if "clip(" in method.formula else set()), f"{name}: {unheard}"


def test_a_default_lies_in_its_range():
    for name, factory in ALGORITHMS.items():
        for one, default in settings_of(factory).items():
            numbers = allowed(name, one)
            if numbers is not None and default is not None and not isinstance(default, bool | str):
                assert default in numbers, f"{name}.{one}"


def test_advice_to_raise_or_lower_a_setting_leads_away_from_its_default():
    for name, factory in ALGORITHMS.items():
        for one, default in settings_of(factory).items():
            for way, numbers in re.findall(r"(raise|lower) it \(([^)]*)\)", setting(name, one).change):
                advised = [float(number) for number in re.findall(r"[\d.]+", numbers)]
                beyond = max(advised) > default if way == "raise" else min(advised) < default
                assert beyond, f"{name}.{one}={default}: {way} it ({numbers})"


def test_an_algorithm_has_its_own_meaning_where_the_shared_one_is_wrong():
    assert "discount" not in setting("simpo", "gamma").meaning
    assert setting("simpo", "gamma") != setting("ppo", "gamma")
    assert setting("dpo", "beta") != setting("grpo", "beta")
