"""Writing beside the loop: what is written is what was, and what goes wrong there is known."""

import itertools
import threading
import time
from collections.abc import Callable

import pytest
import torch
from patience import eventually, patience

from hone.checkpoint.saver import Saver, Timer, process_age
from hone.checkpoint.state import Copies
from hone.errors import HoneError
from hone.rollout.overlap import Cancelled
from hone.storage import files


def test_only_what_moves_is_copied_and_once():
    moving, still = torch.arange(6.0), torch.arange(3.0)
    copies = Copies([moving])
    view = moving.view(2, 3)[:, 1]
    taken = [copies(x) for x in (moving, moving, view, still, moving * 1)]
    moving.zero_()
    assert taken[0].tolist() == [0, 1, 2, 3, 4, 5]
    assert taken[0] is taken[1]
    assert taken[2].tolist() == [1, 4]
    assert taken[2].is_contiguous()
    assert taken[3].data_ptr() == still.data_ptr()
    assert taken[4].tolist() == [0, 1, 2, 3, 4, 5]


def held_up(event: threading.Event, then: Callable[[], object] = lambda: None) -> Callable[[], object]:
    def write() -> object:
        assert event.wait(patience(10))
        return then()

    return write


def fail() -> None:
    raise HoneError("the disk is full")


def test_the_loop_goes_on_while_it_is_written():
    saver, event, done = Saver(), threading.Event(), list[int]()
    saver.start(held_up(event, lambda: done.append(1)))
    assert done == []
    assert not saver.failed
    event.set()
    saver.wait()
    assert done == [1]
    saver.wait()  # there is nothing more to wait for


def test_one_is_written_at_a_time():
    saver, done = Saver(), list[int]()
    for i in range(5):
        saver.start(lambda i=i: done.append(i))
    saver.wait()
    assert done == [0, 1, 2, 3, 4]


def test_a_failure_is_known_and_the_next_one_is_waited_for():
    saver, done = Saver(), list[int]()
    saver.start(fail)
    assert eventually(lambda: saver.failed)
    saver.start(lambda: done.append(1))
    assert done == [1], "it was waited for"
    assert saver.drain() == ["the disk is full; the run is saved anew"]
    assert saver.drain() == []
    assert not saver.failed


def test_a_second_failure_is_raised():
    saver = Saver()
    saver.start(fail)
    with pytest.raises(HoneError, match="full"):
        saver.start(fail)
    saver.start(fail)
    with pytest.raises(HoneError, match="full"):
        saver.wait()
    saver.wait()


def test_closing_waits_or_gives_up():
    saver, event = Saver(), threading.Event()
    saver.start(fail)
    assert str(saver.close()) == "the disk is full"
    assert saver.close() is None

    def patiently() -> None:
        while not event.wait(0.005):
            saver.go_on()

    saver.start(patiently)
    assert isinstance(saver.close(patience=0.05), Cancelled)


def test_what_was_written_is_let_go():
    import weakref

    saver, tensor = Saver(), torch.zeros(3)
    seen = weakref.ref(tensor)
    saver.start(lambda tensor=tensor: tensor.sum())
    del tensor
    saver._work.join()  # pyright: ignore
    assert seen() is None


@pytest.mark.parametrize(
    ("scores", "lowest", "expected"),
    [
        ({1: 0.1, 2: 0.3, 3: 0.2}, False, 2),
        ({1: 0.1, 2: 0.3, 3: 0.2}, True, 1),
        ({5: 1.0, 3: 1.0}, False, 3),
        ({1: float("nan"), 2: float("inf"), 3: -1.0}, False, 3),
        ({1: float("nan")}, True, None),
    ],
)
def test_the_best_is_the_first_of_the_finite(scores, lowest: bool, expected):
    assert files.best(scores, lowest=lowest) == expected


# --- by the clock ---


class Clock:
    """Goes when it is told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def saves(hours: float, *, cost: float, step: float = 1.0, age: float = 0.0, seconds: float = 300.0) -> list[float]:
    """The seconds of a run at which it is saved, where a step takes so long and a save costs so much."""
    clock = Clock()
    timer, found = Timer(seconds, age=age, clock=clock), list[float]()
    while (clock.now - 1000.0) < 3600 * hours:
        clock.now += step
        if timer.due(cost):
            found.append(clock.now - 1000.0)
            clock.now += cost
            timer.saved()
    return found


def test_a_cheap_save_comes_at_once_then_when_the_run_has_doubled_then_by_the_minutes():
    found = saves(1, cost=0.004, step=0.1)
    assert found[0] == pytest.approx(0.4)
    assert [b / a for a, b in itertools.pairwise(found[1:9])] == pytest.approx([2.0] * 7, abs=0.2)
    assert [b - a for a, b in itertools.pairwise(found[-9:])] == pytest.approx([300] * 8, abs=0.2)


def test_a_dear_save_comes_after_the_minutes_at_the_latest_and_then_seldom():
    assert saves(3, cost=5.0)[0] == 300.0
    assert [b - a for a, b in itertools.pairwise(saves(3, cost=5.0))] == pytest.approx([1000] * 10, abs=6)
    assert saves(1, cost=0.5)[0] == 50.0
    assert saves(1, cost=0.5, age=45.0)[0] == 5.0, "what was spent before the run began counts for the first one"


def test_saving_costs_less_than_a_hundredth_whatever_a_save_costs():
    for cost in (0.001, 0.01, 0.1, 0.5, 1.0, 3.0, 10.0, 60.0):
        for step in (0.05, 1.0, 40.0):
            hours = max(0.02, cost / 36)  # a save is a hundredth of a run that takes a hundred times as long
            share = len(saves(hours, cost=cost, step=step)) * cost / (3600 * hours)
            assert share <= 0.0101, (cost, step)


def test_a_step_that_takes_longer_than_the_minutes_is_saved_each_time():
    assert saves(1, cost=1.0, step=600.0) == pytest.approx([600, 1201, 1802, 2403, 3004, 3605])


def test_no_minutes_no_saves():
    assert saves(1, cost=0.0, seconds=0.0) == []


def test_a_save_that_the_clock_did_not_ask_for_puts_the_next_one_off():
    clock = Clock()
    timer = Timer(300.0, clock=clock)
    for _ in range(10):
        clock.now += 200.0
        timer.saved()
        clock.now += 90.0
        assert not timer.due(0.001)
    clock.now += 211.0
    assert timer.due(0.001)


def test_the_age_of_this_process_is_known():
    assert 0.0 < process_age() < time.monotonic() + 1e6


def test_a_save_costs_the_loop_what_it_waits_and_on_its_own_cores_what_is_computed():
    for shares, expected in ((True, 0.25), (False, 0.0)):
        saver = Saver(shares_cores=shares)
        saver.guess(0.25)
        assert saver.cost == expected
        saver.held_seconds = 0.5
        saver.start(lambda: sum(range(10**6)))
        saver.wait()
        assert (saver.cost > 0.5) == shares
        assert not saver.busy


def test_it_is_busy_while_it_writes():
    saver, event = Saver(), threading.Event()
    saver.start(held_up(event))
    assert saver.busy
    event.set()
    saver.wait()
    assert not saver.busy
