"""What reward workers may take and leave: memory has a limit, and no process outlives the worker that started it."""

import mmap
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from patience import eventually, patience, running

from benchmarks.trials import workers
from hone.config.recipe import Recipe, TrainSpec
from hone.config.rules import validate
from hone.errors import HoneError
from hone.launch.rewards import start_reward_processes
from hone.reward.score import Reward
from hone.reward.workers import process_tree
from hone.reward.workers.reward_worker import WorkerReward, in_workers
from hone.types import Outcome, Rollout

torch.set_num_threads(1)
MEMORY = 0.15  # GiB
BOMB = 400 * 2**20  # bytes


@pytest.fixture(params=["control group", "limits alone"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways in which a worker is held, where this machine has both."""
    if request.param == "limits alone":
        monkeypatch.setattr(process_tree, "_home", lambda process: None)
    elif process_tree._home(os.getpid()) is None:
        pytest.skip("no control group can be made here")
    return request.param


def scored(reward: Reward, *texts: str) -> list[Outcome]:
    return reward([Rollout(tokens=[1], mask=[True], text=text) for text in texts])


def number_in(path: Path) -> int:
    assert eventually(lambda: path.exists() and path.read_text().endswith("\n"))
    return int(path.read_text())


def daemon(path: Path) -> None:
    """A daemon that runs when this returns."""
    workers.daemon(path)
    number_in(path)


# --- what it starts ---


def test_a_daemon_that_a_call_leaves_is_ended_after_the_call(kind: str, tmp_path: Path):
    (made,) = in_workers([lambda completion: daemon(tmp_path / completion) or 1.0], seconds=60.0, workers=1)
    assert [o.value for o in scored(made, "a", "b")] == [1.0, 1.0]
    assert eventually(lambda: not any(running(number_in(tmp_path / name)) for name in "ab"))
    assert scored(made, "c")[0].value == 1.0


def test_a_helper_that_a_worker_keeps_serves_the_next_call_and_ends_with_the_pool(kind: str, tmp_path: Path):
    helper: list[subprocess.Popen[bytes]] = []

    def asks(completion: str) -> float:
        if not helper:
            helper.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]))
        return float(helper[0].pid) if helper[0].poll() is None else -1.0

    (made,) = in_workers([asks], seconds=60.0, workers=1)
    assert isinstance(made, WorkerReward)
    first, second = (scored(made, "x")[0].value for _ in range(2))
    assert first == second
    assert first is not None
    assert running(int(first))
    made.pool.close()
    assert eventually(lambda: not running(int(first)))


def test_what_a_call_has_started_ends_with_its_time(kind: str, tmp_path: Path):
    def slow(completion: str) -> float:
        daemon(tmp_path / "daemon")
        if os.fork() == 0:
            os.setsid()
            workers.note(tmp_path / "child")
            time.sleep(600)
        number_in(tmp_path / "child")
        if completion == "hang":
            time.sleep(600)
        os._exit(3)

    for completion, says, seconds in (("hang", "timed out", 1.5), ("die", "exit code 3", 60.0)):
        (made,) = in_workers([slow], seconds=patience(seconds), workers=1)
        assert says in scored(made, completion)[0].reason
        for name in ("daemon", "child"):
            assert eventually(lambda name=name: not running(number_in(tmp_path / name))), (completion, name)
            (tmp_path / name).unlink()


def test_a_fork_bomb_ends_with_its_time(kind: str, tmp_path: Path):
    def bomb(completion: str) -> None:
        (tmp_path / str(os.getpid())).touch()
        while len(os.listdir(tmp_path)) < 60:
            os.fork()
            os.setsid() if os.getpid() != os.getsid(0) else None
            (tmp_path / str(os.getpid())).touch()
        time.sleep(600)

    (made,) = in_workers([bomb], seconds=patience(1.0), workers=1)
    assert "timed out" in scored(made, "x")[0].reason
    assert eventually(lambda: not any(running(int(name)) for name in os.listdir(tmp_path)))


def test_a_killed_program_leaves_no_process_of_its_rewards(kind: str, tmp_path: Path):
    def stays(completion: str) -> None:
        daemon(tmp_path / "daemon")
        workers.note(tmp_path / "worker")
        time.sleep(600)

    program = os.fork()
    if not program:
        (made,) = in_workers([stays], seconds=600.0, workers=1)
        scored(made, "x")
        os._exit(0)
    found = [number_in(tmp_path / name) for name in ("daemon", "worker")]
    assert all(map(running, found))
    os.kill(program, signal.SIGKILL)
    os.waitpid(program, 0)
    assert eventually(lambda: not any(map(running, found)))


HERE = os.getpid()


def groups() -> Iterator[Path]:
    """Control groups of this process's workers."""
    home = process_tree._home(HERE)
    for folder in set(home.folders.values()) if home else ():
        yield from folder.glob(f"hone-sandbox-{HERE}-*")


def test_no_control_group_is_left_by_a_pool_or_by_a_supervisor_that_was_killed(tmp_path: Path):
    if process_tree._home(os.getpid()) is None:
        pytest.skip("no control group can be made here")
    before = set(groups())
    (made,) = in_workers([lambda completion: daemon(tmp_path / completion) or 1.0], seconds=60.0, workers=2)
    assert isinstance(made, WorkerReward)
    assert len(set(groups()) - before) >= 2
    assert scored(made, "a")[0].value == 1.0
    for _, supervisor in made.pool._supervisors:
        os.kill(supervisor, signal.SIGKILL)
    made.pool.close()
    assert set(groups()) == before


def test_control_groups_that_a_reward_made_inside_its_own_go_with_it():
    if process_tree._home(os.getpid()) is None:
        pytest.skip("no control group can be made here")
    before = set(groups())

    def nested(completion: str) -> float:
        for folder in groups():
            (folder / completion).mkdir()
        return 1.0

    (made,) = in_workers([nested], seconds=60.0, workers=1)
    assert isinstance(made, WorkerReward)
    assert scored(made, "inner")[0].value == 1.0
    made.pool.close()
    assert set(groups()) == before


# --- what it takes ---


def takes(completion: str) -> float:
    """As much memory as it says, in one piece, in small ones or in children."""
    if completion == "one":
        return float(len(bytearray(os.urandom(1)) * BOMB))
    if completion == "many":
        return float(len([os.urandom(2**16) for _ in range(BOMB >> 16)]))
    if completion == "children":
        for _ in range(8):
            if os.fork() == 0:
                held = list[bytes]()
                with suppress(MemoryError):  # its own limit may come first: what it has by then counts all the same
                    held += (os.urandom(2**16) for _ in range(BOMB // 8 >> 16))
                time.sleep(600)
                os._exit(len(held) & 1)
        time.sleep(600)
    return 1.0


def test_a_reward_beyond_its_memory_is_invalid_and_names_the_setting(kind: str):
    (made,) = in_workers([takes], seconds=patience(30.0), workers=1, memory=MEMORY)
    for completion in ("one", "many", "children"):
        fine, bad, after = scored(made, "fine", completion, "fine")
        assert (fine.value, bad.value, after.value) == (1.0, None, 1.0), completion
        assert bad.reason.startswith("out of memory: reward takes took more than 0.15 GiB (train.reward_memory)"), bad


def test_memory_that_its_program_has_freed_counts_when_a_reward_takes_it(kind: str):
    pieces = [os.urandom(2**16) for _ in range(BOMB >> 16)]
    last = os.urandom(2**16)  # after them, so that malloc keeps their place
    del pieces
    (made,) = in_workers([takes], seconds=patience(30.0), workers=1, memory=MEMORY)
    (bad,) = scored(made, "many")
    assert last
    assert bad.value is None
    assert bad.reason.startswith("out of memory"), bad


def test_what_a_worker_has_written_to_hides_nothing_that_its_children_take(monkeypatch: pytest.MonkeyPatch):
    """Its program keeps much memory; the worker writes to it, and then shares it with its children alone."""
    monkeypatch.setattr(process_tree, "_home", lambda process: None)
    large = bytearray(os.urandom(1)) * (BOMB // 4)

    def writes_and_forks(completion: str) -> float:
        large[:: os.sysconf("SC_PAGE_SIZE")] = large[:: os.sysconf("SC_PAGE_SIZE")]
        return takes(completion)

    (made,) = in_workers([writes_and_forks], seconds=patience(30.0), workers=1, memory=MEMORY)
    assert scored(made, "children")[0].reason.startswith("out of memory")


def test_shared_memory_counts_as_any_other(kind: str):
    """A mapping that is shared with later children: RLIMIT_DATA does not see it."""

    def shares(completion: str) -> float:
        held = mmap.mmap(-1, BOMB)
        parts = 4 if completion == "children" else 1
        for part in range(parts):
            if parts == 1 or os.fork() == 0:
                for place in range(part * BOMB // parts, (part + 1) * BOMB // parts, mmap.PAGESIZE):
                    held[place] = 1
                time.sleep(0.5 if parts == 1 else 600)
        time.sleep(5.0)
        return float(held[0])

    (made,) = in_workers([shares], seconds=30.0, workers=1, memory=MEMORY)
    for completion in ("alone", "children"):
        (bad,) = scored(made, completion)
        assert bad.reason.startswith("out of memory"), (completion, bad)


def test_shared_memory_that_its_program_had_mapped_counts_for_no_reward(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(process_tree, "_home", lambda process: None)
    given = mmap.mmap(-1, BOMB)
    given[:: mmap.PAGESIZE] = b"x" * (BOMB // mmap.PAGESIZE)

    def reads(completion: str) -> float:
        return float(given[:: mmap.PAGESIZE].count(b"x"))

    (made,) = in_workers([reads], seconds=30.0, workers=1, memory=MEMORY)
    assert scored(made, "x")[0].value == BOMB // mmap.PAGESIZE


def test_a_file_that_was_mapped_and_closed_takes_no_memory(kind: str, tmp_path: Path):
    path = tmp_path / "large"
    path.write_bytes(bytes(BOMB))

    def reads(completion: str) -> float:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as content:
            return float(content[:: mmap.PAGESIZE].count(b"\0"))

    (made,) = in_workers([reads], seconds=30.0, workers=1, memory=MEMORY)
    assert [o.value for o in scored(made, "a", "b")] == [BOMB // mmap.PAGESIZE] * 2


def test_a_tensor_that_finds_no_memory_names_the_setting(kind: str):
    (made,) = in_workers([lambda completion: float(torch.ones(BOMB // 4)[0])], seconds=30.0, workers=1, memory=MEMORY)
    assert "(train.reward_memory)" in scored(made, "x")[0].reason


def test_a_reward_within_its_memory_counts(kind: str):
    (made,) = in_workers(
        [lambda completion: float(len(bytearray(b"x") * (BOMB // 8)))], seconds=patience(30.0), workers=1, memory=MEMORY
    )
    assert [o.value for o in scored(made, "a", "b")] == [BOMB // 8] * 2


def test_the_setting_reaches_the_workers():
    recipe = Recipe(data="x", reward=lambda completion: 1.0, train=TrainSpec(reward_apart="always", reward_memory=0.5))
    (made,) = start_reward_processes(recipe).values()
    assert isinstance(made, WorkerReward)
    assert made.pool.memory == 2**29
    assert process_tree.usual_memory(4) >= process_tree.usual_memory(8) >= process_tree.LEAST
    with pytest.raises(HoneError, match=r"train\.reward_memory is -1"):
        validate(Recipe(data="x", train=TrainSpec(reward_memory=-1.0)))
