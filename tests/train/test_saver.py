"""Writing beside the loop: what is written is what was, and what goes wrong there is known."""

import threading
from collections.abc import Callable

import pytest
import torch

from hone.errors import HoneError
from hone.rollout.overlap import Stopped
from hone.train import retain
from hone.train.saver import Copies, Saver


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
        assert event.wait(10)
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
    for _ in range(1000):
        if saver.failed:
            break
        threading.Event().wait(0.005)
    assert saver.failed
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
    assert isinstance(saver.close(patience=0.05), Stopped)


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
    assert retain.best(scores, lowest=lowest) == expected
