"""The remedy that an error states is the fix: it is provoked, the remedy followed, and seen to work.

catalogue.txt lists every message. After one was added, changed or removed: python tests/remedies/sites.py
"""

from collections import Counter

import pytest
from remedy_cases import CASES
from remedy_world import World, make_world, outcome
from sites import KINDS, kind_of, messages, raised_by, stored

BARE = 0  # messages that state no remedy


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="module")
def outcomes(world: World) -> list[tuple[str, str, str]]:
    """What each case says, the message it met, and what was wrong with its remedy."""
    return [(case.says, *outcome(case, world)) for case in CASES]


def test_every_remedy_that_is_followed_works(outcomes: list[tuple[str, str, str]]):
    assert [f"{says}: {why}" for says, _, why in outcomes if why] == []


def test_the_catalogue_has_every_message_and_no_other():
    there, known = set(messages()), set(stored())
    assert sorted(there - known) == [], "not in the catalogue: run python tests/remedies/sites.py"
    assert sorted(known - there) == [], "no longer in the source: run python tests/remedies/sites.py"


def test_a_message_is_followed_by_a_case_or_named_or_asks_for_something(outcomes: list[tuple[str, str, str]]):
    followed = {text for says, message, why in outcomes if not why and (text := raised_by(message, says))}
    wrong = [
        f"{text}: {kind}, now {now}" for text, kind in stored().items() if (now := kind_of(text, followed)) != kind
    ]
    assert wrong == [], "run python tests/remedies/sites.py"


def test_messages_without_a_remedy_only_grow_fewer():
    counts = Counter(stored().values())
    assert set(counts) <= set(KINDS)
    assert counts["bare"] <= BARE
    assert counts.total() - counts["followed"] <= 90


def test_a_message_that_nobody_wrote_down_is_found():
    assert "cannot be locked" in next(text for text in messages() if "cannot be locked" in text)
    assert kind_of("something is wrong", set()) == "bare"
    assert kind_of("it is {}: set train.steps=3", set()) == "named"
    assert kind_of("it is {}: copy it again", set()) == "asked"
