import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from each import each
from other_user import python_of_nobody
from patience import eventually, patience, running

from benchmarks.hostile import INPUTS, PROGRAMS, aimed, groups_of, judge, unsandboxed, world
from benchmarks.hostile.soak import below, megabytes
from hone.errors import HoneError
from hone.reward.sandbox.limits import BackendOptions, interpreter
from hone.reward.sandbox.native import NativeSandbox
from hone.reward.sandbox.sandbox import Call, Language, Program, Raised, Returned, Sandbox, SandboxError, SandboxLimits

ROOT = Path(__file__).parents[2]
MIB = 1 << 20
pytestmark = pytest.mark.usefixtures("needs_sandbox")


@pytest.fixture(scope="module")
def places():
    with world() as found:
        yield found


@pytest.fixture(scope="module")
def sandbox():
    with Sandbox(limits=SandboxLimits(seconds=5, memory=256 * MIB), slots=2) as opened:
        yield opened


def by_id(program):
    return program.id


def pool(**how):
    limits = how.pop("limits", SandboxLimits(seconds=3))
    wanted = BackendOptions(limits=limits, slots=how.pop("slots", 2), python=interpreter(), packages=())
    return Sandbox(limits=limits, backend=NativeSandbox(wanted, **how))


def wrong_about(program, verdict):
    """What the sandbox got wrong, or nothing."""
    if verdict.escaped:
        return f"{program.id} escaped: {verdict.finished.stdout[:300]!r}"
    if verdict.passed != ("ok" in program.marks):
        return f"{program.id} passed: {verdict.passed}: {verdict.finished}"
    return ""


def test_there_are_programs_enough_and_no_two_alike():
    assert len({p.code for p in PROGRAMS}) == len({p.id for p in PROGRAMS}) == len(PROGRAMS) >= 120
    assert {p.kind for p in PROGRAMS} == set("RCVH")


@each("program", [p for p in PROGRAMS if "control" in p.marks], ids=by_id)
def test_a_harmless_probe_succeeds_without_the_sandbox(program, places):
    assert "ESCAPED" in unsandboxed(aimed(program, places))


@each("program", [p for p in PROGRAMS if not p.marks & {"long", "heavy"}], ids=by_id)
def test_a_hostile_program_gets_nothing(program, sandbox, places):
    assert not wrong_about(program, judge(sandbox, aimed(program, places)))


def test_programs_that_never_end_are_ended_many_at_once(places):
    long = [p for p in PROGRAMS if "long" in p.marks]
    verdicts = {}
    with Sandbox(limits=SandboxLimits(seconds=0.4), slots=4) as sandbox:

        def work(mine):
            for program in mine:
                verdicts[program.id] = judge(sandbox, aimed(program, places))

        threads = [threading.Thread(target=work, args=(long[i::4],)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not [w for p in long if (w := wrong_about(p, verdicts[p.id]))]
    assert {verdicts[p.id].finished.limit for p in long} <= {"time", "memory", ""}
    assert max(verdicts[p.id].finished.seconds for p in long) < patience(10)


@pytest.mark.slow
@pytest.mark.parametrize(
    "how", [{}, {"cgroup": False}, {"user": False}], ids=["all", "no cgroups", "no user namespace"]
)
def test_every_hostile_program_gets_nothing_whatever_the_machine_lacks(how, places):
    if "user" in how and os.geteuid() != 0:
        pytest.skip("without a user namespace it takes root")
    with pool(**how) as sandbox:
        wrong = [wrong_about(p, judge(sandbox, aimed(p, places))) for p in PROGRAMS]
    assert not [w for w in wrong if w]


def test_a_job_finds_nothing_of_an_earlier_one_in_its_slot(places):
    leave, look = (["C058", "C060", "C081"], ["C059", "C061", "C082"])
    named = {p.id: p for p in PROGRAMS}
    with Sandbox(slots=1) as sandbox:  # one slot: the second job surely follows the first in it
        for first in leave:
            for second in look:
                assert judge(sandbox, named[first].code).passed
                verdict = judge(sandbox, named[second].code)
                assert verdict.passed
                assert not verdict.escaped


def test_a_program_has_the_usual_signals_whatever_the_trainer_ignores():
    tells = """
import signal
def add(a, b): return [s for s in range(1, 32) if s not in (13, 25) and signal.getsignal(s) is signal.SIG_IGN]
"""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        with Sandbox(slots=1) as sandbox:
            assert sandbox.run(Program(source=tells, calls=[Call("add", (1, 2))])).results == (Returned([]),)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_program_finds_all_files_whatever_the_trainer_hides_from_others():
    shell, odd = (
        Language(file="main.sh", run=["sh", "main.sh"]),
        "import colorsys\nprint(colorsys.rgb_to_hsv(0, 0, 42)[2])",
    )
    before = os.umask(0o077)
    try:
        with Sandbox(slots=1) as sandbox:
            found = [sandbox.run(Program(source="echo 42", stdin="", language=shell)).stdout]
            found += [sandbox.run(Program(source=odd, stdin="")).stdout]
    finally:
        os.umask(before)
    assert found == [b"42\n"] * 2


def test_zombies_do_not_stay_charged_to_the_next_job():
    bomb = """
import os
made = 0
for _ in range(200):
    try:
        if os.fork() == 0: os._exit(0)  # never waited for
        made += 1
    except OSError: break
def add(a, b): return made
"""
    limits = SandboxLimits(seconds=5, processes=20)
    with Sandbox(limits=limits, slots=1) as sandbox:
        made = [sandbox.run(Program(source=bomb, calls=[Call("add", (1, 2))])).results for _ in range(3)]
    ((first,), *others) = made
    assert isinstance(first, Returned)
    assert 15 <= first.value <= 20
    assert others == [(first,)] * 2


GREEDY = """
import os, time
for _ in range(6):
    if os.fork() == 0:
        held = []
        for _ in range(60):
            held.append(bytearray(1 << 20))
            time.sleep(0.01)  # whoever looks on sees it grow, on a busy machine too
        time.sleep(20)
time.sleep(20)
"""


@pytest.mark.parametrize("cgroup", [True, False], ids=["as the machine has it", "without cgroups"])
def test_processes_together_stay_within_the_memory_limit(cgroup):
    limits = SandboxLimits(seconds=1.5 if cgroup else 6, memory=200 * MIB)  # without cgroups it does not come to that
    others = set(below(os.getpid()))  # what tests before this one have started
    with pool(limits=limits, cgroup=cgroup, slots=1) as sandbox:
        seen = []
        done = threading.Event()

        def look():
            while not done.wait(0.005):
                seen.append(megabytes(set(below(os.getpid())) - others))

        watcher = threading.Thread(target=look)
        watcher.start()
        finished = sandbox.run(Program(source=GREEDY))
        done.set()
        watcher.join()
        assert sandbox.run(Program(source="def f(): return 1", calls=[Call("f")])).results == (Returned(1),)
    assert finished.limit == "memory" or cgroup  # the kernel may end children only, and leave the rest to the clock
    assert finished.limit in ("memory", "time")
    assert max(seen) < 330  # 6 x 60 and the interpreters would be 420


LIMITS = {
    "memory.limit_in_bytes": "209715200", "memory.swappiness": "0", "cpu.cfs_quota_us": "50000", "pids.max": "9",
    "memory.max": "209715200", "memory.swap.max": "0", "cpu.max": "50000 100000",
}  # fmt: skip


def test_the_kernel_has_the_limits_of_a_slot():
    limits = SandboxLimits(memory=200 * MIB, processes=7, cores=0.5)
    own = NativeSandbox(BackendOptions(limits=limits, slots=1, python=interpreter(), packages=()))
    try:
        slot = own.open_slot()
        found = {p.name: p.read_text().strip() for f in slot.folders for p in Path(f).iterdir() if p.name in LIMITS}
        slot.close()
    finally:
        own.close()
    assert found == {name: LIMITS[name] for name in found}
    assert len(found) >= 3 or own.home is None


LEFT = """
import gc, os
from benchmarks.hostile import groups_of
from benchmarks.hostile.soak import below
from hone.reward.sandbox.sandbox import Program, Sandbox, SandboxLimits

def held():
    gc.collect()
    return len(os.listdir("/proc/self/fd")), sorted(below(os.getpid())), sorted(groups_of(os.getpid()))

before = held()
with Sandbox(limits=SandboxLimits(seconds=0.3), slots=2) as sandbox:
    for source in ("import os\\nwhile True: os.fork()", "import os, time\\nif os.fork() == 0: time.sleep(99)", "1/0"):
        sandbox.run(Program(source=source))
assert held() == before, (before, held())
"""


def test_nothing_is_left_behind():  # in a process of its own: the other sandboxes of this one open and close files too
    done = subprocess.run([sys.executable, "-c", LEFT], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


KILLED = """
import os, sys, threading
from hone.reward.sandbox.sandbox import *
s = Sandbox(limits=SandboxLimits(seconds=60), slots=1)
program = Program(source="import time, os\\nos.fork()\\ntime.sleep(60)")
threading.Thread(target=s.run, args=[program], daemon=True).start()
print(os.getpid(), flush=True)
sys.stdin.read()
"""


def test_everything_ends_with_a_client_that_is_killed():
    command = [sys.executable, "-c", KILLED]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT) as client:
        assert client.stdout is not None
        pid = int(client.stdout.readline())
        assert eventually(lambda: len(below(pid)) >= 5)  # server, parent, slot, program and its child
        started = below(pid)
        client.send_signal(signal.SIGKILL)
        client.wait()
    assert eventually(lambda: not any(Path(f"/proc/{p}").exists() for p in started))
    assert not groups_of(pid)


def slot_of(others):
    """The parent of the jobs of the only sandbox that was opened since: the child of its server."""
    _, parent, *_ = [p for p in below(os.getpid()) if p not in others]  # each before its children
    return parent


def test_a_slot_that_dies_is_replaced():
    good = Program(source="def f(): return 1", calls=[Call("f")])
    others = set(below(os.getpid()))
    with Sandbox(slots=1) as sandbox:
        for _ in range(3):
            assert sandbox.run(good).results == (Returned(1),)
            parent = slot_of(others)
            ended = [parent, *below(parent)]  # the waiting job holds its connection too
            os.kill(parent, signal.SIGKILL)
            assert eventually(lambda ended=ended: not any(map(running, ended)))


def test_a_slot_that_dies_under_a_program_is_no_verdict():
    others = set(below(os.getpid()))
    with Sandbox(slots=1) as sandbox:
        parent = slot_of(others)
        before = len(below(parent))

        def kill():
            assert eventually(lambda: len(below(parent)) > before)  # the program has a child: it runs
            os.kill(parent, signal.SIGKILL)

        killer = threading.Thread(target=kill)
        killer.start()
        with pytest.raises(SandboxError, match="died: no verdict on its program"):
            sandbox.run(Program(source="import os, time\nos.fork()\ntime.sleep(60)"), seconds=60)
        killer.join()
        assert sandbox.run(Program(source="def f(): return 1", calls=[Call("f")])).results == (Returned(1),)


FORKED = """
import os, sys
from hone.reward.sandbox.sandbox import Call, Program, Returned, Sandbox, SandboxError
good = Program(source="def f(): return 1", calls=[Call("f")])
sandbox, (r, w) = Sandbox(slots=1), os.pipe()
pid = os.fork()
if not pid:
    try: sandbox.run(good)
    except SandboxError as error: print(error, flush=True)
    sandbox.close()
    os.close(w)
    os.read(r, 1)  # lives on, with copies of all descriptors
    os._exit(0)
os.close(r)
done = sandbox.run(good)
print(done.results == (Returned(1),), repr(done.limit), flush=True)
os.close(w)
os.waitpid(pid, 0)
sandbox.close()
"""


def test_a_process_that_is_forked_is_refused_and_cannot_end_its_parents_sandbox():
    done = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True, cwd=ROOT)
    told = {"the sandbox was opened before a fork: open one in the process that uses it", "True ''"}
    assert set(done.stdout.splitlines()) == told, done


THIRSTY = """
import os, time
def f(seconds):
    end, (r, w) = time.monotonic() + seconds, os.pipe()
    for _ in range(4):
        if os.fork() == 0:
            while time.monotonic() < end or time.process_time() < 0.01: pass
            os.write(w, b'%.4f ' % time.process_time()); os._exit(0)
    for _ in range(4): os.wait()
    return sum(map(float, os.read(r, 1000).split()))
"""


def test_processes_together_stay_within_the_share_of_the_processor():
    with Sandbox(limits=SandboxLimits(cores=0.2, seconds=5), slots=1) as sandbox:
        if any(p.replaced for p in sandbox.report() if p.name == "CPU"):
            pytest.skip("no cpu controller here: seconds of CPU are counted in its place")
        (used,) = sandbox.run(Program(source=THIRSTY, calls=[Call("f", (0.6,))])).results
    assert isinstance(used, Returned)
    assert 0.02 < used.value < 0.25  # two processors alone would have 1.2 seconds for the four of them


@pytest.mark.skipif(os.geteuid() != 0, reason="the tests do not run as root: all of them are this test")
@pytest.mark.parametrize("which", ["some", pytest.param("all", marks=pytest.mark.slow)])
def test_it_holds_for_an_unprivileged_user(which):
    python = python_of_nobody(interpreter(), "/usr/bin/python3")
    code = """
import json, sys
from benchmarks.hostile import PROGRAMS, aimed, judge, world
from hone.reward.sandbox.sandbox import SandboxLimits, Sandbox
some = [p for p in PROGRAMS if p.kind in "CH" and p.id not in ("C018", "C054")] + [
    p for p in PROGRAMS if p.id in ("R008", "R014", "R018", "R021", "R023", "R026", "V029", "V036", "V050")]
wanted = PROGRAMS if sys.argv[1] == "all" else some[::2]
found = {}
with world() as places, Sandbox(limits=SandboxLimits(seconds=5)) as sandbox:
    for p in wanted:
        v = judge(sandbox, aimed(p, places))
        if v.escaped or v.passed != ("ok" in p.marks): found[p.id] = repr(v)
    print(json.dumps([len(wanted), found, [q.name for q in sandbox.report() if q.replaced]]))
"""
    done = subprocess.run(
        [python, "-c", code, which],
        capture_output=True,
        text=True,
        cwd="/",
        env={"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"},
        user=65534,
        group=65534,
        extra_groups=[],
    )
    assert done.returncode == 0, done.stderr[-2000:]
    count, found, _ = json.loads(done.stdout)
    assert count > (len(PROGRAMS) - 1 if which == "all" else 45)
    assert not found


@pytest.mark.skipif(os.geteuid() != 0, reason="without a user namespace it takes root")
def test_root_can_do_without_a_user_namespace(places):
    with pool(user=False) as sandbox:
        for program in PROGRAMS:
            if program.id in ("C001", "C011", "C030", "C031", "C041", "C061", "H001", "H006"):
                assert not wrong_about(program, judge(sandbox, aimed(program, places)))
        assert "another user of the machine" in sandbox.report()[0].how


def test_a_script_reads_its_input_and_its_output_is_data(sandbox):
    source = "import sys\nprint(__name__, sum(map(int, sys.stdin)))\nsys.stdout.buffer.write(bytes([255, 0]))"
    done = sandbox.run(Program(source=source, stdin="1\n2\n39\n"))
    assert done.stdout == b"\xff\x00__main__ 42\n", done
    assert (done.loaded, done.status, done.limit) == (True, 0, "")
    failed = sandbox.run(Program(source="print(input())\nraise ValueError('no')", stdin="x"))
    assert failed.stdout == b"x\n"
    assert not failed.loaded
    assert failed.error == "ValueError: no"
    assert b"Traceback" in failed.stderr


def test_a_script_finds_what_the_site_module_adds_and_randomness_of_its_own(sandbox):
    source = "import random, sys\nprint(random.random(), len(sys.argv))\nexit()\nprint('no')"
    texts = {sandbox.run(Program(source=source, stdin="")).stdout for _ in range(6)}
    assert len(texts) == 6
    assert all(text.endswith(b" 1\n") for text in texts)


def test_a_stray_byte_on_the_channel_voids_every_value(sandbox):
    source = "import os\ndef f(x):\n    if x == 2: os.write(3, b'\\0'); os._exit(0)\n    return x"
    done = sandbox.run(Program(source=source, calls=[Call("f", (1,)), Call("f", (2,))]))
    assert (done.results, done.limit) == ((), "result")
    assert done.error == "the program wrote to the channel of its results"


def test_many_large_values_are_too_many(sandbox):
    calls = [Call("f")] * 30
    done = sandbox.run(Program(source="def f(): return 'x' * 900_000", calls=calls))
    assert done.limit == "result"
    assert done.results == ()


def test_a_large_input_arrives_whole(sandbox):
    text = b"x" * (8 * MIB)
    done = sandbox.run(Program(source="import sys\nprint(len(sys.stdin.buffer.read()))", stdin=text))
    assert done.stdout == f"{len(text)}\n".encode()


def test_other_languages_by_configuration(sandbox):
    shell = Language(file="main.sh", run=["sh", "main.sh"])
    done = sandbox.run(Program(source="read x; echo $((x * 2))", stdin="21\n", language=shell))
    assert done.stdout == b"42\n"
    missing = Language(file="x", run=["no-such-interpreter", "x"])
    assert sandbox.run(Program(source="", language=missing)).status != 0


@pytest.mark.skipif(not os.path.exists("/usr/bin/gcc"), reason="no C compiler")
def test_a_compiled_language(sandbox):
    c = Language(file="main.c", build=[["gcc", "-o", "main", "main.c"]], run=["./main"])
    source = '#include <stdio.h>\nint main() { int x; scanf("%d", &x); printf("%d\\n", x + 1); }'
    done = sandbox.run(Program(source=source, stdin="41", language=c))
    assert done.stdout == b"42\n", done
    broken = sandbox.run(Program(source="int main(", stdin="", language=c))
    assert not broken.loaded
    assert "gcc ended with 1" in broken.error


def test_values_cross_in_both_directions(sandbox):
    value = [1, -(2**80), 2.5, float("inf"), True, None, "\ud800é", b"\xff", (1, (2,)), {1, 2}, {"k": [1], (1, 2): 3j}]
    done = sandbox.run(Program(source="def same(x, *, y): return [x, y]", calls=[Call("same", [value], {"y": 1})]))
    assert done.results == (Returned([value, 1]),)


def test_errors_of_calls_are_told_and_the_next_call_is_still_asked(sandbox):
    source = "def f(x):\n    if x == 1: raise ValueError('one')\n    if x == 2: raise SystemExit(0)\n    return x"
    done = sandbox.run(Program(source=source, calls=[Call("f", (x,)) for x in (1, 2, 3)] + [Call("g")]))
    raised = (Raised("ValueError: one"), Raised("SystemExit: 0"), Returned(3), Raised("KeyError: 'g'"))
    assert done.results == raised


def test_calls_before_a_hang_count(sandbox):
    source = "def f(x):\n    while x: pass\n    return x"
    done = sandbox.run(Program(source=source, calls=[Call("f", (0,)), Call("f", (1,))]), seconds=0.3)
    assert done.results == (Returned(0),)
    assert done.limit == "time"
    assert 0.25 < done.seconds < patience(3)


BUSY = "import os, time\nend = time.time() + 4\nwhile time.time() < end: pass"
WORK = """
import time
def f():
    while time.process_time() < 0.15: pass
    return 1
"""


@pytest.mark.slow
def test_a_busy_machine_does_not_make_an_honest_program_wrong():
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})  # the sandbox and what keeps it waiting share one processor
    hogs = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(3)]
    try:
        with Sandbox(slots=1) as sandbox:
            done = sandbox.run(Program(source=WORK, calls=[Call("f")]), seconds=0.3)
            asleep = sandbox.run(Program(source="import time\ntime.sleep(60)"), seconds=0.3)
    finally:
        os.sched_setaffinity(0, cores)
        for hog in hogs:
            hog.kill()
            hog.wait()
    assert done.results == (Returned(1),)
    assert done.seconds > 0.3
    assert asleep.limit == "time"
    assert asleep.seconds < 0.8


def test_threads_share_a_sandbox_and_every_one_gets_its_own_answer():
    wrong = []
    with Sandbox(slots=2) as sandbox:

        def work(n):
            for i in range(6):
                done = sandbox.run(Program(source=f"def f(x): return x + {n}", calls=[Call("f", (i,))]))
                wrong.extend([] if done.results == (Returned(i + n),) else [done])

        threads = [threading.Thread(target=work, args=(100 * n,)) for n in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong


def test_what_is_asked_wrongly_is_refused_with_the_remedy(sandbox):
    with pytest.raises(HoneError, match=r"memory is 1000: an interpreter needs"):
        SandboxLimits(memory=1000)
    with pytest.raises(HoneError, match=r"seconds is 0: give a number above 0"):
        SandboxLimits(seconds=0)
    for name in ("docker", "ftp://host"):
        with pytest.raises(HoneError, match=f"no sandbox backend '{name}': use native or an http"):
            Sandbox(backend=name)
    with pytest.raises(HoneError, match="functions can be called in a Python module only"):
        sandbox.run(Program(source="", stdin="", calls=[Call("f")]))
    closed = Sandbox(slots=1)
    closed.close()
    closed.close()
    with pytest.raises(SandboxError, match="closed"):
        closed.run(Program(source=""))


def test_a_machine_that_lacks_a_protection_is_reported_and_refused_on_request():
    with pool(cgroup=False) as sandbox:
        replaced = {p.name for p in sandbox.report() if p.replaced}
        assert replaced == {"memory and processes", "CPU"}
    limits = SandboxLimits()
    backend = NativeSandbox(BackendOptions(limits=limits, slots=1, python=interpreter(), packages=()), cgroup=False)
    with pytest.raises(SandboxError, match=r"lacks memory and processes .*: open it where cgroups can be written"):
        Sandbox(limits=limits, backend=backend, strict=True)


def test_inputs_do_not_repeat_what_a_guess_would_pass():
    sums = [a + b for a, b in INPUTS]
    assert not {0, 1, 3, 7} & set(sums[:3])
