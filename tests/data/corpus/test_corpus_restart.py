"""A run killed at any moment and run again ends with the files of a run that was not."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
from patience import eventually
from prose import changed, files, prose, write

from hone.data.corpus import atomic, pipeline
from hone.data.corpus.pipeline import clean
from hone.data.corpus.settings import CorpusSettings
from hone.errors import HoneError

SCRIPT = """
import json, sys
from hone.data.corpus.pipeline import clean
from hone.data.corpus.settings import CorpusSettings
if __name__ == "__main__":
    print("begun", flush=True)
    clean(sys.argv[1:2], sys.argv[2], CorpusSettings.read(json.loads(sys.argv[3])), workers=int(sys.argv[4]))
"""


def corpus(tmp_path, documents: int = 120) -> tuple[str, CorpusSettings]:
    texts = [changed(prose(k % (documents * 3 // 4)), 0.003 * (k % 3), k) for k in range(documents)]
    evals = write(tmp_path / "e.jsonl", [prose(1), prose(800)])
    return write(tmp_path / "a.jsonl", texts), CorpusSettings(shard_bytes=4_000, evals=(evals,), vocab=300)


class Killed(BaseException):
    pass


def test_stopping_before_every_single_write_changes_nothing(tmp_path, monkeypatch):
    source, settings = corpus(tmp_path, 30)
    clean([source], tmp_path / "whole", settings)
    real, left = os.replace, [0]

    def replace(a, b):
        left[0] -= 1
        if left[0] < 0:
            raise Killed
        real(a, b)

    monkeypatch.setattr(atomic.os, "replace", replace)
    stops = 0
    for allowed in range(200):
        left[0] = allowed + 1  # a shard needs five in a row
        try:
            clean([source], tmp_path / "out", settings)
            break
        except Killed:
            stops += 1
    monkeypatch.undo()
    assert stops > 6
    assert files(tmp_path / "out") == files(tmp_path / "whole")


@pytest.mark.parametrize(("workers", "times"), [(2, 2), *(pytest.param(n, 5, marks=pytest.mark.slow) for n in (1, 2))])
def test_kill_9_at_many_moments_changes_nothing(tmp_path, workers, times):
    source, settings = corpus(tmp_path)
    clean([source], tmp_path / "whole", settings)
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, str(script), source, str(tmp_path / "out"), json.dumps(settings.plain()), str(workers)]
    killed = 0
    for attempt in range(3 * times):
        process = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert process.stdout is not None
        process.stdout.readline()
        work, before = tmp_path / "out" / "work", _done(tmp_path / "out")
        while process.poll() is None and (not work.exists() or _done(tmp_path / "out") < before + 6):
            time.sleep(0.002)
        time.sleep(0.02 * (attempt % times))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        killed += process.returncode == -signal.SIGKILL
        done = (tmp_path / "out" / "report.json").exists()
        if killed >= 2 and (done or killed == times):
            break
        if done:  # before it could be killed twice, as on a busy machine: once more from the beginning
            killed = 0
            shutil.rmtree(tmp_path / "out")
    assert killed >= 2
    clean([source], tmp_path / "out", settings, workers=workers)
    assert files(tmp_path / "out") == files(tmp_path / "whole")


def _done(out) -> int:
    return sum(len(list((out / name).glob("*"))) for name in ("work", "data"))


def test_workers_end_when_their_parent_is_killed(tmp_path):
    source, settings = corpus(tmp_path, 3000)
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, str(script), source, str(tmp_path / "out"), json.dumps(settings.plain()), "2"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
    while _done(tmp_path / "out") < 3:
        assert process.poll() is None
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    if not eventually(lambda: not there(process.pid)):
        os.killpg(process.pid, signal.SIGKILL)
        pytest.fail("a worker outlived its parent by long")


def there(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_finished_run_is_not_done_again(tmp_path, monkeypatch):
    source, settings = corpus(tmp_path, 20)
    first = clean([source], tmp_path / "out", settings)
    monkeypatch.setattr(pipeline, "_stages", lambda *a, **k: pytest.fail("worked again"))
    assert clean([source], tmp_path / "out", settings) == first
    assert not (tmp_path / "out" / "work").exists()


def test_changed_settings_or_inputs_are_refused_and_restart_begins_anew(tmp_path):
    source, settings = corpus(tmp_path, 20)
    out = tmp_path / "out"
    clean([source], out, settings)
    before = files(out)
    other = CorpusSettings.read({**settings.plain(), "near": 0.9, "rules": {**settings.rules, "min_words": 30}})
    with pytest.raises(HoneError, match=r"settings \(near, rules.min_words\).*--restart"):
        clean([source], out, other)
    assert files(out) == before
    said: list[str] = []
    clean([source], out, other, restart=True, say=said.append)
    assert "starting anew" in said[0]
    clean([source], tmp_path / "fresh", other)
    assert files(out) == files(tmp_path / "fresh")
    os.utime(source, ns=(1, 1))
    with pytest.raises(HoneError, match="input files"):
        clean([source], out, other)
    with pytest.raises(HoneError, match="sources"):
        clean([source, write(tmp_path / "b.jsonl", [prose(1)])], out, other)


def test_a_folder_with_other_files_is_refused_and_left_alone(tmp_path):
    source, settings = corpus(tmp_path, 5)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("x")
    for restart in (False, True):
        with pytest.raises(HoneError, match="holds other files"):
            clean([source], tmp_path / "mine", settings, restart=restart)
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "x"


def test_two_runs_do_not_work_in_one_folder(tmp_path):
    source, settings = corpus(tmp_path, 5)
    with atomic.locked(tmp_path / "out"), pytest.raises(HoneError, match="another process"):
        clean([source], tmp_path / "out", settings)
    clean([source], tmp_path / "out", settings)
