"""A benchmark's last line is its result, also where a time limit or an error ends it."""

import json
import signal
import subprocess
import sys

SLOW = """
import sys, time
from benchmarks.form import main, note, row

def measure(quick):
    yield note("a number", 1.5, unit="ms")
    yield row("a goal", 3.0, unit="x", goal=">= 2", ok=True)
    print("ready", file=sys.stderr, flush=True)
    if not quick:
        time.sleep(60)

sys.exit(main(measure, ""))
"""

BROKEN = SLOW.replace("time.sleep(60)", "raise IndexError('of a library')")


def started(*options: str, script: str = SLOW) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", script, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_a_whole_run_tells_its_rows():
    out, _ = (run := started("--quick")).communicate()
    assert run.returncode == 0
    assert [r["name"] for r in json.loads(out.splitlines()[-1])["rows"]] == ["a number", "a goal"]


def test_a_run_that_is_ended_tells_the_rows_it_has():
    run = started()
    assert run.stderr is not None
    assert run.stderr.readline() == "ready\n"
    run.send_signal(signal.SIGTERM)
    out, err = run.communicate()
    assert run.returncode == 1  # not all that was asked for was measured
    assert "ended by SIGTERM after 2 rows" in err
    found = json.loads(out.splitlines()[-1])
    assert [r["ours"] for r in found["rows"]] == [1.5, 3.0]
    assert found["machine"]["torch"]


def test_a_run_that_fails_tells_the_rows_it_has_and_why():
    out, err = (run := started(script=BROKEN)).communicate()
    assert run.returncode == 1
    assert "IndexError: of a library" in err
    assert [r["ours"] for r in json.loads(out.splitlines()[-1])["rows"]] == [1.5, 3.0]
